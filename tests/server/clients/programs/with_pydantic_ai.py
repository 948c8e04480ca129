"""Pydantic AI, with chats; with a second argument "responses", with responses."""

import asyncio
import sys

from contract import HI, QUESTION, URL, report, weather
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=URL, api_key="none")
Model = OpenAIResponsesModel if "responses" in sys.argv else OpenAIChatModel
demo = Agent(Model("demo", provider=provider), model_settings={"temperature": 0, "max_tokens": 40})
agent = Agent(Model("agent", provider=provider), tools=[weather])


async def whole(agent, question):
    return (await agent.run(question)).output


async def streamed(agent, question):
    async with agent.run_stream(question) as result:
        return [part async for part in result.stream_text(delta=True, debounce_by=None)]


async def main():
    texts = await whole(demo, HI), await streamed(demo, HI)
    report(*texts, await whole(agent, QUESTION), await streamed(agent, QUESTION))


asyncio.run(main())
