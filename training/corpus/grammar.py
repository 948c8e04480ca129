"""The engine of the corpus: templates with choices and slots, expanded by a seeded generator.

`[a|b|c]` is a choice (nested ones are allowed, an empty branch says nothing) and `{slot}` is a fact of
the story. Facts are decided before any text is written, so a choice can never contradict one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiouAEIOU]|honest)")


def expand(rng: random.Random, template: str, slots: Mapping[str, str]) -> str:
    """Draw one text from a template: choices first, then slots, then articles and capitals."""
    return polish(fill(rng, template, slots))


def fill(rng: random.Random, template: str, slots: Mapping[str, str]) -> str:
    """The choices and the slots alone."""
    while "[" in template:
        template = _CHOICE.sub(lambda match: rng.choice(match.group(1).split("|")), template)
    return template.format_map(slots)


def polish(text: str) -> str:
    """Single spaces, `an` before a vowel, and a capital at the start of every sentence."""
    text = re.sub(r" +", " ", text).strip()
    text = re.sub(r" ([.,!?])", r"\1", text)
    text = _ARTICLE.sub(r"\1n ", text)
    return _capitalize(text)


def _capitalize(text: str) -> str:
    """Capitals at sentence starts; a tag after a quoted `!` or `?` stays small ("Oh!" said Mira)."""
    return re.sub(r"(^|[.!?] |\." + r'" |\n)("?)([a-z])', lambda m: m[1] + m[2] + m[3].upper(), text)
