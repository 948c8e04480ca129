"""Options of commands: their declaration as `flag`s, their Typer parameters, and those that several commands have.

The options of `generate` are in option_flags.py, which is made from their declarations: a command's help must not
import torch, as these do.
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

from onward.errors import OnwardError, RequestError
from onward.util.options import LENGTH, OUTPUT, REPETITION, SAMPLING, STRUCTURE, TEXTS

INPUT = "Input"
NETWORK = "Network"
AUTHENTICATION = "Authentication"
REPLICAS = "Replicas"
TASKS = "Tasks"
QUANTIZATION = "Quantization"
MEASUREMENT = "Measurement"
MODEL = "Model"
ON_DEMAND = "Models on demand"
MEMORY = "Memory"
CHAT = "Chat"
BATCHING = "Batching and memory"
REQUESTS = "Requests"
LIMITS = "Limits"
FILES = "Files and batches"
LOGGING = "Logging"
# In the order of the help.
GROUPS = (
    *(INPUT, NETWORK, AUTHENTICATION, REPLICAS, TASKS, QUANTIZATION, MEASUREMENT, MODEL, ON_DEMAND, MEMORY, CHAT),
    *(BATCHING, REQUESTS, LIMITS, FILES, LOGGING),
    *(LENGTH, SAMPLING, REPETITION, STRUCTURE, TEXTS, OUTPUT),
)

# The placeholder in the help for a value of each type.
_METAVARS = {int: "N", float: "X", Path: "FILE", str: "TEXT"}


def flag(
    help: str,
    *names: str,
    group: str,
    default: Any = None,
    show_default: str | None = None,
    choices: Sequence[str] = (),
    low: float | None = None,
    high: float | None = None,
    is_secret: bool = False,
    **settings: Any,
) -> Any:
    """Declare an option, as a field of a dataclass or as the default of a command's parameter.

    names: a long name that replaces the field's, or a short one in addition. group: its section in the help.
    show_default: the default in words. choices: for shell completion. low, high: inclusive bounds of a number.
    is_secret: leave it out of reprs. settings: for `typer.Option`.
    """
    if choices:
        settings |= {"metavar": "NAME", "autocompletion": lambda: list(choices)}
    shown = _shown(default) if show_default is None else show_default
    metadata = {"help": help, "names": names, "rich_help_panel": group, **settings}
    return field(default=default, repr=not is_secret, metadata=metadata | {"shown": shown, "bounds": (low, high)})


def _shown(default: Any) -> str:
    """A default in the help; "" for none."""
    if default is True:
        return "on"
    if default is None or default is False or default is ...:
        return ""
    return f"{default:g}" if isinstance(default, int | float) else str(default)


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
            group = groups[parameter.name]
            hints, bases = get_type_hints(group), filter(dataclasses.is_dataclass, group.__bases__)
            inherited = {each.name for base in bases for each in fields(base)}
            ordered = sorted(fields(group), key=lambda each: each.name in inherited)  # its own first
            flat += [_parameter(each.name, hints[each.name], each) for each in ordered]
        elif isinstance(parameter.default, Field):
            flat.append(_parameter(parameter.name, parameter.annotation, parameter.default))
        else:
            flat.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
    vars(flattened)["__signature__"] = inspect.Signature(flat)
    flattened.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return flattened


def _parameter(name: str, annotation: Any, declared: "Field[Any]") -> inspect.Parameter:
    """A parameter for Typer; the flag is named after the parameter unless `declared` names it."""
    settings = dict(declared.metadata)
    names, bounds, shown = list(settings.pop("names")), settings.pop("bounds"), settings.pop("shown")
    kind = get_args(annotation)[0] if isinstance(annotation, UnionType) else annotation
    long = next((each for each in names if each.startswith("--")), f"--{name.replace('_', '-')}")
    if long not in names:
        names.append(f"{long}/--no-{long[2:]}" if kind is bool and declared.default is not False else long)
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
        settings["help"] += " Repeatable."
    if shown:
        settings["help"] += f" [default: {shown}]"
    if kind in (int, float):
        settings["parser"] = _number_parser(long, kind, *bounds)
    settings.setdefault("metavar", _METAVARS.get(kind))
    option = Option(*names, show_default=False, show_envvar=False, **settings)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=declared.default, annotation=Annotated[annotation, option]
    )


def _number_parser(flag: str, kind: type[Any], low: float | None, high: float | None) -> Callable[[Any], Any]:
    """Return a parser of a number within inclusive bounds. Its errors don't depend on the version of Typer."""
    bounds = "" if low is None else f" of {low:g} or more" if high is None else f" from {low:g} to {high:g}"
    noun = {int: "whole number", float: "number"}[kind]

    def parse(value: Any) -> Any:
        try:
            number = kind(value)
        except (ValueError, OverflowError):
            number = None
        if number is None or (low is not None and not number >= low) or (high is not None and not number <= high):
            # Not a ValueError, which Typer would catch and print in its own words.
            raise OnwardError(f"{flag} must be a {noun}{bounds}; got {repr(value) if number is None else number}")
        return number

    return parse


def bytes_of(flag: str, gib: float) -> int:
    """Return the bytes of a flag in GiB; raise `RequestError` if it is 0, or more than any machine has."""
    if not 0 < gib < 2**20:
        raise RequestError(f"{flag} must be a number of GiB above 0; got {gib}")
    return int(gib * 2**30)


DTYPES = ("bfloat16", "float16", "float32")
_FORMATS = ("int8", "int4", "iq4_nl")
_BACKENDS = ("auto", "native", "cuda", "inductor", "eager")

_model, _chat, _batching, _request = (partial(flag, group=group) for group in (MODEL, CHAT, BATCHING, REQUESTS))

CACHE_FORMAT = flag(
    "Keep keys and values in 8 bits: int8.", group=MODEL, choices=("int8",), show_default="the model's dtype"
)
AS_JSON = flag("Print one JSON object.", "--json", group=OUTPUT, default=False)
TEXT_FILE = flag("Read the text from FILE.", "-f", group=INPUT)
RAY_ADDRESS = flag(
    "Ray cluster to join; auto: this machine's.", group=REPLICAS, metavar="HOST:PORT", show_default="a new one here"
)


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """Arguments of `onward.load`, except the source."""

    dtype: str | None = _model("bfloat16, float16 or float32.", choices=DTYPES, show_default="the checkpoint's")
    device: str = _model("cpu, cuda or auto (CUDA if available).", default="auto", metavar="NAME")
    quantize: str | None = _model("Quantize the weights to int8, int4 or iq4_nl.", choices=_FORMATS)
    cache_format: str | None = CACHE_FORMAT
    merge: str | None = _model("Merge an adapter (folder or hub id) into the weights.", metavar="ADAPTER")
    name_map: Path | None = _model("JSON file that maps weight names to Hugging Face's.")
    max_seq_len: int | None = _model("Context length in tokens.", show_default="the model's")
    compile: str = _model("Backend: native, cuda, inductor, eager or auto.", default="auto", choices=_BACKENDS)
    prefix_cache_dir: Path | None = _model("Share the prefix cache with later runs in DIR.", metavar="DIR")
    prefix_cache_disk: float | None = _model("Disk space for it, in GiB.", metavar="GIB", show_default="16")
    pipeline: int = _model("Split the layers across N processes.", default=1)
    threads: int | None = _model("Number of CPU threads.", show_default="physical cores", low=1, high=256)


@dataclass(frozen=True, kw_only=True)
class ModelFlags(LoadFlags):
    """Arguments of `onward.load`."""

    model: str = _model("Model folder, GGUF file, hub id or demo.", "-m", default="demo", metavar="SOURCE")


SourceArgument = Annotated[
    str | None, Argument(metavar="SOURCE", help="Model folder, GGUF file, hub id or demo; the same as --model.")
]


def with_source(flags: ModelFlags, source: str | None) -> ModelFlags:
    """Return the flags with the model of the positional argument, if any."""
    if source is None:
        return flags
    if flags.model != ModelFlags.model:
        raise RequestError(f"two models, {source!r} and --model {flags.model}: give one")
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

    adapter: list[str] | None = _model(
        "Load an adapter (folder or hub id); requests use its NAME.", metavar="NAME=SOURCE"
    )

    def sources(self) -> dict[str, str]:
        return _by_name("--adapter", self.adapter, "NAME=SOURCE, such as poet=my-adapter")

    def vectors(self) -> dict[str, str]:
        """Return the files of control vectors that requests can name."""
        return {}


@dataclass(frozen=True, kw_only=True)
class ServedAdapterFlags(AdapterFlags):
    """The adapters and control vectors to load; requests select one by name."""

    control_vector: list[str] | None = _model(
        "Load a control vector (a GGUF file); requests use its NAME.", metavar="NAME=FILE"
    )

    def vectors(self) -> dict[str, str]:
        return _by_name("--control-vector", self.control_vector, "NAME=FILE, such as happy=happy.gguf")


def _by_name(flag: str, texts: Sequence[str] | None, expected: str) -> dict[str, str]:
    sources: dict[str, str] = {}
    for text in texts or ():
        name, _, source = text.partition("=")
        if not name or not source:
            raise RequestError(f"{flag} must be {expected}; got {text!r}")
        if name in sources:
            raise RequestError(f"{flag} has the name {name!r} twice: rename one")
        sources[name] = source
    return sources


@dataclass(frozen=True, kw_only=True)
class AppliedAdapterFlags(AdapterFlags):
    """The adapters to load, of which the first applies."""

    adapter: list[str] | None = _model(
        "Apply an adapter (folder or hub id); of several, the first.", metavar="NAME=SOURCE"
    )

    def first(self) -> dict[str, str]:
        """Return the first adapter as a generate option; empty if there is none."""
        return {"adapter": next(iter(self.sources()))} if self.adapter else {}


@dataclass(frozen=True, kw_only=True)
class DraftFlags:
    draft: str | None = _model(
        "Draft with lookup, suffix, mtp, an EAGLE-3 head or a small model: the same text.", metavar="DRAFT"
    )


@dataclass(frozen=True, kw_only=True)
class BodyFlags:
    """How request bodies are read."""

    limit: list[str] | None = _request("Change a limit on request bodies, such as n=16.", metavar="NAME=N")
    ignore_unsupported: bool = _request("Drop unsupported hints instead of refusing them.", default=False)

    def limits(self) -> dict[str, int]:
        limits: dict[str, int] = {}
        for text in self.limit or ():
            name, _, number = text.partition("=")
            if not name or not number.isascii() or not number.isdigit() or len(number) > 18:
                raise RequestError(f"--limit must be NAME=N, such as n=16; got {text!r}")
            limits[name] = int(number)
        return limits


_max_step_ms = partial(_batching, "Target step time in ms while prompts are processed.", metavar="MS")
_overcommit = partial(_batching, "Reserve 1/X of a request's KV cache; preempt if memory runs out.", low=1)


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """The limits of an `Engine`; None leaves one to the engine's default."""

    max_sequences: int | None = _batching("Maximum batch size in sequences.", show_default="32", low=1)
    cache_memory: float | None = _batching(
        "Memory for the KV cache of all models, in GiB.", metavar="GIB", show_default="at most 1/4 of the memory"
    )
    max_step_ms: float | None = _max_step_ms(default=1000.0, low=0)
    overcommit: float | None = _overcommit(show_default="1")
    max_waiting: int | None = flag("Maximum number of queued requests.", group=LIMITS, show_default="1024", low=1)
    max_waiting_tokens: int | None = flag(
        "Maximum number of queued prompt tokens.", group=LIMITS, show_default="1000000", low=1
    )

    def limits(self) -> dict[str, Any]:
        """Return the limits as keyword arguments of `Engine`, which checks all but cache_memory."""
        limits = {name: value for name, value in vars(self).items() if value is not None}
        if self.cache_memory is not None:
            limits["cache_memory"] = bytes_of("--cache-memory", self.cache_memory)
        return limits


@dataclass(frozen=True, kw_only=True)
class ServerEngineFlags(EngineFlags):
    """Defaults for a server: clients wait for each token, and often leave the length of a text open."""

    max_step_ms: float | None = _max_step_ms(show_default="1.8x a decode step, at least 40", low=0)
    overcommit: float | None = _overcommit(default=4.0)
