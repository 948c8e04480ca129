"""Prompts that a story follows: the beginning of a story, cut anywhere, and whatever else a visitor may type."""

from __future__ import annotations

import random

from . import smalltalk, words
from .chat import ANY_STORY, STORY_REQUESTS, TOPICS
from .extraction import make_note
from .facts import draw_facts, draw_name
from .grammar import expand
from .offered_tools import draw_request
from .story import make_story
from .tool_topics import CITIES, SUBJECTS, draw_city

TITLES = (
    "The {trait} {kind}", "The {kind} and the {noun}", "{hero} and the {obj}", "{hero} the {kind}", "Story:",
    "A story about {hero}", "Title: The {kind} and the {fkind}", "Chapter {count}", "Write a story",
    "The story of {hero}", "A short story about a {kind}", "# The {kind}", "Story: {hero} the {kind}",
    "{kind}, {noun}, {place}", "A fairy tale",
)  # fmt: skip
GREETINGS = (
    "[Hello|Hi|Hey|Good morning|Good evening|hello|hi|Hello world|Hello, world|Welcome|Dear reader|Greetings]"
    "[|!|.|,| there| {hero}]"
)
COMMON_WORDS = words._words(
    """
    I You We They It This That These Those My Your Our His Her What Who When Where Why How If But And Or So Because
    Please Write Say Give Make Let Do Is Are Was Can Could Will Would Yes No Not Never Always Today Tomorrow Yesterday
    People Everyone Someone Nothing Something Here Now Then After Before While Some All Many Most Every One Two Three
    Python import def print the of to and a in is it you that he was for on are with as his they be at one have this
    from or had by hot but some what there we can out other were all your when up use word how said an each she
    """
)
# What may stand between a prompt and its story.
JOINS = (". ", "\n\n", "\n\n", "\n", "! ", "... ", ": ")


def make_opened_story(rng: random.Random) -> tuple[str, str]:
    """A prompt and what follows it to the end of the story."""
    facts = draw_facts(rng, invented=0.12)
    story = make_story(rng, facts, short=rng.random() < 0.25).text
    draw = rng.random()
    if draw < 0.35:
        cut = rng.randint(1, 60)
        return story[:cut], story[cut:]
    if draw < 0.45:
        cut = rng.choice([place for place, letter in enumerate(story[:60]) if letter == " "])
        return story[:cut].lower(), story[cut:]
    if draw < 0.65:
        asked = rng.choice((*STORY_REQUESTS, *ANY_STORY)).replace("{topic}", rng.choice(TOPICS))
        return _joined(rng, expand(rng, asked, facts.slots), story)
    if draw < 0.75:
        return _joined(rng, expand(rng, rng.choice((*TITLES, GREETINGS)), facts.slots), story)
    return _joined(rng, _anything(rng), story)


def _joined(rng: random.Random, prompt: str, story: str) -> tuple[str, str]:
    joins = (" ", "\n\n", "\n") if prompt.endswith((".", "!", "?", ":")) else JOINS
    return prompt, f"{rng.choice(joins)}{story}"


def _anything(rng: random.Random) -> str:
    """Text that begins no story: questions, notes, loose words; whole, or cut after any word."""
    draw = rng.random()
    if draw < 0.25:
        slots = {"a": str(rng.randint(2, 99)), "b": str(rng.randint(2, 99)), "city": draw_city(rng)}
        asked, _ = smalltalk.draw_exchange(rng, (*smalltalk.WORLD, *smalltalk.EXCHANGES))
        text = expand(rng, asked, slots | {"name": draw_name(rng, rng.random() < 0.5)})
    elif draw < 0.4:
        text = draw_request(rng)
    elif draw < 0.55:
        text = make_note(rng).text
    else:
        pools = (COMMON_WORDS, COMMON_WORDS, COMMON_WORDS, words.ANIMALS, words.OBJECTS, words.TRAITS, SUBJECTS, CITIES,
                 words.SHE_NAMES, words.HE_NAMES, words.GOODS, ("1", "2 + 2 =", "3", "x", "-", "*", "?"))  # fmt: skip
        text = " ".join(rng.choice(rng.choice(pools)) for _ in range(rng.choice((1, 1, 2, 2, 3, 4, 6))))
        text = text[0].upper() + text[1:] if rng.random() < 0.7 else text
    parts = text.split(" ")
    return text if rng.random() < 0.4 else " ".join(parts[: rng.randint(1, min(len(parts), 8))])
