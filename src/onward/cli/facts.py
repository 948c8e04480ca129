"""Facts in sections: aligned lines for people, one JSON object for machines."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Fact(NamedTuple):
    """name: of the JSON field; people see spaces in it, and no unit, for that stands at the value. value: for JSON.
    shown: for people, where that is not the value as it stands."""

    name: str
    value: Any
    shown: str | None = None


Sections = Mapping[str, Sequence[Fact]]

_LABEL_WIDTH = 20
_UNITS = "_(bytes|gb_s|tokens_s|s)$"


def as_object(sections: Sections) -> dict[str, dict[str, Any]]:
    return {section: {fact.name: fact.value for fact in facts} for section, facts in sections.items()}


def as_lines(sections: Sections, width: int | None) -> list[str]:
    """Lines of at most `width` columns; as long as they come for None."""
    lines: list[str] = []
    for section, facts in sections.items():
        lines += [*([""] if lines else []), section]
        for fact in facts:
            name = re.sub(_UNITS, "", fact.name).replace("_", " ")
            label = f"  {name:<{_LABEL_WIDTH - 2}}"
            lines += _wrapped(label, _shown(fact), width)
    return lines


def _shown(fact: Fact) -> str:
    if fact.shown is not None:
        return fact.shown
    if isinstance(fact.value, bool):
        return "yes" if fact.value else "no"
    if isinstance(fact.value, int):
        return f"{fact.value:,}"
    if isinstance(fact.value, list):
        return ", ".join(map(str, fact.value)) or "none"
    return "none" if fact.value is None else str(fact.value)


def _wrapped(label: str, text: str, width: int | None) -> list[str]:
    if width is None or len(label) + len(text) <= width:
        return [label + text]
    indent = " " * len(label)
    # Paths are cut nowhere: a terminal lets one be copied whole.
    return textwrap.wrap(
        text, width, initial_indent=label, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
