"""Tools, and the choice of the tools that a model may or must call."""

import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from onward.chat.custom_input import InputFormat
from onward.errors import OptionError, RequestError, blaming
from onward.schemas import check_schema, normalized
from onward.util.text import brief

_SCALARS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
# A line of an "Args:" section in Google style: "name: text" or "name (type): text".
_ARGUMENT = re.compile(r"^(\w+)(?: *\([^)]*\))?: *(.+)$")
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):$")


def described_function(function: Callable[..., Any], at: str) -> dict[str, Any]:
    """Describe a function as {"name", "description", "parameters"}. at: its place, for errors."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        signature = inspect.signature(function)
        hints = typing.get_type_hints(function)
    except Exception as error:  # annotations are the caller's code
        raise RequestError(f"{at}: the signature of {name} cannot be read: {error}", at) from error
    summary, descriptions = _read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise RequestError(f"{at}: {name} has the parameter {parameter}, but calls pass arguments by name", at)
        schema = _schema(hints.get(parameter.name, Any), f"{at}: {parameter.name} of {name}")
        if text := descriptions.get(parameter.name):
            schema["description"] = text
        properties[parameter.name] = schema
    required = [each.name for each in signature.parameters.values() if each.default is each.empty]
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"name": name, **({"description": summary} if summary else {}), "parameters": parameters}


def _schema(kind: Any, at: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return {}
    if kind in _SCALARS:
        return {"type": _SCALARS[kind]}
    if inspect.isclass(kind) and issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    if origin is typing.Annotated:
        return _schema(arguments[0], at)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(each, at) for each in arguments]}
    if inspect.isclass(origin or kind):
        if issubclass(origin or kind, Mapping):
            return {"type": "object"} | ({"additionalProperties": _schema(arguments[1], at)} if arguments else {})
        if issubclass(origin or kind, Collection):
            return {"type": "array"} | ({"items": _schema(arguments[0], at)} if arguments else {})
    raise OptionError(at, f"is of type {kind!r}, which has no JSON schema: define the tool by a JSON schema")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text before the first section, and the descriptions of the parameters."""
    words: list[str] = []
    parameters: dict[str, str] = {}
    section = last = ""
    for line in map(str.strip, text.splitlines()):
        if heading := _SECTION.match(line):
            section = heading[1]
        elif not section:
            words.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            if argument := _ARGUMENT.match(line):
                last = argument[1]
                parameters[last] = argument[2]
            elif line and last:
                parameters[last] += f" {line}"
    return " ".join(" ".join(words).split()), parameters


# An object in OpenAI's format, {"type": "function", "function": {…}}, or a Python function.
ToolLike: TypeAlias = Mapping[str, Any] | Callable[..., Any]
# A name is short for {"type": "function", "function": {"name": …}}.
ToolChoice: TypeAlias = str | Mapping[str, Any]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEYS = ("name", "description", "parameters", "strict")
_CUSTOM_KEYS = ("name", "description", "format")
_SHAPE = "{'type': 'function', 'function': {'name': …, 'parameters': …}}"


@dataclass(frozen=True)
class Tool:
    """A function that a model may call, or a custom tool, which takes a text.

    parameters: the JSON schema of its arguments, an object. strict: whether calls are constrained to it.
    function: the tool as a function in OpenAI's format, for chat templates. place: of the schema or the grammar in the
    request, for errors. input: of a custom tool.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    function: Mapping[str, Any]
    place: str = "parameters"
    input: InputFormat | None = None


def _read_tools(tools: object) -> tuple[Tool, ...]:
    if tools is None:
        return ()
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise OptionError("tools", f"must be a list of {_SHAPE} or of functions; got {brief(tools)}")
    checked = tuple(_read_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools))
    first: dict[str, int] = {}
    for at, tool in enumerate(checked):
        if (other := first.setdefault(tool.name, at)) != at:
            raise RequestError(
                f"tools[{at}] and tools[{other}] are called {tool.name!r}: names must be unique", f"tools[{at}]"
            )
    return checked


def _read_tool(tool: Any, at: str) -> Tool:
    if callable(tool):
        tool = {"type": "function", "function": described_function(tool, at)}
    if isinstance(tool, Mapping) and tool.get("type") == "custom":
        return _read_custom(tool, at)
    if not isinstance(tool, Mapping) or set(tool) != {"type", "function"}:
        raise OptionError(
            at,
            f"must be {_SHAPE} or a function; got {brief(tool)}. Pass tools that the template reads in another form as "
            "template={'tools': …}",
        )
    function = tool["function"]
    if tool["type"] != "function":
        raise OptionError(f"{at}.type", f"must be 'function'; got {brief(tool['type'])}")
    name, _, parameters, strict = _described(function, _KEYS, f"{at}.function")
    parameters = {"type": "object", "properties": {}} if parameters is None else parameters
    place = f"{at}.function.parameters"
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise OptionError(place, f"must be the JSON schema of an object; got {brief(parameters)}")
    check_schema(parameters, place)
    if not isinstance(strict, bool | None):
        raise OptionError(f"{at}.function.strict", f"must be true or false; got {brief(strict)}")
    return Tool(name, normalized(parameters, place), bool(strict), tool, place)


def _described(value: Any, keys: Sequence[str], at: str) -> list[Any]:
    """The values of an object with a name and a description, by their keys."""
    if not isinstance(value, Mapping):
        raise OptionError(at, f"must be an object with a name; got {brief(value)}")
    if unknown := [key for key in value if key not in keys]:
        raise OptionError(at, f"has an unknown key {brief(unknown[0])}; its keys are {', '.join(keys)}")
    name, description, *others = (value.get(key) for key in keys)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise OptionError(f"{at}.name", f"must be 1 to 64 letters, digits, '_', '.' and '-'; got {brief(name)}")
    if not isinstance(description, str | None):
        raise OptionError(f"{at}.description", f"must be a text; got {brief(description)}")
    return [name, description, *others]


def _read_custom(tool: Mapping[str, Any], at: str) -> Tool:
    """A custom tool: {"type": "custom", "custom": {"name", "description", "format"}}."""
    if set(tool) != {"type", "custom"}:
        raise OptionError(at, f"must be {{'type': 'custom', 'custom': {{'name': …}}}}; got {brief(tool)}")
    name, description, format = _described(tool["custom"], _CUSTOM_KEYS, f"{at}.custom")
    input = _read_input(format, f"{at}.custom.format")
    function = {"name": name, "description": description or "", "parameters": input.parameters}
    in_openai_format = {"type": "function", "function": function}
    place = f"{at}.custom.format.grammar.definition"
    return Tool(name, input.parameters, input.syntax != "text", in_openai_format, place, input)


def _read_input(format: Any, at: str) -> InputFormat:
    if format is None or format == {"type": "text"}:
        return InputFormat()
    grammar = format.get("grammar") if isinstance(format, Mapping) and set(format) == {"type", "grammar"} else None
    if not isinstance(grammar, Mapping) or set(grammar) != {"syntax", "definition"} or format["type"] != "grammar":
        shape = "{'type': 'grammar', 'grammar': {'syntax': 'lark' or 'regex', 'definition': …}}"
        raise OptionError(at, f"must be {{'type': 'text'}} or {shape}; got {brief(format)}")
    syntax, definition = grammar["syntax"], grammar["definition"]
    if syntax not in ("lark", "regex"):
        raise OptionError(f"{at}.grammar.syntax", f"must be 'lark' or 'regex'; got {brief(syntax)}")
    if not isinstance(definition, str) or not definition:
        raise OptionError(f"{at}.grammar.definition", f"must be a non-empty text; got {brief(definition)}")
    return InputFormat(syntax, definition)


@dataclass(frozen=True)
class ToolUse:
    """The tools of a chat, and how an answer may call them.

    choice: "auto" leaves it to the model, "none" forbids calls, "required" requires at least one. callable_tools: the
    tools that may be called. parallel: whether an answer may have more than one call.
    """

    tools: tuple[Tool, ...] = ()
    choice: Literal["auto", "none", "required"] = "auto"
    callable_tools: tuple[Tool, ...] = ()
    parallel: bool = True

    @property
    def is_constrained(self) -> bool:
        """Whether this needs a grammar."""
        if not self.tools or self.choice == "none":
            return False
        restricted = len(self.callable_tools) < len(self.tools)
        return self.choice == "required" or not self.parallel or restricted or any(tool.strict for tool in self.tools)


def read_tool_use(tools: object, choice: object = None, parallel: object = None) -> ToolUse:
    """Check `tools`, `tool_choice` and `parallel_tool_calls` of a request; None means the default.

    Raises:
        RequestError: an invalid value or tool, with its place, two tools of one name, or an unknown tool as choice.
    """
    with blaming("tools"):
        read = _read_tools(tools)
    if not isinstance(parallel, bool | None):
        raise OptionError("parallel_tool_calls", f"must be true or false; got {brief(parallel)}")
    if choice is None or choice == "auto":
        return ToolUse(read, "auto", read, parallel is not False)
    if choice == "none":
        return ToolUse(read, "none")
    if not read:
        raise OptionError("tool_choice", f"{brief(choice)} requires a call, but there are no tools: add tools")
    several = parallel is not False
    if choice == "required":
        return ToolUse(read, "required", read, several)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        mode, names = _allowed(choice.get("allowed_tools"))
        return ToolUse(read, mode, _named(names, read), several)
    # A named tool is called once, as in OpenAI's API.
    return ToolUse(read, "required", _named([_chosen_name(choice)], read), parallel=False)


def _named(names: Sequence[str], tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """The tools of these names, in their own order."""
    known = [tool.name for tool in tools]
    if unknown := [name for name in names if name not in known]:
        raise OptionError(
            "tool_choice",
            f"names {brief(unknown[0])}, but the tools are {', '.join(known[:100])}: choose one of them, "
            '"auto", "none" or "required"',
        )
    return tuple(tool for tool in tools if tool.name in names)


def _allowed(allowed: object) -> tuple[Literal["auto", "required"], list[str]]:
    """The mode and the names of {"mode", "tools"}."""
    if isinstance(allowed, Mapping) and set(allowed) == {"mode", "tools"}:
        mode, tools = allowed["mode"], allowed["tools"]
        if mode in ("auto", "required") and isinstance(tools, Sequence) and tools and not isinstance(tools, str):
            return mode, [_chosen_name(tool) for tool in tools]
    raise OptionError(
        "tool_choice",
        "must have allowed_tools: {'mode': 'auto' or 'required', 'tools': [{'type': 'function', 'function': "
        f"{{'name': …}}}}, …]}}; got {brief(allowed)}",
    )


def _chosen_name(choice: object) -> str:
    if isinstance(choice, str):
        return choice
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    named = choice.get(kind) if isinstance(choice, Mapping) and kind in ("function", "custom") else None
    name = named.get("name") if isinstance(named, Mapping) else None
    if not isinstance(name, str):
        raise OptionError(
            "tool_choice",
            'must be "auto", "none", "required", the name of a tool or '
            "{'type': 'function', 'function': {'name': …}} (or of the types custom and allowed_tools); got "
            f"{brief(choice)}",
        )
    return name
