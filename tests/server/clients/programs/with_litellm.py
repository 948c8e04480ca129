import json

import litellm
from contract import HI, QUESTION, TOOL, URL, report, weather

server = {"api_base": URL, "api_key": "none", "temperature": 0}
demo = {**server, "model": "openai/demo", "max_tokens": 40}
agent = {**server, "model": "openai/agent", "tools": [{"type": "function", "function": TOOL}]}


def whole(messages, **options):
    return litellm.completion(messages=messages, **options).choices[0].message


def streamed(messages, **options):
    """The parts of the text, and the message that they make."""
    chunks = list(litellm.completion(messages=messages, stream=True, **options))
    parts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    return parts, litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message


def results(message):
    return [
        {"role": "tool", "tool_call_id": call.id, "content": weather(**json.loads(call.function.arguments))}
        for call in message.tool_calls
    ]


hi, asked = [{"role": "user", "content": HI}], [{"role": "user", "content": QUESTION}]
call = whole(asked, **agent)
answer = whole([*asked, call, *results(call)], **agent).content
_, call = streamed(asked, **agent)
answer_parts, _ = streamed([*asked, call, *results(call)], **agent)
report(whole(hi, **demo).content, streamed(hi, **demo)[0], answer, answer_parts)
