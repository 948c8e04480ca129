"""The options of the commands: name, type, default, help and group of each.

Those of `generate` are in option_flags.py, which is made from their declarations: a command's help must not import
torch, as these do.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import partial, wraps
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer import Argument, Option
from typer.core import TyperCommand

from onward.cli.inputs import read_text
from onward.cli.terminal import waiting
from onward.errors import OptionError, RequestError
from onward.util.options import LENGTH, OUTPUT, REPETITION, SAMPLING, STRUCTURE, TEXTS
from onward.util.text_input import TextError, parse_request_json

PROMPT = "Prompt"
CHAT = "Chat"
MODEL = "Model"
# In the order of the help; a command's own options come first, without a group.
GROUPS = (PROMPT, MODEL, CHAT, LENGTH, SAMPLING, REPETITION, STRUCTURE, TEXTS, OUTPUT)

# The placeholder in the help for a value of each type.
_METAVARS = {int: "N", float: "X", Path: "FILE", str: "TEXT"}

DTYPES = ("bfloat16", "float16", "float32")
_BACKENDS = ("auto", "native", "cuda", "inductor", "eager")


def flag(
    help: str,
    *names: str,
    default: Any = None,
    group: str | None = None,
    choices: Sequence[str] = (),
    is_secret: bool = False,
    **settings: Any,
) -> Any:
    """Declare an option, as a field of a dataclass or as the default of a command's parameter.

    names: a long name that replaces the field's, or a short one in addition. choices: for shell completion.
    is_secret: leave it out of reprs. settings: for `typer.Option`.
    """
    if choices:
        settings |= {"metavar": "NAME", "autocompletion": lambda: list(choices)}
    metadata = {"help": help, "names": names, "rich_help_panel": group, **settings}
    return field(default=default, repr=not is_secret, metadata=metadata)


_model, _chat = (partial(flag, group=group) for group in (MODEL, CHAT))


def options_of(*flags: Any) -> dict[str, Any]:
    """Return the flags in use as keyword arguments of `LanguageModel.generate`, checked before a model is loaded.

    flags: `SamplingFlags` and `GenerateFlags`.
    """
    with waiting("starting …"):  # the first import of torch takes a second
        from onward.language_model import GenerateOptions
    values = [pair for group in flags for pair in vars(group).items()]
    options = {name: value for name, value in values if not (value is None or value is False or value == [])}
    if "grammar" in options:
        options["grammar"] = read_text(options["grammar"])
    if file := options.get("json_schema"):
        text = read_text(file)
        try:
            options["json_schema"] = parse_request_json(text)
        except TextError as error:
            raise RequestError(f"{str(file)!r} is not a JSON Schema: {error}") from error
    # The checkpoint's defaults, not known yet, may sample.
    try:
        GenerateOptions(**({} if options.get("beams", 1) > 1 else {"temperature": 1.0}) | options)
    except OptionError as error:
        names = {each.name: _long_name(each.name, each.metadata["names"]) for group in flags for each in fields(group)}
        raise RequestError(f"{names.get(error.option, error.option)} {error.problem}", error.option) from error
    return options


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """Arguments of `onward.load`, except the source."""

    dtype: str | None = _model("bfloat16, float16 or float32.", choices=DTYPES, show_default="the checkpoint's")
    device: str = _model("cpu or cuda; auto is cuda if available.", default="auto", metavar="NAME")
    quantize: str | None = _model("Quantize the weights to int8, int4 or iq4_nl.", choices=("int8", "int4", "iq4_nl"))
    merge: str | None = _model("Merge an adapter (folder or hub id) into the weights.", metavar="ADAPTER")
    name_map: Path | None = _model("JSON file that maps weight names to Hugging Face's.")
    max_seq_len: int | None = _model("Context length in tokens.", show_default="the model's")
    compile: str = _model("Backend: native, cuda, inductor, eager or auto.", default="auto", choices=_BACKENDS)
    pipeline: int = _model("Split the layers across N processes.", default=1)
    threads: int | None = _model("Number of CPU threads.", show_default="see onward info")


@dataclass(frozen=True, kw_only=True)
class ModelFlags(LoadFlags):
    """Arguments of `onward.load`."""

    model: str = _model("Folder, hub id or 'demo'.", "-m", default="demo", metavar="SOURCE")


SourceArgument = Annotated[
    str | None, Argument(metavar="SOURCE", help="Model folder, hub id or 'demo'; the same as --model.")
]


def with_source(flags: ModelFlags, source: str | None) -> ModelFlags:
    """Return the flags with the model of the positional argument, if any."""
    if source is None:
        return flags
    if flags.model != ModelFlags.model:
        raise RequestError(f"the model is named twice, {source!r} and --model {flags.model}: give one")
    return dataclasses.replace(flags, model=source)


@dataclass(frozen=True, kw_only=True)
class TemplateFlags:
    """Variables of the chat template; None leaves one to the template."""

    thinking: bool | None = _chat("Turn reasoning on or off.", show_default="the chat template's")
    template_option: list[str] | None = _chat("Set a chat template variable to JSON or text.", metavar="NAME=VALUE")

    @property
    def is_set(self) -> bool:
        return self.thinking is not None or bool(self.template_option)


@dataclass(frozen=True, kw_only=True)
class AdapterFlags:
    """The adapters to load; requests select one by name."""

    adapter: list[str] | None = _model("Load an adapter (folder or hub id) as NAME.", metavar="NAME=SOURCE")

    def sources(self) -> dict[str, str]:
        sources: dict[str, str] = {}
        for text in self.adapter or ():
            name, _, source = text.partition("=")
            if not name or not source:
                raise RequestError(f"--adapter takes NAME=SOURCE, such as poet=my-adapter; got {text!r}")
            if name in sources:
                raise RequestError(f"--adapter gives the name {name!r} twice")
            sources[name] = source
        return sources

    def first(self) -> dict[str, str]:
        """Return the first adapter as a generate option; empty if there is none."""
        return {"adapter": next(iter(self.sources()))} if self.adapter else {}


@dataclass(frozen=True, kw_only=True)
class DraftFlags:
    draft: str | None = _model(
        "Speculative decoding with 'lookup', 'suffix' or a small model of the same vocabulary; the text is unchanged.",
        metavar="SOURCE",
    )


_OVERCOMMIT = "Reserve only 1/X of the KV cache that sequences may need; preempt the newest if it runs out."


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """The limits of an `Engine`; None leaves one to the engine's default."""

    max_sequences: int | None = flag("Maximum batch size in sequences.", show_default="32")
    cache_memory: float | None = flag(
        "KV cache of all models together, in GiB.", metavar="GIB", show_default="up to 1/4 of memory"
    )
    max_waiting: int | None = flag("Maximum number of waiting requests.", show_default="1024")
    max_waiting_tokens: int | None = flag("Maximum number of waiting prompt tokens.", show_default="1000000")
    max_step_ms: float | None = flag("Target step time while prompts are processed.", default=1000.0, metavar="MS")
    overcommit: float | None = flag(_OVERCOMMIT, show_default="1")

    def limits(self) -> dict[str, Any]:
        """Return the limits as keyword arguments of `Engine`, which checks all but cache_memory."""
        limits = {name: value for name, value in vars(self).items() if value is not None}
        if self.cache_memory is not None:
            if not 0 < self.cache_memory < 2**20:
                raise RequestError(f"--cache-memory must be a number of GiB above 0; got {self.cache_memory}")
            limits["cache_memory"] = int(self.cache_memory * 2**30)
        return limits


@dataclass(frozen=True, kw_only=True)
class ServerEngineFlags(EngineFlags):
    """Defaults for a server: clients wait for each token, and often leave the length of a text open."""

    max_step_ms: float | None = flag(
        "Target step time while prompts are processed.", metavar="MS", show_default="2.25x a decode step, at least 100"
    )
    overcommit: float | None = flag(_OVERCOMMIT, default=4.0)


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Expose each `flag` of a command to Typer, including the fields of parameters that are dataclasses."""
    parameters = inspect.signature(command).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in parameters if dataclasses.is_dataclass(p.annotation)}

    @wraps(command)
    def flattened(**arguments: Any) -> None:
        for name, group in groups.items():
            arguments[name] = group(**{each.name: arguments.pop(each.name) for each in fields(group)})
        command(**arguments)

    flat: list[inspect.Parameter] = []
    for parameter in parameters:
        if parameter.name in groups:
            flat += _parameters(groups[parameter.name])
        elif isinstance(parameter.default, Field):
            flat.append(_parameter(parameter.name, parameter.annotation, parameter.default))
        else:
            flat.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
    vars(flattened)["__signature__"] = inspect.Signature(flat)
    flattened.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return flattened


def _parameters(group: type[Any]) -> list[inspect.Parameter]:
    """The parameters for a group's fields, its own before the inherited ones."""
    hints = get_type_hints(group)
    inherited = {f.name for base in group.__bases__ if dataclasses.is_dataclass(base) for f in fields(base)}
    ordered = sorted(fields(group), key=lambda each: each.name in inherited)
    return [_parameter(each.name, hints[each.name], each) for each in ordered]


def _parameter(name: str, annotation: Any, declared: "Field[Any]") -> inspect.Parameter:
    """A parameter for Typer; the flag is named after the parameter unless `declared` names it."""
    settings = dict(declared.metadata)
    names = list(settings.pop("names"))
    kind = get_args(annotation)[0] if isinstance(annotation, UnionType) else annotation
    if (long := _long_name(name, names)) not in names:
        names.append(f"{long}/--no-{long[2:]}" if kind is bool and declared.default is not False else long)
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
        settings["help"] += " Repeatable."
    settings.setdefault("metavar", _METAVARS.get(kind))
    option = Option(*names, **settings)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=declared.default, annotation=Annotated[annotation, option]
    )


def _long_name(name: str, names: Sequence[str]) -> str:
    return next((each for each in names if each.startswith("--")), f"--{name.replace('_', '-')}")


class GroupedCommand(TyperCommand):
    """A command whose help has a section for each group of options, in plain text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", "Options", *GROUPS, "Last")}
        for param in self.get_params(ctx):
            section = getattr(param, "rich_help_panel", None) or "Options"
            if param.param_type_name == "argument":
                section = "Arguments"
            if "--help" in param.opts:
                section = "Last"
            if (record := param.get_help_record(ctx)) is not None:
                sections[section].append(record)
        last = sections.pop("Last")  # --help joins the last section
        sections = {name: rows for name, rows in sections.items() if rows}
        sections[list(sections)[-1]] += last
        width = max(len(name) for rows in sections.values() for name, _ in rows)
        for name, rows in sections.items():
            with formatter.section(name):
                formatter.write_dl([(f"{names:<{width}}", text) for names, text in rows])
