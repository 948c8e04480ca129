"""Tools, and the choice of the tools that a model may or must call."""

import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

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
            raise RequestError(f"{at}: {name} takes {parameter}, and a call gives its arguments by name", at)
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
_SHAPE = "{'type': 'function', 'function': {'name': …, 'parameters': …}}"


@dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    parameters: the JSON schema of its arguments, an object. strict: whether calls are constrained to it.
    given: the tool in OpenAI's format, for chat templates. place: of the schema in the request, for errors.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    given: Mapping[str, Any]
    place: str = "parameters"


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
    if not isinstance(tool, Mapping) or set(tool) != {"type", "function"}:
        raise OptionError(
            at,
            f"must be {_SHAPE} or a function; got {brief(tool)}. Pass tools that the template reads in another form as "
            "template={'tools': …}",
        )
    function = tool["function"]
    if tool["type"] != "function":
        raise OptionError(f"{at}.type", f"must be 'function'; got {brief(tool['type'])}")
    if not isinstance(function, Mapping):
        raise OptionError(f"{at}.function", f"must be an object with a name; got {brief(function)}")
    if unknown := [key for key in function if key not in _KEYS]:
        raise OptionError(f"{at}.function", f"has an unknown key {brief(unknown[0])}; its keys are {', '.join(_KEYS)}")
    name, description, parameters, strict = (function.get(key) for key in _KEYS)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise OptionError(
            f"{at}.function.name", f"must be 1 to 64 letters, digits, '_', '.' and '-'; got {brief(name)}"
        )
    if not isinstance(description, str | None):
        raise OptionError(f"{at}.function.description", f"must be a text; got {brief(description)}")
    parameters = {"type": "object", "properties": {}} if parameters is None else parameters
    place = f"{at}.function.parameters"
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise OptionError(place, f"must be the JSON schema of an object; got {brief(parameters)}")
    check_schema(parameters, place)
    if not isinstance(strict, bool | None):
        raise OptionError(f"{at}.function.strict", f"must be true or false; got {brief(strict)}")
    return Tool(name, normalized(parameters, place), bool(strict), tool, place)


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
        return self.choice == "required" or not self.parallel or any(tool.strict for tool in self.tools)


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
    name = "" if choice == "required" else _chosen_name(choice)
    if not read:
        raise OptionError("tool_choice", f"{brief(choice)} requires a call, but there are no tools: add tools")
    chosen = tuple(tool for tool in read if not name or tool.name == name)
    if not chosen:
        raise OptionError(
            "tool_choice",
            f"names {brief(name)}, but the tools are {', '.join(tool.name for tool in read[:100])}: choose one of "
            'them, "auto", "none" or "required"',
        )
    # A named tool is called once, as in OpenAI's API.
    return ToolUse(read, "required", chosen, parallel is not False and not name)


def _chosen_name(choice: object) -> str:
    if isinstance(choice, str):
        return choice
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise OptionError(
            "tool_choice",
            'must be "auto", "none", "required", the name of a tool or '
            f"{{'type': 'function', 'function': {{'name': …}}}}; got {brief(choice)}",
        )
    return name
