"""Who and what a story is about: drawn once, before a word is written, and never changed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from . import words

SHE: dict[str, str] = {"he": "she", "him": "her", "his": "her", "himself": "herself"}
HE: dict[str, str] = {"he": "he", "him": "him", "his": "his", "himself": "himself"}


@dataclass
class Character:
    """One character: the same name, kind, trait and pronouns to the end of the story."""

    name: str
    kind: str
    trait: str
    pronouns: dict[str, str]


@dataclass
class Facts:
    """Every decided fact of one story; `slots` are the same facts as templates name them."""

    hero: Character
    friend: Character
    slots: dict[str, str] = field(default_factory=dict)


def invented_name(rng: random.Random, she: bool) -> str:
    """A name of two to three syllables, so that names must be copied and can't be learned by heart."""
    if rng.random() < 0.3:
        return _any_name(rng, she)
    name = rng.choice(words.SYLLABLE_STARTS)
    if rng.random() < 0.45:
        name += rng.choice(words.SYLLABLE_MIDDLES)
    return name + rng.choice(words.SHE_SYLLABLES if she else words.HE_SYLLABLES)


def _any_name(rng: random.Random, she: bool) -> str:
    """Two or three syllables of any letters: the widest set of names, none of them seen often.

    Its ending tells the pronoun, as with the other names.
    """
    syllables = [rng.choice(words.CONSONANTS) + rng.choice(words.VOWELS) for _ in range(rng.choice((1, 2, 2)))]
    return ("".join(syllables) + rng.choice(words.SHE_ENDINGS if she else words.HE_ENDINGS)).capitalize()


def draw_name(rng: random.Random, she: bool, invented: float = 0.6) -> str:
    """A common name, or (with the probability `invented`) one that is put together."""
    if rng.random() < invented:
        return invented_name(rng, she)
    return rng.choice(words.SHE_NAMES if she else words.HE_NAMES)


def draw_character(rng: random.Random, she: bool, invented: float) -> Character:
    """A person, an animal or a creature whose kind fits the pronoun."""
    group = rng.random()
    if group < 0.55:
        kind = rng.choice(words.ANIMALS)
    elif group < 0.7:
        kind = rng.choice(words.CREATURES)
    elif group < 0.85:
        kind = rng.choice(words.WORKERS)
    else:
        kind = rng.choice(words.GIRLS if she else words.BOYS)
    wrong = words.HE_ONLY if she else words.SHE_ONLY
    if kind in wrong:
        kind = "fox"
    return Character(draw_name(rng, she, invented), kind, rng.choice(words.TRAITS), SHE if she else HE)


def draw_facts(rng: random.Random, invented: float = 0.6) -> Facts:
    """All facts of a story. Mostly the two characters differ in pronoun; always in name and kind."""
    she = rng.random() < 0.5
    hero = draw_character(rng, she, invented)
    friend_she = (not she) if rng.random() < 0.75 else she
    friend = draw_character(rng, friend_she, invented)
    while friend.name[:3] == hero.name[:3] or friend.kind == hero.kind or friend.trait == hero.trait:
        friend = draw_character(rng, friend_she, invented)
    facts = Facts(hero, friend)
    facts.slots = _character_slots(hero, "", "hero") | _character_slots(friend, "f", "friend")
    facts.slots |= _world_slots(rng)
    return facts


def _character_slots(character: Character, prefix: str, name_slot: str) -> dict[str, str]:
    slots = {name_slot: character.name, prefix + "kind": character.kind, prefix + "trait": character.trait}
    for key, value in character.pronouns.items():
        slots[prefix + key] = value
    return slots


def _world_slots(rng: random.Random) -> dict[str, str]:
    place, preposition = rng.choice(words.PLACES)
    other_place, other_preposition = rng.choice([pair for pair in words.PLACES if pair[0] != place])
    color, noun = rng.choice(words.COLORS), rng.choice(words.OBJECTS)
    weather = rng.choice(list(words.WEATHER))
    time = rng.choice(words.TIMES)
    project, parts = rng.choice(words.PROJECTS)
    hidings = rng.sample(words.HIDING_PLACES, 2)
    return {
        "home": rng.choice(words.HOMES),
        "place": place,
        "in_place": f"{preposition} the {place}",
        "place2": other_place,
        "in_place2": f"{other_preposition} the {other_place}",
        "color": color,
        "noun": noun,
        "obj": f"{color} {noun}",
        "weather": weather,
        "weather_line": rng.choice(words.WEATHER[weather]).format(time=time),
        "time": time,
        "food": rng.choice(words.FOODS),
        "hiding": hidings[0],
        "wrong_hiding": hidings[1],
        "family": rng.choice(words.FAMILY),
        "fear": rng.choice(words.FEARS),
        "dream": rng.choice(words.DREAMS),
        "project": project,
        "the_project": "the" + project[1:],
        "parts": parts,
        "contest": rng.choice(words.CONTESTS),
        "sound": rng.choice(words.SOUNDS),
        "baby": rng.choice(words.BABIES),
        "trap": rng.choice(words.TRAPS),
        "feeling": rng.choice(words.GOOD_FEELINGS),
        "count": str(rng.randint(2, 9)),
    }
