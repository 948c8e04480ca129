import asyncio

from contract import HI, QUESTION, URL, report, weather
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

server = {"api_base": URL, "api_key": "none", "temperature": 0, "is_chat_model": True}
demo = OpenAILike(model="demo", max_tokens=40, **server)
caller = OpenAILike(model="agent", is_function_calling_model=True, **server)


async def whole(streaming):
    agent = FunctionAgent(tools=[weather], llm=caller, streaming=streaming)
    handler = agent.run(QUESTION)
    parts = [event.delta async for event in handler.stream_events() if isinstance(event, AgentStream) and event.delta]
    return str(await handler), parts


async def main():
    hi = [ChatMessage(HI)]
    text, parts = demo.chat(hi).message.content, [part.delta for part in demo.stream_chat(hi)]
    answer, _ = await whole(streaming=False)
    _, answer_parts = await whole(streaming=True)
    report(text, parts, answer, answer_parts)


asyncio.run(main())
