"""Grammars for answers with calls, in llguidance's variant of Lark's syntax."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from onward.chat.custom_input import InputFormat
from onward.chat.format import AnswerFormat, ArgumentSyntax, CallSyntax, MessageFormat
from onward.chat.message import INPUT
from onward.chat.quoted_lark import quoted_lark
from onward.chat.tools import Tool, ToolUse
from onward.errors import OptionError, RequestError
from onward.schemas import SPACED, Spacing, alternatives, json_rules, kinds_of, lark_string, values_of

# With one of these, a schema allows more than its `properties`.
_OPEN = {"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if"}
# Constraints on strings, which cannot be enforced on strings without quotes.
_BARE_LIMITS = {"pattern", "format", "minLength", "maxLength"}
_DEFINITIONS = ("$defs", "definitions")
_ANY = "(?s:.*)"
_SPACE = r"[ \t\r\n]"


class Content(NamedTuple):
    """The JSON of an answer without calls.

    rules: of the grammar; the first is named `content`. spacing: the whitespace between the JSON's tokens.
    is_expanded: whether its brackets and keys are rules too, instead of `%json`.
    """

    rules: Sequence[str]
    spacing: Spacing
    is_expanded: bool


def answer_grammar(answer: AnswerFormat, use: ToolUse, ids: Mapping[str, int], content: Content | None = None) -> str:
    """Return the grammar of the answers that `use` allows and `answer` parses.

    An answer may begin with reasoning, unless the prompt has closed it. If calls are required, they follow; otherwise
    text, calls, or text and then calls. The arguments of a call conform to the schema of its tool.

    ids: of the marks that are special tokens. content: of an answer without calls. If set, an answer is either that
    content or calls, without other text.

    Raises:
        RequestError: the calls of this format cannot be constrained.
    """
    format = answer.format
    if format.syntax is None:
        raise RequestError(
            "tool_choice, parallel_tool_calls and strict tools need to know how the model writes calls, but its chat "
            "template does not show it: set the LanguageModel's message_format",
            "tool_choice" if use.choice == "required" else "tools",
        )
    if answer.continues and format.before_content:
        raise RequestError(
            "this model writes content and calls as separate messages, so constrained tool calls cannot continue a "
            "message: leave out continue_final_message",
            "continue_final_message",
        )
    rules = ["start: answer"]
    if answer.thinking is not False:
        rules = [f"start: {_thought(format, ids, opened=bool(answer.thinking))} answer", *_reasoning(format, ids)]
    opened = [f"{_symbols(opener, ids)} calls" for opener in format.openers]
    if use.choice == "required":
        rules.append(f"answer: {'calls' if format.bare else opened[0]}")
    elif content is None:
        rules += _free(format, ids)
    else:
        bare = ["object"] if format.bare else []
        rules.append(f"answer: {' | '.join([f'{_symbols(format.before_content, ids)} content', *bare, *opened])}")
        rules += [*content.rules, *(_call_objects(format.syntax, use, content) if format.bare else [])]
    return "\n".join([*rules, *_calls(format, format.syntax, use, ids)])


def content_beginning(answer: AnswerFormat, ids: Mapping[str, int]) -> str:
    """Return the rules of the text before the content, `beginning` first; empty if there is none.

    It is the rest of the reasoning that the prompt has opened, and the content's mark, if any, which may also have
    reasoning before it. ids: as in `answer_grammar`.
    """
    format, before = answer.format, answer.format.before_content
    if not answer.thinking and (not before or answer.continues):
        return ""
    if answer.thinking is False:
        return f"beginning: {_symbols(before, ids)}"
    thought = _thought(format, ids, opened=bool(answer.thinking))
    return "\n".join([f"beginning: {thought} {_symbols(before, ids)}", *_reasoning(format, ids)])


def _thought(format: MessageFormat, ids: Mapping[str, int], *, opened: bool) -> str:
    return "reasoning" if opened else f"({_symbols(format.thinking[0], ids)} reasoning)?"


def _reasoning(format: MessageFormat, ids: Mapping[str, int]) -> Iterator[str]:
    thought = _ending("thought", format.thinking[1], ids)
    after = _symbols(format.after_thinking, ids) or f"/{_SPACE}{{0,4}}/"
    yield f"reasoning: {thought[0]} {after}"
    yield from thought[1:]


def _free(format: MessageFormat, ids: Mapping[str, int]) -> Iterator[str]:
    """The rules of a free answer: text without an opener, reasoning or, if it begins calls, a brace at the beginning.

    If content has a mark, the answer is either content or calls.
    """
    first = "|".join([_pattern(format.thinking[0]), *([r"\{"] if format.bare else [])])
    but = f" & ~/{_SPACE}*({first}){_ANY}/"
    befores = [_ending(f"before_{at}", opener, ids, but) for at, opener in enumerate(format.openers)]
    if format.before_content:
        befores = [[_symbols(opener, ids)] for opener in format.openers]
    text = f"{_symbols(format.before_content, ids)} TEXT"
    answers = [text, *(["calls"] if format.bare else []), *(f"{before[0]} calls" for before in befores)]
    yield f"answer: {' | '.join(answers)}"
    yield f"TEXT: /{_ANY}/{but} & ~/{_ANY}({'|'.join(map(_pattern, format.openers))}){_ANY}/"
    for before in befores:
        yield from before[1:]


def _calls(format: MessageFormat, syntax: CallSyntax, use: ToolUse, ids: Mapping[str, int]) -> Iterator[str]:
    more = f"({_symbols(syntax.between, ids)} call)*" if use.parallel and syntax.between is not None else ""
    yield f"calls: {_symbols(syntax.begin, ids)} call {more} {_symbols(syntax.end, ids)}"
    yield f"call: {' | '.join(f'call_{at}' for at in range(len(use.callable_tools)))}"
    for at, tool in enumerate(use.callable_tools):
        name = json.dumps(tool.name) if syntax.quoted else tool.name
        before = f"{syntax.before}{name}{syntax.middle}"
        yield f"call_{at}: {_symbols(before, ids)} arguments_{at} {_symbols(syntax.after, ids)}"
        if syntax.argument is not None:
            yield from _arguments(f"arguments_{at}", tool, syntax.argument, ids)
        elif tool.input is not None and tool.input.syntax == "lark":
            yield from _input_object(f"arguments_{at}", tool)
        else:
            yield from json_rules(f"arguments_{at}", arguments_schema(tool), SPACED, tool.place)


def _input_object(rule: str, tool: Tool) -> Iterator[str]:
    """The rules of the arguments of a custom tool whose input matches a grammar: its text with JSON's escapes."""
    assert tool.input is not None, "of a custom tool"
    try:
        quoted = quoted_lark(tool.input.definition)
    except ValueError as error:
        raise OptionError(
            tool.place, f"cannot be enforced, because this model writes the input as a JSON string: {error}"
        ) from error
    before, after = json.dumps({INPUT: "|"}).split("|")
    yield f"{rule}: {lark_string(before)} {rule}_input {lark_string(after)}"
    yield f"{rule}_input: %lark {{\n{quoted}\n}}"


def _call_objects(syntax: CallSyntax, use: ToolUse, content: Content) -> Iterator[str]:
    """The rules of a call beside other JSON. Both have the same tokens, since parsing never backtracks."""
    keys = json.loads(f'{syntax.before}"name"{syntax.middle}{{}}{syntax.after}')
    yield f"object: {' | '.join(f'object_{at}' for at in range(len(use.callable_tools)))}"
    for at, tool in enumerate(use.callable_tools):
        if tool.input is not None and tool.input.syntax == "lark":
            problem = "cannot be enforced beside a schema of the text in this model's format: leave one of them out"
            raise OptionError(tool.place, problem)
        arguments = arguments_schema(tool)
        properties = {key: {"const": tool.name} if value == "name" else arguments for key, value in keys.items()}
        schema = {"type": "object", "properties": properties, "required": list(keys), "additionalProperties": False}
        schema |= {key: arguments[key] for key in _DEFINITIONS if key in arguments}
        yield from json_rules(f"object_{at}", schema, content.spacing, tool.place, is_expanded=content.is_expanded)


def _arguments(rule: str, tool: Tool, syntax: ArgumentSyntax, ids: Mapping[str, int]) -> Iterator[str]:
    """The rules of separate arguments, in the order of the schema."""
    if tool.input is not None and tool.input.definition:
        value, *rules = _bare_input(f"{rule}_input", tool.input, syntax.after, ids)
        yield f"{rule}: {_symbols(f'{syntax.before}{INPUT}{syntax.middle}', ids)} {value}"
        yield from rules
        return
    schema = tool.parameters
    if schema.get("additionalProperties") or (_OPEN - {"additionalProperties"}) & set(schema):
        raise OptionError(
            tool.place, "has to name each argument in properties, because this model writes arguments one by one"
        )
    parts = []
    for at, (name, of) in enumerate(schema.get("properties", {}).items()):
        is_required, place = name in schema.get("required", ()), f"{tool.place}.properties.{name}"
        if of is False and not is_required:
            continue
        if not syntax.names.fullmatch(name):
            raise RequestError(
                f"{place}: this model's calls cannot have an argument of this name: give it another", place
            )
        value, *rules = _value(f"{rule}_{at}", of, schema, syntax.after, ids, place)
        parts.append(f"({_symbols(f'{syntax.before}{name}{syntax.middle}', ids)} {value}){'' if is_required else '?'}")
        yield from rules
    yield f"{rule}: {' '.join(parts) or json.dumps('')}"


def _bare_input(rule: str, input: InputFormat, after: str, ids: Mapping[str, int]) -> list[str]:
    """Return the derivation of an input without quotes and the text after it, and then its rules. A grammar in Lark's
    syntax must not derive the mark in `after`, where the input would end."""
    if input.syntax == "lark":
        return [f"{rule} {_symbols(after, ids)}", f"{rule}: %lark {{\n{input.definition}\n}}"]
    pattern = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", input.definition).replace("\n", r"\n")
    name, mark = rule.upper(), after.strip()
    if any(mark.startswith(special) for special in ids):  # not in the text
        return [f"{name} {_symbols(after, ids)}", f"{name}: /{pattern}/"]
    space, _, rest = after.partition(mark)
    ending = f"/(?:{pattern}){_pattern(space + mark)}/ & ~/{_ANY}{_pattern(mark)}(?s:.+)/"
    return [f"{rule} {_symbols(rest, ids)}", f"{rule}[lazy]: {name}", f"{name}: {ending}"]


def _value(
    rule: str, schema: Any, root: Mapping[str, Any], after: str, ids: Mapping[str, int], place: str
) -> list[str]:
    """Return the derivation of a value and the text after it, and then its rules. Strings have no quotes."""
    leaves = alternatives(schema, root)
    kinds = kinds_of(schema, root) or set()
    if "string" not in kinds or not kinds <= {"string", "null"}:
        if isinstance(schema, Mapping):
            schema = {**schema, **{key: root[key] for key in _DEFINITIONS if key in root}}
        return [f"{rule} {_symbols(after, ids)}", *json_rules(rule, schema, SPACED, place)]
    listed = [values_of(leaf) for leaf in leaves]
    mark = after.strip()
    if None not in listed:
        texts = ["null" if value is None else value for values in listed for value in values or ()]
        if any(mark in text for text in texts):
            raise RequestError(
                f"{place}: this model's calls cannot have a value with {mark!r} in it: leave it out", place
            )
        symbols = " | ".join(_symbols(text, ids) or '""' for text in texts)
        return [f"({symbols}) {_symbols(after, ids)}"]
    if limits := {limit for leaf in leaves for limit in _BARE_LIMITS & set(leaf)}:
        raise RequestError(
            f"{place}: this model writes texts without quotes, so {min(limits)} cannot be enforced: leave it out",
            place,
        )
    space, _, rest = after.partition(mark)
    # The parser also accepts the mark without its line break.
    but = f" & ~/({_ANY}[^\\n])?{_pattern(mark)}{_ANY}/" if space else ""
    value, *rules = _ending(rule, space + mark, ids, but)
    return [f"{value} {_symbols(rest, ids)}", *rules]


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, closed to other properties unless it allows them."""
    schema = dict(tool.parameters)
    closed = {"additionalProperties": False} if "properties" in schema and not _OPEN & set(schema) else {}
    return {"type": "object", **schema, **closed}


def _ending(name: str, mark: str, ids: Mapping[str, int], but: str = "") -> list[str]:
    """Return the derivation of any text through the first `mark`, and then its rules. but: a pattern to exclude."""
    if any(mark.startswith(special) for special in ids):  # not in the text
        return [f"{name.upper()} {_symbols(mark, ids)}", f"{name.upper()}: /{_ANY}/{but}"]
    return [name, f"{name}[lazy]: {name.upper()}", f"{name.upper()}: /{_ANY}{_pattern(mark)}/{but}"]


def _symbols(text: str, ids: Mapping[str, int]) -> str:
    """Return a text as symbols of a grammar, with special tokens by id."""
    if not text:
        return ""
    for mark, id in ids.items():
        before, found, after = text.partition(mark)
        if found:
            return f"{_symbols(before, ids)} <[{id}]> {_symbols(after, ids)}"
    return lark_string(text)


def _pattern(text: str) -> str:
    """Return a regular expression, for use between slashes, that matches a text."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
