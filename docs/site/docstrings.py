"""The house's docstrings as sections that the reference can list.

A class lists its fields, and a few functions their arguments, as paragraphs of the form

    keys, values: a tensor [B, G, S, D] a layer: B rows, …
        and more of it, indented.

For the reference such lines become a section "Attributes:" (of a class) or "Args:" (of a function), and each error of
a line such as "SourceError: …. ConfigError: …." an entry of its own.
"""

import re

import griffe

_FIELD = re.compile(r"^(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*): (?P<text>\S.*)$")
_NEXT_FIELD = re.compile(r"(?<=\. )(?=[a-z_]\w*(?:, [a-z_]\w*)*: )")
_SECTION = re.compile(r"^(?P<title>Args|Attributes|Returns|Yields|Raises): ?(?P<text>.*)$")
_ERROR = re.compile(r"(?:^|(?<=[.;] ))(?=[A-Z]\w*(?:Error|Warning): )")


class Fields(griffe.Extension):
    def on_class(self, *, cls, **others):
        _rewrite(cls, "Attributes")

    def on_function(self, *, func, **others):
        _rewrite(func, "Args")


def _rewrite(thing: griffe.Object, title: str) -> None:
    if thing.docstring is not None:
        thing.docstring.value = with_sections(thing.docstring.value, title)


def with_sections(text: str, title: str) -> str:
    """`text` with its lines of fields under a heading of their own, before any other section."""
    paragraphs: list[str] = []
    entries: list[str] = []
    sections: dict[str, list[str]] = {}
    current = paragraphs
    for line in _one_field_a_line(text):
        section, field = _SECTION.match(line), _FIELD.match(line)
        if section:
            current = sections[section["title"]] = []
            current += [f"    {section['text']}"] if section["text"] else []
        elif line.startswith(" ") and current is entries:
            entries.append(f"    {line}")
        elif field:
            names = field["names"].split(", ")
            # Several names share one text, which stands with the last of them.
            entries += [f"    {name}: see {names[-1]}." for name in names[:-1]]
            entries.append(f"    {names[-1]}: {field['text']}")
            current = entries
        elif current is paragraphs or line.startswith(" ") or (line and current[-1:] != [""]) or not line:
            current.append(line)
        else:
            current = paragraphs
            paragraphs += ["", line]
    if entries:
        sections = {title: entries, **sections}
    if "Raises" in sections:
        sections["Raises"] = _errors(sections["Raises"])
    for heading, lines in sections.items():
        paragraphs += ["", f"{heading}:", *lines]
    return "\n".join(paragraphs).strip()


def _one_field_a_line(text: str) -> list[str]:
    """The lines of a docstring; where a field's line goes on to the next field, that begins a line of its own."""
    lines: list[str] = []
    for line in text.splitlines():
        lines += [part.rstrip() for part in _NEXT_FIELD.split(line)] if _FIELD.match(line) else [line]
    return lines


def _errors(lines: list[str]) -> list[str]:
    """One entry for each error, where the house writes several in a line."""
    text = " ".join(line.strip() for line in lines)
    return [f"    {entry.strip()}" for entry in _ERROR.split(text) if entry.strip()]
