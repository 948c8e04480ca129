// The AI SDK, over its OpenAI-compatible provider; with a third argument "responses", over OpenAI's own.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, protocol] = process.argv.slice(2);
const server = { name: "onward", baseURL: `${url}/v1`, apiKey: "none" };
const provider = protocol === "responses" ? createOpenAI(server) : createOpenAICompatible(server);
const cities = [];
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    cities.push(city);
    return `${city} has rain`;
  },
});
const demo = { model: provider("demo"), prompt: "Hi", temperature: 0, maxOutputTokens: 40 };
const prompt = "What is the weather in Oslo and in Bergen?";
const agent = { model: provider("agent"), prompt, tools: { weather }, stopWhen: stepCountIs(3) };

async function streamed(options) {
  const parts = [];
  for await (const part of streamText({ ...options, onError: ({ error }) => { throw error; } }).textStream) parts.push(part);
  return parts;
}

const { text } = await generateText(demo);
const parts = await streamed(demo);
const { text: answer } = await generateText(agent);
const answer_parts = await streamed(agent);
console.log(JSON.stringify({ text, parts, answer, answer_parts, cities }));
