"""Python functions as tools: the name, the first words of the docstring, and a JSON schema of the parameters."""

import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from onward.errors import RequestError

_SCALARS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
# A line of a docstring's "Args:", as Google's style has it: "name: words" or "name (type): words".
_ARGUMENT = re.compile(r"^(\w+)(?: *\([^)]*\))?: *(.+)$")
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):$")


def described_function(function: Callable[..., Any], at: str) -> dict[str, Any]:
    """A function as {"name", "description", "parameters"}. at: its place, for errors.

    Raises:
        RequestError: a parameter that JSON has no type for, or that cannot be given by name.
    """
    name = getattr(function, "__name__", type(function).__name__)
    try:
        signature = inspect.signature(function)
        hints = typing.get_type_hints(function)
    except Exception as error:  # annotations are code of the caller's
        raise RequestError(f"{at}: the signature of {name} cannot be read: {error}") from error
    words, of_parameters = _read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise RequestError(f"{at}: {name} takes {parameter}, and a call gives its arguments by name")
        schema = _schema(hints.get(parameter.name, Any), f"{at}: {parameter.name} of {name}")
        described = {"description": text} if (text := of_parameters.get(parameter.name)) else {}
        properties[parameter.name] = schema | described
    required = [each.name for each in signature.parameters.values() if each.default is each.empty]
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"name": name, **({"description": words} if words else {}), "parameters": parameters}


def _schema(kind: Any, at: str) -> dict[str, Any]:
    """The JSON schema of a type."""
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
    raise RequestError(f"{at} is of type {kind!r}, which JSON does not have: give the tool as a JSON schema")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The words before the first section, and those of each parameter."""
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
