"""Extractions: a text, a request that names keys, and the JSON object that answers it.

Besides stories there are notes: one or two sentences with a few facts, digits included.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from . import words
from .facts import draw_name, invented_name
from .grammar import expand
from .story import Question, Story

Value = str | int | list[str] | dict[str, str]


@dataclass(frozen=True)
class Note:
    """A short text with its facts by key, and questions that it answers."""

    text: str
    fields: dict[str, str | int]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Extraction:
    """A request in words and its answer as JSON text."""

    request: str
    answer: str


# (text, keys in the order of the text, questions as (question, short, full))
NOTES = (
    (
        "{name} [bought|sold] {count} {item} at the {place} on {day}.",
        "name count item place day",
        (
            ("How many {item} were there?", "{count}", "There were {count} {item}."),
            ("Where was {name}?", "at the {place}", "{name} was at the {place}."),
            ("When was {name} at the {place}?", "on {day}", "{name} was at the {place} on {day}."),
        ),
    ),
    (
        "[On {day}|Last {day}], {name} the {kind} {carried} a {color} {object} to the {place}. [It was {weather}|The "
        "weather was {weather}].",
        "day name kind color object place weather",
        (
            (
                "What did {name} take to the {place}?",
                "a {color} {object}",
                "{name} took a {color} {object} to the {place}.",
            ),
            ("What was the weather like?", "{weather}", "The weather was {weather}."),
            ("Who is {name}?", "a {kind}", "{name} is a {kind}."),
        ),
    ),
    (
        "[Dear|Hello] {friend}, [please|could you] bring {count} {item} to the {place} on {day}. [Thank "
        "you|Yours|Love], {name}.",
        "friend count item place day name",
        (
            ("Who wrote the letter?", "{name}", "{name} wrote the letter."),
            ("How many {item} does {name} want?", "{count}", "{name} wants {count} {item}."),
            ("Who should bring the {item}?", "{friend}", "{friend} should bring the {item}."),
        ),
    ),
    (
        "{name} is {age} years old and [works as|is] a {kind}. {name} lives in {city} and likes {food}.",
        "name age kind city food",
        (
            ("How old is {name}?", "{age}", "{name} is {age} years old."),
            ("Where does {name} live?", "in {city}", "{name} lives in {city}."),
            ("What does {name} like?", "{food}", "{name} likes {food}."),
        ),
    ),
    (
        "The {place} opens at {hour} on {day}. [Ask for {name}|The person to ask is {name}], who has the {color} "
        "{object}.",
        "place hour day name color object",
        (
            ("When does the {place} open?", "at {hour}", "The {place} opens at {hour} on {day}."),
            ("Who has the {object}?", "{name}", "{name} has the {color} {object}."),
            ("What color is the {object}?", "{color}", "The {object} is {color}."),
        ),
    ),
    (
        "{name} and {friend} met [at|near] the {place}. {name} gave {friend} a {color} {object}, and {friend} felt "
        "{feeling}.",
        "name friend place color object feeling",
        (
            ("What did {name} give to {friend}?", "a {color} {object}", "{name} gave {friend} a {color} {object}."),
            ("Who felt {feeling}?", "{friend}", "{friend} felt {feeling}."),
            ("Where did they meet?", "at the {place}", "They met at the {place}."),
        ),
    ),
)


def make_note(rng: random.Random) -> Note:
    """Draw a note; every listed field is stated in its text."""
    numbers: dict[str, str | int] = {
        "count": rng.randint(2, 99),
        "age": rng.randint(5, 99),
        "hour": rng.randint(6, 11),
    }
    names = [draw_name(rng, rng.random() < 0.5) for _ in range(2)]
    while names[0] == names[1]:
        names[1] = draw_name(rng, True)
    strings: dict[str, str | int] = {
        "name": names[0],
        "friend": names[1],
        "item": rng.choice(words.GOODS),
        "place": rng.choice(words.PLACES)[0],
        "day": rng.choice(words.DAYS),
        "kind": rng.choice(words.WORKERS),
        "color": rng.choice(words.COLORS),
        "object": rng.choice(words.OBJECTS),
        "weather": rng.choice(list(words.WEATHER)),
        "city": invented_name(rng, rng.random() < 0.5),
        "food": rng.choice(words.FOODS),
        "feeling": rng.choice(words.GOOD_FEELINGS),
    }
    values = numbers | strings
    slots = {key: str(value) for key, value in values.items()} | {"carried": rng.choice(("carried", "took", "brought"))}
    text, keys, questions = rng.choice(NOTES)
    return Note(
        expand(rng, text, slots),
        {key: values[key] for key in keys.split()},
        tuple(Question(*(expand(rng, part, slots) for part in question)) for question in questions),
    )


def make_extraction(rng: random.Random, source: Story | Note) -> Extraction:
    """Ask for some of the facts of a text, by key, as one JSON value."""
    fields: dict[str, str | int] = dict(source.fields)
    if isinstance(source, Story) and rng.random() < 0.25:
        return _special(rng, source)
    keys = rng.sample(list(fields), min(len(fields), rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5))))
    if rng.random() < 0.5:
        keys.sort(key=list(fields).index)
    return Extraction(_request(rng, keys), _dump({key: fields[key] for key in keys}))


def _special(rng: random.Random, story: Story) -> Extraction:
    """Lists and nested objects."""
    f = story.fields
    if rng.random() < 0.5:
        request = rng.choice(("List the characters as JSON.", "Give me the names of the characters as JSON."))
        return Extraction(request, _dump({"characters": [f["name"], f["friend"]]}))
    request = rng.choice(("Describe the hero and the friend as JSON.", "Write the hero and the friend as JSON."))
    hero, friend = {"name": f["name"], "kind": f["kind"]}, {"name": f["friend"], "kind": f["friend_kind"]}
    return Extraction(request, _dump({"hero": hero, "friend": friend}))


def _request(rng: random.Random, keys: list[str]) -> str:
    listed = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"
    plural = "" if len(keys) == 1 else "s"
    return rng.choice(
        (
            f"Extract {listed} as JSON.",
            f"Give me the {listed} as JSON.",
            f"Write a JSON object with the key{plural} {listed}.",
            f"Return JSON with {listed}.",
            f"JSON with the key{plural} {listed}, please.",
            f"Now give me the {listed} as JSON.",
            f"Make a JSON object with {listed}.",
        )
    )


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
