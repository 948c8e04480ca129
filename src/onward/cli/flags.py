"""The options that several commands have.

Those of `generate` are in option_flags.py, which is made from their declarations: a command's help must not import
torch, as these do.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument

from onward.cli.declarations import BATCHING, CHAT, INPUT, LIMITS, MODEL, REPLICAS, REQUESTS, flag
from onward.cli.inputs import read_text
from onward.cli.terminal import waiting
from onward.errors import RequestError
from onward.util.options import OUTPUT
from onward.util.text_input import TextError, parse_request_json

DTYPES = ("bfloat16", "float16", "float32")
_FORMATS = ("int8", "int4", "iq4_nl")
_BACKENDS = ("auto", "native", "cuda", "inductor", "eager")

_model, _chat, _batching, _request = (partial(flag, group=group) for group in (MODEL, CHAT, BATCHING, REQUESTS))

AS_JSON = flag("Print one JSON object.", "--json", group=OUTPUT, default=False)
TEXT_FILE = flag("Read the text from FILE.", "-f", group=INPUT)
RAY_ADDRESS = flag(
    "Ray cluster to join; auto: this machine's.", group=REPLICAS, metavar="HOST:PORT", show_default="a new one here"
)


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
    GenerateOptions(**({} if options.get("beams", 1) > 1 else {"temperature": 1.0}) | options)
    return options


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """Arguments of `onward.load`, except the source."""

    dtype: str | None = _model("bfloat16, float16 or float32.", choices=DTYPES, show_default="the checkpoint's")
    device: str = _model("cpu, cuda or auto (CUDA if available).", default="auto", metavar="NAME")
    quantize: str | None = _model("Quantize the weights to int8, int4 or iq4_nl.", choices=_FORMATS)
    merge: str | None = _model("Merge an adapter (folder or hub id) into the weights.", metavar="ADAPTER")
    name_map: Path | None = _model("JSON file that maps weight names to Hugging Face's.")
    max_seq_len: int | None = _model("Context length in tokens.", show_default="the model's")
    compile: str = _model("Backend: native, cuda, inductor, eager or auto.", default="auto", choices=_BACKENDS)
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
        sources: dict[str, str] = {}
        for text in self.adapter or ():
            name, _, source = text.partition("=")
            if not name or not source:
                raise RequestError(f"--adapter must be NAME=SOURCE, such as poet=my-adapter; got {text!r}")
            if name in sources:
                raise RequestError(f"--adapter has the name {name!r} twice: rename one")
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
        "Draft with lookup, suffix or a smaller model, for speed; the text is the same.", metavar="DRAFT"
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
            if not 0 < self.cache_memory < 2**20:
                raise RequestError(f"--cache-memory must be a number of GiB above 0; got {self.cache_memory}")
            limits["cache_memory"] = int(self.cache_memory * 2**30)
        return limits


@dataclass(frozen=True, kw_only=True)
class ServerEngineFlags(EngineFlags):
    """Defaults for a server: clients wait for each token, and often leave the length of a text open."""

    max_step_ms: float | None = _max_step_ms(show_default="2.25x a decode step, at least 100", low=0)
    overcommit: float | None = _overcommit(default=4.0)
