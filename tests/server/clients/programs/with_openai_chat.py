import json

from contract import HI, QUESTION, TOOL, URL, report, weather
from openai import OpenAI

client = OpenAI(base_url=URL, api_key="none")
tools = [{"type": "function", "function": TOOL}]


def whole(messages, **options):
    return client.chat.completions.create(messages=messages, temperature=0, **options).choices[0].message


def streamed(messages, **options):
    """The parts of the text, and the message that they make."""
    with client.chat.completions.stream(messages=messages, temperature=0, **options) as events:
        parts = [event.delta for event in events if event.type == "content.delta"]
        return parts, events.get_final_completion().choices[0].message


def results(message):
    return [
        {"role": "tool", "tool_call_id": call.id, "content": weather(**json.loads(call.function.arguments))}
        for call in message.tool_calls
    ]


hi, asked = [{"role": "user", "content": HI}], [{"role": "user", "content": QUESTION}]
demo, agent = {"model": "demo", "max_completion_tokens": 40}, {"model": "agent", "tools": tools}
call = whole(asked, **agent)
answer = whole([*asked, call, *results(call)], **agent).content
_, call = streamed(asked, **agent)
answer_parts, _ = streamed([*asked, call, *results(call)], **agent)
report(whole(hi, **demo).content, streamed(hi, **demo)[0], answer, answer_parts)
