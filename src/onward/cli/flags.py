"""Flags that several commands share, each declared once."""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

from typer import Option

from onward.cli.terminal import waiting


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """The fields of `SamplingParams`; None, False and [] mean not given: the checkpoint's default holds."""

    max_new_tokens: Annotated[
        int | None, Option("--max-new-tokens", "-n", metavar="N", help="The most tokens to generate.")
    ] = None
    temperature: Annotated[
        float | None, Option("--temperature", "-t", metavar="X", help="0 takes the likeliest token; 1 samples freely.")
    ] = None
    top_k: Annotated[
        int | None, Option("--top-k", metavar="N", help="Sample among the N likeliest tokens; 0: among all.")
    ] = None
    top_p: Annotated[
        float | None, Option("--top-p", metavar="X", help="Sample among the likeliest that add up to X; 1: all.")
    ] = None
    min_p: Annotated[
        float | None, Option("--min-p", metavar="X", help="Drop those less than X times as likely as the first.")
    ] = None
    seed: Annotated[int | None, Option("--seed", metavar="N", help="The same seed gives the same text.")] = None
    stop: Annotated[
        list[str] | None, Option("--stop", metavar="TEXT", help="End before TEXT, taken literally. Repeatable.")
    ] = None
    eos: Annotated[list[int] | None, Option("--eos", metavar="ID", help="End after token ID. Repeatable.")] = None
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Let no token end the text.")] = False

    def options(self) -> dict[str, Any]:
        """Those given, as keyword arguments of `LanguageModel.generate`.

        Raises:
            RequestError: a value outside its range; here, before a model is loaded for nothing.
        """
        with waiting("starting …"):  # the first import of torch takes a second
            from onward import SamplingParams
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in given.items() if not (value is None or value is False or value == [])}
        SamplingParams(**given)
        return given


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Which model, and how it is held: the arguments of `onward.load`."""

    model: Annotated[
        str,
        Option("--model", "-m", metavar="SOURCE", show_default=False, help="A folder, a hub id or (default) 'demo'."),
    ] = "demo"
    dtype: Annotated[
        str | None, Option("--dtype", metavar="NAME", help="bfloat16, float16 or float32; else the model's own.")
    ] = None
    device: Annotated[
        str,
        Option("--device", metavar="NAME", show_default=False, help="cpu, cuda, …; else CUDA where there is one."),
    ] = "auto"
    quantize: Annotated[str | None, Option("--quantize", metavar="NAME", help="Hold the weights as int8 or int4.")] = (
        None
    )
    max_seq_len: Annotated[
        int | None, Option("--max-seq-len", metavar="N", help="Context to use; else what the model was made for.")
    ] = None


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take a group of flags as one argument.

    Typer sees one option for every field of a parameter that is annotated with a dataclass; the command is called with
    the dataclass.
    """
    parameters = inspect.signature(command).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in parameters if dataclasses.is_dataclass(p.annotation)}

    @wraps(command)
    def flat(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    seen: list[inspect.Parameter] = []
    for parameter in parameters:
        group = groups.get(parameter.name)
        seen += [parameter.replace(kind=parameter.KEYWORD_ONLY)] if group is None else _parameters(group)
    vars(flat)["__signature__"] = inspect.Signature(seen)
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in seen}
    return flat


def _parameters(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name]) for f in fields(group)]
