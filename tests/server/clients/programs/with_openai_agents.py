"""OpenAI's agents, with responses; with a second argument "chat", with chats."""

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
    set_tracing_disabled,
)
from contract import HI, QUESTION, URL, report, weather
from openai import AsyncOpenAI

set_default_openai_client(AsyncOpenAI(base_url=URL, api_key="none"))
set_default_openai_api("chat_completions" if "chat" in sys.argv else "responses")
set_tracing_disabled(True)  # traces go to OpenAI


async def streamed(agent, question):
    result = Runner.run_streamed(agent, question)
    events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
    return [event.delta for event in events if event.type == "response.output_text.delta"]


async def main():
    brief = ModelSettings(temperature=0, max_tokens=40)
    demo = Agent(name="demo", model="demo", model_settings=brief)
    agent = Agent(name="agent", model="agent", tools=[function_tool(weather)])
    text = (await Runner.run(demo, HI)).final_output
    answer = (await Runner.run(agent, QUESTION)).final_output
    report(text, await streamed(demo, HI), answer, await streamed(agent, QUESTION))


asyncio.run(main())
