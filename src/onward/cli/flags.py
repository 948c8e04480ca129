"""Flags that several commands share, each declared once."""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from typer import Argument, Option

from onward.cli.help import CHAT, FORM, LENGTH, MODEL, OUTPUT, REPETITION, SAMPLING, TEXTS
from onward.cli.prompt import read_text
from onward.cli.terminal import waiting
from onward.errors import RequestError
from onward.text_input import TextError, parse_request_json


def _one_of(*names: str) -> Callable[[], list[str]]:
    """For the shell's completion."""
    return lambda: list(names)


# An option in a group of the help.
_chat, _model, _length, _sampling, _repetition, _form, _texts, _output = (
    partial(Option, rich_help_panel=group) for group in (CHAT, MODEL, LENGTH, SAMPLING, REPETITION, FORM, TEXTS, OUTPUT)
)


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """The fields of `SamplingParams`, but for those that only code can give well (ids with numbers).

    None, False and [] mean not given: the checkpoint's default holds.
    """

    max_new_tokens: Annotated[
        int | None, _length("--max-new-tokens", "-n", metavar="N", help="The most tokens to generate.")
    ] = None
    temperature: Annotated[
        float | None,
        _sampling("--temperature", "-t", metavar="X", help="0 takes the likeliest token; 1 samples freely."),
    ] = None
    top_k: Annotated[
        int | None, _sampling("--top-k", metavar="N", help="Sample among the N likeliest tokens; 0: among all.")
    ] = None
    top_p: Annotated[
        float | None, _sampling("--top-p", metavar="X", help="Sample among the likeliest that add up to X; 1: all.")
    ] = None
    min_p: Annotated[
        float | None, _sampling("--min-p", metavar="X", help="Drop those less than X times as likely as the first.")
    ] = None
    typical_p: Annotated[
        float | None,
        _sampling(
            "--typical-p", metavar="X", help="Sample among the ids of most typical surprise that add up to X; 1: all."
        ),
    ] = None
    xtc_probability: Annotated[
        float | None,
        _sampling("--xtc-probability", metavar="X", help="With probability X drop the top choices but the last (XTC)."),
    ] = None
    xtc_threshold: Annotated[
        float | None, _sampling("--xtc-threshold", metavar="X", help="What counts as a top choice for XTC.")
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _repetition("--repetition-penalty", metavar="X", help="Make what was said less likely; 1: do not."),
    ] = None
    presence_penalty: Annotated[
        float | None, _repetition("--presence-penalty", metavar="X", help="Taken from the logits of ids in the output.")
    ] = None
    frequency_penalty: Annotated[
        float | None,
        _repetition("--frequency-penalty", metavar="X", help="The same, for each time that an id is there."),
    ] = None
    dry_multiplier: Annotated[
        float | None,
        _repetition(
            "--dry-multiplier", metavar="X", help="Strength of the penalty on longer repetitions (DRY); 0: none."
        ),
    ] = None
    dry_base: Annotated[
        float | None, _repetition("--dry-base", metavar="X", help="How fast that grows with their length.")
    ] = None
    dry_allowed_length: Annotated[
        int | None, _repetition("--dry-allowed-length", metavar="N", help="Repetitions up to this length are free.")
    ] = None
    no_repeat_ngram_size: Annotated[
        int | None,
        _repetition("--no-repeat-ngram-size", metavar="N", help="No N ids in a row occur twice; 0: they may."),
    ] = None
    bad_words: Annotated[
        list[str] | None, _repetition("--bad-word", metavar="TEXT", help="Never write TEXT. Repeatable.")
    ] = None
    min_new_tokens: Annotated[
        int | None, _length("--min-new-tokens", metavar="N", help="No token ends the text before N.")
    ] = None
    seed: Annotated[int | None, _sampling("--seed", metavar="N", help="The same seed gives the same text.")] = None
    stop: Annotated[
        list[str] | None, _length("--stop", metavar="TEXT", help="End before TEXT, taken literally. Repeatable.")
    ] = None
    eos: Annotated[list[int] | None, _length("--eos", metavar="ID", help="End after token ID. Repeatable.")] = None
    ignore_eos: Annotated[bool, _length("--ignore-eos", help="Let no token end the text.")] = False


@dataclass(frozen=True, kw_only=True)
class GenerateFlags:
    """The fields of `GenerateOptions` that a command line can give; None means not given."""

    n: Annotated[
        int | None, _texts("--samples", metavar="N", min=1, help="N texts, with '---' lines between them.")
    ] = None
    beams: Annotated[
        int | None, _texts("--beams", metavar="N", help="Search with N beams; prints the best text, or --samples.")
    ] = None
    length_penalty: Annotated[
        float | None, _texts("--length-penalty", metavar="X", help="Above 0 long texts rank higher among beams.")
    ] = None
    logprobs: Annotated[
        int | None, _output("--logprobs", metavar="K", help="With --json: each token's, and of the K likeliest ids.")
    ] = None
    prompt_logprobs: Annotated[
        int | None, _output("--prompt-logprobs", metavar="K", help="The same for the prompt's tokens.")
    ] = None
    time_limit: Annotated[
        float | None, _length("--time-limit", metavar="SECONDS", help="End the text after so long.")
    ] = None
    json_schema: Annotated[
        Path | None, _form("--json-schema", metavar="FILE", help="JSON that the JSON Schema in FILE validates.")
    ] = None
    regex: Annotated[
        str | None, _form("--regex", metavar="PATTERN", help="A text that matches PATTERN from end to end.")
    ] = None
    grammar: Annotated[
        Path | None, _form("--grammar", metavar="FILE", help="What the grammar in FILE derives, in Lark's syntax.")
    ] = None
    choice: Annotated[list[str] | None, _form("--choice", metavar="TEXT", help="One of several texts. Repeatable.")] = (
        None
    )


def options_of(sampling: SamplingFlags, texts: GenerateFlags | None = None) -> dict[str, Any]:
    """The flags given, as keyword arguments of `LanguageModel.generate`.

    Raises:
        RequestError: a value outside its range, or options that contradict each other; here, before a model is
            loaded for nothing.
    """
    with waiting("starting …"):  # the first import of torch takes a second
        from onward import GenerateOptions
    options = _given(sampling) | ({} if texts is None else _given(texts))
    # A checkpoint's defaults may sample; they are not known yet.
    GenerateOptions(**({} if options.get("beams", 1) > 1 else {"temperature": 1.0}) | options)
    return options


def _given(flags: Any) -> dict[str, Any]:
    values = {field.name: getattr(flags, field.name) for field in fields(flags)}
    given = {name: value for name, value in values.items() if not (value is None or value is False or value == [])}
    if "grammar" in given:
        given["grammar"] = read_text(given["grammar"])
    if "json_schema" in given:
        given["json_schema"] = _json_of(given["json_schema"])
    return given


def _json_of(file: Path) -> Any:
    text = read_text(file)
    try:
        return parse_request_json(text)
    except TextError as error:
        raise RequestError(f"{str(file)!r} is not a JSON Schema: {error}") from error


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """How a model is held: arguments of `onward.load`."""

    dtype: Annotated[
        str | None,
        _model(
            "--dtype",
            metavar="NAME",
            autocompletion=_one_of("bfloat16", "float16", "float32"),
            help="bfloat16, float16 or float32; else the model's own.",
        ),
    ] = None
    device: Annotated[
        str,
        _model("--device", metavar="NAME", show_default=False, help="cpu, cuda, …; else CUDA where there is one."),
    ] = "auto"
    quantize: Annotated[
        str | None,
        _model(
            "--quantize",
            metavar="NAME",
            autocompletion=_one_of("int8", "int4", "iq4_nl"),
            help="Hold the weights as int8, int4 or iq4_nl.",
        ),
    ] = None
    merge: Annotated[
        str | None,
        _model("--merge", metavar="ADAPTER", help="Merge an adapter (a folder or hub id) into the weights."),
    ] = None
    name_map: Annotated[
        Path | None,
        _model("--name-map", metavar="FILE", help="JSON: a checkpoint's names of weights to Hugging Face's."),
    ] = None
    max_seq_len: Annotated[
        int | None, _model("--max-seq-len", metavar="N", help="Context to use; else what the model was made for.")
    ] = None
    compile: Annotated[
        str,
        _model(
            "--compile",
            metavar="NAME",
            show_default=False,
            autocompletion=_one_of("auto", "native", "cuda", "inductor", "eager"),
            help="What runs it: native, cuda, inductor or eager; auto, the default, takes the best.",
        ),
    ] = "auto"
    pipeline: Annotated[
        int, _model("--pipeline", metavar="N", show_default=False, help="Spread the layers over N processes.")
    ] = 1
    threads: Annotated[
        int | None, _model("--threads", metavar="N", help="CPU threads; else as many as `onward info` shows.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ModelFlags(LoadFlags):
    """Which model, and how it is held: the arguments of `onward.load`."""

    model: Annotated[
        str,
        _model("--model", "-m", metavar="SOURCE", show_default=False, help="A folder, a hub id or (default) 'demo'."),
    ] = "demo"


SourceArgument = Annotated[
    str | None, Argument(metavar="SOURCE", help="The model: a folder, a hub id or 'demo'; the same as --model.")
]


def with_source(flags: ModelFlags, source: str | None) -> ModelFlags:
    """The flags with the model that was named without --model, if any.

    Raises:
        RequestError: it was named twice.
    """
    if source is None:
        return flags
    if flags.model != ModelFlags.model:
        raise RequestError(f"the model is named twice, {source!r} and --model {flags.model}: give one")
    return dataclasses.replace(flags, model=source)


@dataclass(frozen=True, kw_only=True)
class TemplateFlags:
    """Variables of the chat template; None means not given."""

    thinking: Annotated[
        bool | None,
        _chat(
            "--thinking/--no-thinking",
            show_default=False,
            help="Let the model think before it answers, or not; else as its chat template has it.",
        ),
    ] = None
    template_option: Annotated[
        list[str] | None,
        _chat(
            "--template-option",
            metavar="NAME=VALUE",
            help="A variable of the chat template, its value JSON or text. Repeatable.",
        ),
    ] = None

    @property
    def is_set(self) -> bool:
        """Whether one is given."""
        return self.thinking is not None or bool(self.template_option)


@dataclass(frozen=True, kw_only=True)
class AdapterFlags:
    """The adapters that requests may name."""

    adapter: Annotated[
        list[str] | None,
        _model("--adapter", metavar="NAME=SOURCE", help="Load an adapter (a folder or hub id) by a name. Repeatable."),
    ] = None

    def sources(self) -> dict[str, str]:
        """The source of each by its name.

        Raises:
            RequestError: what is no NAME=SOURCE, or a name that is given twice.
        """
        sources: dict[str, str] = {}
        for text in self.adapter or ():
            name, _, source = text.partition("=")
            if not name or not source:
                raise RequestError(f"--adapter wants NAME=SOURCE, such as poet=my-adapter; got {text!r}")
            if name in sources:
                raise RequestError(f"--adapter gives the name {name!r} twice")
            sources[name] = source
        return sources

    def first(self) -> dict[str, str]:
        """As an option of requests: the first one, where there is one."""
        return {"adapter": next(iter(self.sources()))} if self.adapter else {}


@dataclass(frozen=True, kw_only=True)
class DraftFlags:
    """Who guesses tokens ahead."""

    draft: Annotated[
        str | None,
        _model(
            "--draft",
            metavar="SOURCE",
            help="Who guesses tokens for the model to check; the text is the same. 'lookup', 'suffix', or a model of "
            "the same vocabulary that is several times smaller.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """The limits of an `Engine`; None means its own."""

    max_sequences: Annotated[int | None, Option("--max-sequences", metavar="N", help="The most texts at once.")] = None
    cache_memory: Annotated[
        float | None,
        Option(
            "--cache-memory",
            metavar="GIB",
            help="GiB of keys and values, of all models together; else up to a quarter of the memory.",
        ),
    ] = None
    max_waiting: Annotated[
        int | None, Option("--max-waiting", metavar="N", help="The most requests that wait in the engine.")
    ] = None
    max_waiting_tokens: Annotated[
        int | None, Option("--max-waiting-tokens", metavar="N", help="The most ids of their prompts.")
    ] = None
    max_step_ms: Annotated[
        float | None,
        Option("--max-step-ms", metavar="MS", show_default=False, help="What prompts may make a step take; else 1000."),
    ] = 1000.0
    overcommit: Annotated[
        float | None,
        Option(
            "--overcommit",
            metavar="X",
            help="Reserve 1/X of what may be generated; the newest gives way where room is missing.",
        ),
    ] = None

    def limits(self) -> dict[str, Any]:
        """As keyword arguments of `Engine`.

        Raises:
            RequestError: a cache_memory outside its range; the engine checks the others.
        """
        limits = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.cache_memory is not None:
            if not 0 < self.cache_memory < 2**20:
                raise RequestError(f"--cache-memory must be a number of GiB above 0; got {self.cache_memory}")
            limits["cache_memory"] = int(self.cache_memory * 2**30)
        return {name: value for name, value in limits.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ServerEngineFlags(EngineFlags):
    """The same for somebody who waits for each token, and may leave open how many there are to be."""

    max_step_ms: Annotated[
        float | None,
        Option(
            "--max-step-ms", metavar="MS", help="What prompts may make a step take; else 2.25 times as long, or 100."
        ),
    ] = None
    overcommit: Annotated[
        float | None,
        Option(
            "--overcommit",
            metavar="X",
            show_default=False,
            help="Reserve 1/X of what may be generated, else a quarter; the newest gives way where room is missing.",
        ),
    ] = 4.0


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take a group of flags as one argument.

    Typer sees one option for every field of a parameter that is annotated with a dataclass; the command is called with
    the dataclass.
    """
    parameters = inspect.signature(command).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in parameters if dataclasses.is_dataclass(p.annotation)}

    @wraps(command)
    def flat(**arguments: Any) -> None:
        for name, group in groups.items():
            arguments[name] = group(**{field.name: arguments.pop(field.name) for field in fields(group)})
        command(**arguments)

    seen: list[inspect.Parameter] = []
    for parameter in parameters:
        group = groups.get(parameter.name)
        seen += [parameter.replace(kind=parameter.KEYWORD_ONLY)] if group is None else _parameters(group)
    vars(flat)["__signature__"] = inspect.Signature(seen)
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in seen}
    return flat


def _parameters(group: type[Any]) -> list[inspect.Parameter]:
    """Its own fields first, then those of the group that it extends."""
    hints = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    inherited = {f.name for base in group.__bases__ if dataclasses.is_dataclass(base) for f in fields(base)}
    ordered = sorted(fields(group), key=lambda field: field.name in inherited)
    return [inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name]) for f in ordered]
