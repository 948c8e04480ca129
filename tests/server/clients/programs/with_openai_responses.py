import json

from contract import HI, QUESTION, TOOL, URL, report, weather
from openai import OpenAI

client = OpenAI(base_url=URL, api_key="none")


def whole(items, **options):
    return client.responses.create(input=items, temperature=0, store=False, **options)


def streamed(items, **options):
    """The parts of the text, and the response that they make."""
    with client.responses.stream(input=items, temperature=0, store=False, **options) as events:
        parts = [event.delta for event in events if event.type == "response.output_text.delta"]
        return parts, events.get_final_response()


def results(response):
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": weather(**json.loads(item.arguments))}
        for item in response.output
        if item.type == "function_call"
    ]


asked = [{"role": "user", "content": QUESTION}]
demo, agent = {"model": "demo", "max_output_tokens": 40}, {"model": "agent", "tools": [{"type": "function", **TOOL}]}
call = whole(asked, **agent)
answer = whole([*asked, *call.output, *results(call)], **agent).output_text
_, call = streamed(asked, **agent)
answer_parts, _ = streamed([*asked, *call.output, *results(call)], **agent)
report(whole(HI, **demo).output_text, streamed(HI, **demo)[0], answer, answer_parts)
