"""Prints the object of each mode, then its parts in the order of their arrival."""

import json
from typing import Literal

import instructor
from contract import URL
from openai import OpenAI
from pydantic import BaseModel


class Review(BaseModel):
    mood: Literal["happy", "sad"]
    stars: Literal[1, 2, 3, 4, 5]


report = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=URL, api_key="none"), mode=mode)
    review = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Review the story of the fox."}],
        "temperature": 0,
        "response_model": Review,
    }
    objects = [client.create(**review), *client.create_partial(**review)]
    report[mode.name] = [value.model_dump(mode="json") for value in objects]
print(json.dumps(report))
