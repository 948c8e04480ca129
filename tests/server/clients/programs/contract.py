"""The contract of the programs in this folder: `python with_X.py URL` prints one JSON object.

text, parts: the answer of the model "demo" to HI, whole, and streamed in parts; at temperature 0, at most 40 tokens.
answer, answer_parts: the answer of the model "agent" to QUESTION, whole and streamed, with `weather` as a tool.
cities: the arguments of the calls of `weather` in both.

A program has no settings except the server's address and the names of its models.
"""

import json
import sys
from collections.abc import Iterable

URL = f"{sys.argv[1]}/v1"
HI = "Hi"
QUESTION = "What is the weather in Oslo and in Bergen?"
cities: list[str] = []


def weather(city: str) -> str:
    """The weather in a city."""
    cities.append(city)
    return f"{city} has rain"


TOOL = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def report(text: str, parts: Iterable[str], answer: str = "", answer_parts: Iterable[str] = ()) -> None:
    values = {"text": text, "parts": list(parts), "answer": answer, "answer_parts": list(answer_parts)}
    print(json.dumps({**values, "cities": cities}))
