"""Tools and tool choices from callers: checked, named in errors, and made from functions."""

import enum
from typing import Annotated, Any, Literal

import pytest
from answers import CLOCK, WEATHER

from onward.chat import read_tool_use
from onward.errors import RequestError

TOOLS = [WEATHER, CLOCK]


class Unit(enum.Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


def forecast(city: str, days: int = 3, unit: Unit | None = None, *, details: list[Literal["rain", "wind"]] = []) -> str:  # noqa: B006
    """The weather of the
    next days.

    Args:
        city: its name,
            in English.
        days (int): how many.

    Returns:
        Words: many.
    """
    return f"{city} {days} {unit} {details}"


def test_templates_get_tools_in_openais_shape() -> None:
    use = read_tool_use(TOOLS)
    assert [tool.function for tool in use.tools] == TOOLS
    assert [tool.parameters["type"] for tool in use.tools] == ["object", "object"], "no parameters are none"


def test_a_function_is_a_tool() -> None:
    (tool,) = read_tool_use([forecast]).tools
    assert tool.function["function"] == {
        "name": "forecast",
        "description": "The weather of the next days.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "its name, in English."},
                "days": {"type": "integer", "description": "how many."},
                "unit": {"anyOf": [{"enum": ["celsius", "kelvin"]}, {"type": "null"}]},
                "details": {"type": "array", "items": {"enum": ["rain", "wind"]}},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    }

    def others(a: dict[str, float], b: bool, c: Annotated[tuple[int, ...], "three"], d, e: list) -> None: ...  # type: ignore[no-untyped-def, type-arg]

    (tool,) = read_tool_use([others]).tools
    assert "description" not in tool.function["function"]
    assert tool.parameters["properties"] == {
        "a": {"type": "object", "additionalProperties": {"type": "number"}},
        "b": {"type": "boolean"},
        "c": {"type": "array", "items": {"type": "integer"}},
        "d": {},
        "e": {"type": "array"},
    }


def of(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | function}


@pytest.mark.parametrize(
    ("tools", "error"),
    [
        ("weather", "tools must be a list"),
        (WEATHER, "tools must be a list"),
        ([WEATHER, "clock"], r"tools\[1\] must be .* or a function; got 'clock'"),
        ([{"name": "clock"}], r"tools\[0\] must be .*template="),
        ([{"type": "web_search", "function": {"name": "f"}}], r"tools\[0\]\.type must be 'function'; got 'web_search'"),
        ([{"type": "function", "function": "f"}], r"tools\[0\]\.function must be an object"),
        ([of(name="two words")], r"tools\[0\]\.function\.name must be 1 to 64 letters.* got 'two words'"),
        ([of(name="a" * 65)], r"tools\[0\]\.function\.name"),
        ([of(arguments={})], r"tools\[0\]\.function has an unknown key 'arguments'"),
        ([of(description=5)], r"tools\[0\]\.function\.description must be a text"),
        ([of(parameters={"type": "string"})], r"tools\[0\]\.function\.parameters must be the JSON schema of an object"),
        ([of(strict="yes")], r"tools\[0\]\.function\.strict must be true or false"),
        ([of(), CLOCK, of()], r"tools\[2\] and tools\[0\] are called 'f'"),
        ([lambda *rest: rest], r"tools\[0\]: <lambda> has the parameter \*rest"),
        ([lambda x, /: x], r"tools\[0\]: <lambda> has the parameter x, but calls pass arguments by name"),
        ([lambda x: x], r"tools\[0\]\.function\.name"),
    ],
)
def test_invalid_tools_are_named(tools: Any, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        read_tool_use(tools)


def test_types_that_json_lacks_are_named() -> None:
    def of_bytes(data: bytes, z: complex) -> None: ...

    with pytest.raises(RequestError, match=r"tools\[0\]: z of of_bytes is of type <class 'complex'>"):
        read_tool_use([of_bytes])


def test_choices() -> None:
    assert [tool.name for tool in read_tool_use(TOOLS).callable_tools] == ["weather", "clock"]
    assert read_tool_use(TOOLS, "auto", True) == read_tool_use(TOOLS)
    assert read_tool_use(TOOLS, "none").choice == "none"
    required = read_tool_use(TOOLS, "required")
    assert (required.choice, required.parallel, len(required.callable_tools)) == ("required", True, 2)
    for choice in ("clock", {"type": "function", "function": {"name": "clock"}}):
        named = read_tool_use(TOOLS, choice)
        assert (named.choice, named.parallel, named.callable_tools) == ("required", False, named.tools[1:])
        assert len(named.tools) == 2, "the template shows them all"


@pytest.mark.parametrize(
    ("choice", "error"),
    [
        ("wether", "tool_choice names 'wether', but the tools are weather, clock"),
        ({"type": "function", "function": {"name": "f"}}, "tool_choice names 'f'"),
        ({"type": "function"}, 'tool_choice must be "auto", "none", "required", the name of a tool or'),
        (5, "tool_choice must be"),
    ],
)
def test_invalid_choices_are_named(choice: Any, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        read_tool_use(TOOLS, choice)


def test_a_forced_call_needs_tools() -> None:
    for choice in ("required", "weather"):
        with pytest.raises(RequestError, match="requires a call, but there are no tools"):
            read_tool_use([], choice)
    with pytest.raises(RequestError, match="parallel_tool_calls must be true or false; got 'no'"):
        read_tool_use(TOOLS, None, "no")
