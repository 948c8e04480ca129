"""An option is declared once; its validation, flag, keyword, schema and row in the reference follow."""

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter
from typer.testing import CliRunner

from onward import GenerateOptions, SamplingParams
from onward.cli.flags import with_flags
from onward.errors import OptionError, RequestError
from onward.protocols.options import type_of
from onward.sampling.transforms import Filter
from onward.util.options import LENGTH, SAMPLING, Option, option, options_of

OPTIONS = options_of(GenerateOptions)
NUMBERS = [each for each in OPTIONS.values() if each.kind in (int, float)]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """.ci/generate.py."""
    spec = importlib.util.spec_from_file_location("generate", Path(__file__).parents[2] / ".ci" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, kw_only=True)
class TopA(Filter):
    """top_a, top_a_skips, top_a_tags: a transform that nothing in the package knows."""

    top_a: float = option(0.0, low=0, high=1, help="Drop tokens below X times the square.", group=SAMPLING)
    top_a_skips: int | None = option(None, low=1, help="Begin after N tokens.", group=LENGTH, flag="--skip")
    top_a_tags: tuple[str, ...] = option((), low=1, help="Name the drops TEXT.", group=SAMPLING, flag="-a")


@dataclass(frozen=True, kw_only=True)
class Params(SamplingParams, TopA):
    """Onward's options, and those of `TopA`."""


def test_a_transforms_options_are_validated_by_their_declarations() -> None:
    assert Params(top_a=1, top_a_skips=3, top_a_tags="x").top_a_tags == ("x",)
    for values, message in [
        ({"top_a": 1.5}, r"top_a must be a number in \[0, 1\]; got 1.5"),
        ({"top_a": True}, "top_a must be a number"),
        ({"top_a_skips": 0}, "top_a_skips must be a whole number of 1 or more; got 0"),
        ({"top_a_tags": ["x", ""]}, "top_a_tags must be a non-empty string; got ''"),
    ]:
        with pytest.raises(OptionError, match=message) as caught:
            Params(**values)
        assert caught.value.option == next(iter(values))


def test_a_transforms_options_are_flags_keywords_and_rows(generate: ModuleType) -> None:
    options = options_of(TopA)
    names: dict[str, Any] = {}
    exec(generate.flags(("Flags", "Flags of TopA.", options)), names)
    got: list[Any] = []

    def command(flags: object) -> None:
        got.append(flags)

    command.__annotations__["flags"] = names["Flags"]
    app = typer.Typer()
    app.command()(with_flags(command))
    result = CliRunner().invoke(app, ["--top-a", "0.5", "--skip", "2", "-a", "x", "--top-a-tags", "y"])
    assert result.exit_code == 0, result.output
    assert got == [names["Flags"](top_a=0.5, top_a_skips=2, top_a_tags=["x", "y"])]

    keywords: dict[str, Any] = {}
    exec(generate.keywords(("TopADict", "TypedDict", "Keywords of TopA.", options)), keywords)
    assert set(keywords["TopADict"].__annotations__) == set(options)
    assert "\n    top_a_tags: str | Sequence[str]\n" in generate.keywords(("D", "TypedDict", "", options))
    page = generate.page(options)
    assert "| `top_a` | `0.0` | float, in [0, 1] | `--top-a X` | Drop tokens below X times the square. |" in page
    assert "| `top_a_skips` |  | int, 1 … | `--skip N` | Begin after N tokens. |" in page


def test_a_transforms_options_have_a_json_schema() -> None:
    schemas = {name: TypeAdapter(type_of(each)).json_schema() for name, each in options_of(TopA).items()}
    assert schemas["top_a"]["anyOf"] == [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}]
    skips = Draft202012Validator(schemas["top_a_skips"])
    assert [skips.is_valid(value) for value in (1, None, 0, 1.5)] == [True, True, False, False]
    tags = Draft202012Validator(schemas["top_a_tags"])
    assert [tags.is_valid(value) for value in ("x", ["x"], "", [""])] == [True, True, False, False]


def test_every_option_has_a_group_and_help(generate: ModuleType) -> None:
    for each in OPTIONS.values():
        assert each.group in generate.GROUPS.values(), each.name
        assert each.help.endswith("."), each.name
        assert len(each.help) < 80, each.name


def test_the_generated_files_are_current(generate: ModuleType) -> None:
    for name, text in generate.generated().items():
        assert (generate.ROOT / name).read_text(encoding="utf-8") == text, name


@pytest.mark.parametrize("option", NUMBERS, ids=lambda option: option.name)
def test_numbers_are_admitted_up_to_their_declared_bounds(option: Option) -> None:
    step = 1 if option.kind is int else 1e-6
    for bound, inside in [(option.low, 1), (option.above, 1), (option.high, -1), (option.below, -1)]:
        if bound is not None:
            assert option.admits(bound) == (bound in (option.low, option.high))
            assert option.admits(bound + inside * step) or abs(bound) > 2**64
            outside = math.nextafter(bound, -inside * math.inf) if option.kind is float else bound - inside
            assert not option.admits(outside)
    for value in (True, "1", None, [], math.nan, 1 + 1j, *([math.inf, 10**400] if option.kind is float else [1.5])):
        assert not option.admits(value)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_error_names_the_option(name: str) -> None:
    class Stranger:
        pass

    with pytest.raises(RequestError) as caught:
        GenerateOptions(**{name: Stranger()})
    assert caught.value.option == name
    assert str(caught.value).startswith(name)
