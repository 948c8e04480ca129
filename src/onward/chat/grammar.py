"""Grammars of answers whose calls can be read, in Lark's syntax as llguidance has it."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from onward.chat.answer import AnswerFormat
from onward.chat.format import ArgumentSyntax, CallSyntax, MessageFormat
from onward.chat.tools import Tool, ToolUse
from onward.errors import RequestError
from onward.schemas import SPACED, Spacing, alternatives, json_rules, kinds_of, lark_string, values_of

# Where a schema has one of these, `properties` does not name all that there may be.
_OPEN = {"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if"}
# What a schema may ask of a text.
_BARE_LIMITS = {"pattern", "format", "minLength", "maxLength"}
_DEFINITIONS = ("$defs", "definitions")
_ANY = "(?s:.*)"
_SPACE = r"[ \t\r\n]"


class Content(NamedTuple):
    """JSON that an answer without calls has to be.

    rules: of the grammar; the first is called `content`. spacing: what stands between the tokens of that JSON.
    is_expanded: its brackets and keys are rules, too, and no `%json`.
    """

    rules: Sequence[str]
    spacing: Spacing
    is_expanded: bool


def answer_grammar(reading: AnswerFormat, use: ToolUse, ids: Mapping[str, int], content: Content | None = None) -> str:
    """The grammar of the answers that `use` allows and `reading` reads.

    An answer may begin with reasoning, unless the prompt has closed it. What follows are calls, where one has to come;
    otherwise text, or calls with or without text before them. The arguments of a call follow the schema of its tool.

    ids: of the marks that grammars do not have as text. content: what an answer is that has no calls; such an answer is
    either that or calls, with no text beside either.

    Raises:
        RequestError: the format has no calls.
    """
    format = reading.format
    if format.syntax is None:
        raise RequestError(
            "tool_choice, parallel_tool_calls and strict tools need to know how the model writes calls, and its chat "
            "template does not tell: give the LanguageModel a message_format"
        )
    rules = (
        ["start: answer"] if reading.thinking is False else [*_reasoning(format, ids, opened=bool(reading.thinking))]
    )
    opened = [f"{_written(opener, ids)} calls" for opener in format.openers]
    if use.choice == "required":
        rules.append(f"answer: {'calls' if format.bare else opened[0]}")
    elif content is None:
        rules += _free(format, ids)
    else:
        bare = ["object"] if format.bare else []
        rules.append(f"answer: {' | '.join([f'{_written(format.before_content, ids)} content', *bare, *opened])}")
        rules += [*content.rules, *(_call_objects(format.syntax, use, content) if format.bare else [])]
    return "\n".join([*rules, *_calls(format, format.syntax, use, ids)])


def content_beginning(reading: AnswerFormat, ids: Mapping[str, int]) -> str:
    """The rules of what stands before the content, `beginning` to its end; empty where nothing has to.

    That is the rest of reasoning that the prompt has opened, and the mark of the content. Where content has one,
    reasoning may stand before it. ids: as in `answer_grammar`.
    """
    format, before = reading.format, reading.format.before_content
    if not reading.thinking and not before:
        return ""
    if reading.thinking is False:
        return f"beginning: {_written(before, ids)}"
    thought = _thought(format, ids, opened=bool(reading.thinking))
    return "\n".join([f"beginning: {thought} {_written(before, ids)}", *_to_the_end(format, ids)])


def _reasoning(format: MessageFormat, ids: Mapping[str, int], *, opened: bool) -> Iterator[str]:
    yield f"start: {_thought(format, ids, opened=opened)} answer"
    yield from _to_the_end(format, ids)


def _thought(format: MessageFormat, ids: Mapping[str, int], *, opened: bool) -> str:
    return "reasoning" if opened else f"({_written(format.thinking[0], ids)} reasoning)?"


def _to_the_end(format: MessageFormat, ids: Mapping[str, int]) -> Iterator[str]:
    thought = _ending("thought", format.thinking[1], ids)
    after = _written(format.after_thinking, ids) or f"/{_SPACE}{{0,4}}/"
    yield f"reasoning: {thought[0]} {after}"
    yield from thought[1:]


def _free(format: MessageFormat, ids: Mapping[str, int]) -> Iterator[str]:
    """Text has no opener. It does not begin with reasoning, nor with a brace where that begins calls.

    Where content has a mark of its own, it is either that or calls.
    """
    first = "|".join([_pattern(format.thinking[0]), *([r"\{"] if format.bare else [])])
    but = f" & ~/{_SPACE}*({first}){_ANY}/"
    befores = [_ending(f"before_{at}", opener, ids, but) for at, opener in enumerate(format.openers)]
    if format.before_content:
        befores = [[_written(opener, ids)] for opener in format.openers]
    text = f"{_written(format.before_content, ids)} TEXT"
    answers = [text, *(["calls"] if format.bare else []), *(f"{before[0]} calls" for before in befores)]
    yield f"answer: {' | '.join(answers)}"
    yield f"TEXT: /{_ANY}/{but} & ~/{_ANY}({'|'.join(map(_pattern, format.openers))}){_ANY}/"
    for before in befores:
        yield from before[1:]


def _calls(format: MessageFormat, syntax: CallSyntax, use: ToolUse, ids: Mapping[str, int]) -> Iterator[str]:
    more = f"({_written(syntax.between, ids)} call)*" if use.parallel and syntax.between is not None else ""
    yield f"calls: {_written(syntax.begin, ids)} call {more} {_written(syntax.end, ids)}"
    yield f"call: {' | '.join(f'call_{at}' for at in range(len(use.callable_tools)))}"
    for at, tool in enumerate(use.callable_tools):
        name = json.dumps(tool.name) if syntax.quoted else tool.name
        before = f"{syntax.before}{name}{syntax.middle}"
        yield f"call_{at}: {_written(before, ids)} arguments_{at} {_written(syntax.after, ids)}"
        if syntax.argument is None:
            yield from json_rules(f"arguments_{at}", arguments_schema(tool), SPACED, tool.place)
        else:
            yield from _arguments(f"arguments_{at}", tool, syntax.argument, ids)


def _call_objects(syntax: CallSyntax, use: ToolUse, content: Content) -> Iterator[str]:
    """The rules of a call without an opener, where an answer may also be other JSON. Both are made of the same tokens,
    since a grammar reads a text token by token, and never goes back."""
    keys = json.loads(f'{syntax.before}"name"{syntax.middle}{{}}{syntax.after}')
    yield f"object: {' | '.join(f'object_{at}' for at in range(len(use.callable_tools)))}"
    for at, tool in enumerate(use.callable_tools):
        arguments = arguments_schema(tool)
        properties = {key: {"const": tool.name} if value == "name" else arguments for key, value in keys.items()}
        schema = {"type": "object", "properties": properties, "required": list(keys), "additionalProperties": False}
        schema |= {key: arguments[key] for key in _DEFINITIONS if key in arguments}
        yield from json_rules(f"object_{at}", schema, content.spacing, tool.place, is_expanded=content.is_expanded)


def _arguments(rule: str, tool: Tool, syntax: ArgumentSyntax, ids: Mapping[str, int]) -> Iterator[str]:
    """The arguments of a tool that stand each by itself, in the order of the schema."""
    schema = tool.parameters
    if schema.get("additionalProperties") or (_OPEN - {"additionalProperties"}) & set(schema):
        raise RequestError(
            f"{tool.place} has to name each argument in properties, for this model writes arguments one by one"
        )
    parts = []
    for at, (name, of) in enumerate(schema.get("properties", {}).items()):
        is_required, place = name in schema.get("required", ()), f"{tool.place}.properties.{name}"
        if of is False and not is_required:
            continue
        if not syntax.names.fullmatch(name):
            raise RequestError(f"{place}: this model's calls cannot have an argument of this name: give it another")
        value, *rules = _value(f"{rule}_{at}", of, schema, syntax.after, ids, place)
        parts.append(f"({_written(f'{syntax.before}{name}{syntax.middle}', ids)} {value}){'' if is_required else '?'}")
        yield from rules
    yield f"{rule}: {' '.join(parts) or json.dumps('')}"


def _value(
    rule: str, schema: Any, root: Mapping[str, Any], after: str, ids: Mapping[str, int], place: str
) -> list[str]:
    """A value with what stands after it: what derives it, and then the rules for that. Text stands there as it is.

    place: of the schema, for errors.
    """
    leaves = alternatives(schema, root)
    kinds = kinds_of(schema, root) or set()
    if "string" not in kinds or not kinds <= {"string", "null"}:
        if isinstance(schema, Mapping):
            schema = {**schema, **{key: root[key] for key in _DEFINITIONS if key in root}}
        return [f"{rule} {_written(after, ids)}", *json_rules(rule, schema, SPACED, place)]
    listed = [values_of(leaf) for leaf in leaves]
    mark = after.strip()
    if None not in listed:
        texts = ["null" if value is None else value for values in listed for value in values or ()]
        if any(mark in text for text in texts):
            raise RequestError(f"{place}: this model's calls cannot have a value with {mark!r} in it: leave it out")
        return [f"({' | '.join(_text(text, ids) for text in texts)}) {_written(after, ids)}"]
    if limits := {limit for leaf in leaves for limit in _BARE_LIMITS & set(leaf)}:
        raise RequestError(
            f"{place}: this model writes texts without quotes, so {min(limits)} cannot be enforced: leave it out"
        )
    space, _, rest = after.partition(mark)
    # Readers end at the mark without its line break, too.
    but = f" & ~/({_ANY}[^\\n])?{_pattern(mark)}{_ANY}/" if space else ""
    value, *rules = _ending(rule, space + mark, ids, but)
    return [f"{value} {_written(rest, ids)}", *rules]


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments. Without a word on other properties it has none, for a tool takes none."""
    schema = dict(tool.parameters)
    closed = {"additionalProperties": False} if "properties" in schema and not _OPEN & set(schema) else {}
    return {"type": "object", **schema, **closed}


def _text(text: str, ids: Mapping[str, int]) -> str:
    return _written(text, ids) or '""'


def _ending(name: str, mark: str, ids: Mapping[str, int], but: str = "") -> list[str]:
    """Any text up to and with the first `mark`: what derives it, and then the rules for that. but: what it is not."""
    if any(mark.startswith(special) for special in ids):  # no text has it
        return [f"{name.upper()} {_written(mark, ids)}", f"{name.upper()}: /{_ANY}/{but}"]
    return [name, f"{name}[lazy]: {name.upper()}", f"{name.upper()}: /{_ANY}{_pattern(mark)}/{but}"]


def _written(text: str, ids: Mapping[str, int]) -> str:
    """A text as symbols of a grammar, special tokens by their ids."""
    if not text:
        return ""
    for mark, id in ids.items():
        before, found, after = text.partition(mark)
        if found:
            return f"{_written(before, ids)} <[{id}]> {_written(after, ids)}"
    return lark_string(text)


def _pattern(text: str) -> str:
    """A text in a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
