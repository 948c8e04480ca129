"""LangChain, with chats; with a second argument "responses", with responses."""

import sys

from contract import HI, QUESTION, URL, report, weather
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

server = {"base_url": URL, "api_key": "none", "temperature": 0, "use_responses_api": "responses" in sys.argv}
demo = ChatOpenAI(model="demo", max_completion_tokens=40, **server)
agent = ChatOpenAI(model="agent", **server).bind_tools([tool(weather)])


def whole(chat, messages):
    return chat.invoke(messages)


def streamed(chat, messages):
    """The parts of the text, and the message that they make."""
    chunks = list(chat.stream(messages))
    message = chunks[0]
    for chunk in chunks[1:]:
        message = message + chunk
    return [text for chunk in chunks if (text := str(chunk.text))], message


def results(message):
    return [ToolMessage(weather(**call["args"]), tool_call_id=call["id"]) for call in message.tool_calls]


asked = [HumanMessage(QUESTION)]
call = whole(agent, asked)
answer = str(whole(agent, [*asked, call, *results(call)]).text)
_, call = streamed(agent, asked)
answer_parts, _ = streamed(agent, [*asked, call, *results(call)])
report(str(whole(demo, HI).text), streamed(demo, HI)[0], answer, answer_parts)
