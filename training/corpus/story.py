"""A story: facts, its text, and the questions that its text answers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .facts import Facts, draw_facts
from .grammar import expand
from .plots import Plot
from .plots_more import CLOSINGS, ENDINGS, HABITS, OPENINGS, PLOTS, WEATHERS


@dataclass(frozen=True)
class Question:
    """A question about a story with a short answer and one in a full sentence."""

    text: str
    short: str
    full: str


@dataclass(frozen=True)
class Story:
    """One finished story. `fields` are the facts that its text states, for extractions."""

    facts: Facts
    plot: Plot
    text: str
    questions: tuple[Question, ...]
    fields: dict[str, str]


COMMON_QUESTIONS = (
    ("Who is the story about?", "{hero}", "The story is about {hero}, a {trait} {kind}."),
    ("Who is {hero}?", "a {trait} {kind}", "{hero} is a {trait} {kind}."),
    ("What is {hero}?", "a {kind}", "{hero} is a {kind}."),
    ("Where does {hero} live?", "{home}", "{hero} lives {home}."),
    ("Who is {friend}?", "a {ftrait} {fkind}", "{friend} is a {ftrait} {fkind}."),
    ("What is {friend}?", "a {fkind}", "{friend} is a {fkind}."),
    ("What color was the {noun}?", "{color}", "The {noun} was {color}."),
    ("What was the weather like?", "{weather}", "The weather was {weather}."),
    ("How did {hero} feel at the end?", "{feeling}", "{hero} felt {feeling} at the end."),
    ("What are the names of the characters?", "{hero} and {friend}", "The characters are {hero} and {friend}."),
)
UNANSWERABLE = (
    ("How old is {hero}?", "The story does not say how old {hero} is."),
    ("What does {friend} do for a living?", "The story does not say that."),
    ("What is the name of {hero}'s mother?", "The story does not say that."),
    ("What is {hero}'s favorite number?", "The story does not say that."),
    ("How tall is {friend}?", "The story does not say how tall {friend} is."),
)


def make_story(rng: random.Random, facts: Facts | None = None, short: bool = False, invented: float = 0.6) -> Story:
    """Draw a story; a short one is one paragraph without the extra scenes."""
    facts = facts or draw_facts(rng, invented)
    slots = _with_capitals(facts.slots)
    plot = rng.choice(PLOTS)
    opening = [rng.choice(OPENINGS)]
    if not short and rng.random() < 0.5:
        opening.append(rng.choice(HABITS))
    opening.append(rng.choice(WEATHERS))
    ending = [rng.choice(ENDINGS)]
    if not short:
        ending.append(rng.choice(CLOSINGS))
    paragraphs = [" ".join(opening), *plot.acts, " ".join(ending)]
    if rng.random() < 0.4 and not short:
        paragraphs[-2:] = [" ".join(paragraphs[-2:])]
    separator = " " if short else "\n\n"
    text = separator.join(expand(rng, paragraph, slots) for paragraph in paragraphs)
    return Story(facts, plot, text, _questions(rng, plot, slots), _fields(plot, slots, text))


def _with_capitals(slots: dict[str, str]) -> dict[str, str]:
    """Add {He}, {His}, {Fhe} and the directions that follow from the places."""
    more = {"He": "he", "His": "his", "Fhe": "fhe", "Fhis": "fhis"}
    capitals = {capital: slots[plain].capitalize() for capital, plain in more.items()}
    ways = {"to_place": f"to the {slots['place']}", "to_place2": f"to the {slots['place2']}"}
    return slots | capitals | ways


def _questions(rng: random.Random, plot: Plot, slots: dict[str, str]) -> tuple[Question, ...]:
    drawn = []
    for text, short, full in (*COMMON_QUESTIONS, *plot.questions, *plot.questions):
        drawn.append(Question(*(expand(rng, template, slots) for template in (text, short, full))))
    rng.shuffle(drawn)
    if rng.random() < 0.3:
        text, answer = (expand(rng, template, slots) for template in rng.choice(UNANSWERABLE))
        drawn.insert(rng.randrange(3), Question(text, answer, answer))
    unique = {question.text: question for question in drawn}
    return tuple(unique.values())


def _fields(plot: Plot, slots: dict[str, str], text: str) -> dict[str, str]:
    """Facts for JSON: the key as asked for, and the value in the words of the text."""
    fields = {
        "name": slots["hero"],
        "kind": slots["kind"],
        "trait": slots["trait"],
        "friend": slots["friend"],
        "friend_kind": slots["fkind"],
        "object": slots["noun"],
        "color": slots["color"],
        "weather": slots["weather"],
        "feeling": slots["feeling"],
        "home": slots["home"],
        "problem": plot.problem.format_map(slots),
    }
    for key in ("place", "food"):
        if f" {slots[key]}" in text:
            fields[key] = slots[key]
    return fields
