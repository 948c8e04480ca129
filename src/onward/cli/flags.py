"""The options of the commands, each declared once: its name, type, default, help and group.

They stand here and not beside the options of `onward.sampling`, because a command's help must not import torch. A test
compares the two.
"""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from functools import partial, wraps
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer import Argument, Option
from typer.core import TyperCommand

from onward.cli.inputs import read_text
from onward.cli.terminal import waiting
from onward.errors import RequestError
from onward.util.text_input import TextError, parse_request_json

PROMPT = "Prompt"
CHAT = "Chat"
MODEL = "Model"
LENGTH = "Length and stops"
SAMPLING = "Sampling"
REPETITION = "Repetition and bans"
FORM = "The form of the text"
TEXTS = "Several texts"
OUTPUT = "Output"
# In the order of the help; a command's own options stand first, without a group.
GROUPS = (PROMPT, MODEL, CHAT, LENGTH, SAMPLING, REPETITION, FORM, TEXTS, OUTPUT)

# How the help writes a value of each type.
_METAVARS = {int: "N", float: "X", Path: "FILE", str: "TEXT"}


def flag(help: str, *names: str, default: Any = None, group: str | None = None, **settings: Any) -> Any:
    """Declare an option, as a field of a dataclass or as the default of a command's parameter.

    names: another name than the field's, or a one-letter name beside it. settings: of `typer.Option`.
    """
    return field(default=default, metadata={"help": help, "names": names, "rich_help_panel": group, **settings})


def _one_of(*names: str) -> Callable[[], list[str]]:
    """For the shell's completion."""
    return lambda: list(names)


_length, _sampling, _repetition, _form, _texts, _output, _model, _chat = (
    partial(flag, group=group) for group in (LENGTH, SAMPLING, REPETITION, FORM, TEXTS, OUTPUT, MODEL, CHAT)
)


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """The fields of `SamplingParams`, except those that only code can give well (ids with numbers).

    None, False and [] leave an option to the checkpoint.
    """

    max_new_tokens: int | None = _length("Maximum number of tokens to generate.", "-n")
    temperature: float | None = _sampling("0 takes the likeliest token; 1 samples freely.", "-t")
    top_k: int | None = _sampling("Sample among the N likeliest tokens; 0: all.")
    top_p: float | None = _sampling("Sample among the likeliest tokens that add up to X; 1: all.")
    min_p: float | None = _sampling("Drop tokens less than X times as likely as the first; 0: none.")
    typical_p: float | None = _sampling("Sample among the most typical tokens that add up to X; 1: all.")
    xtc_probability: float | None = _sampling("With probability X, drop the top choices but the last (XTC).")
    xtc_threshold: float | None = _sampling("Probability that makes a token a top choice for XTC.")
    repetition_penalty: float | None = _repetition("Penalty on tokens already in the text; 1: none.")
    presence_penalty: float | None = _repetition("Subtract X from the logits of generated tokens; 0: none.")
    frequency_penalty: float | None = _repetition("The same for each time a token was generated; 0: none.")
    dry_multiplier: float | None = _repetition("Strength of the penalty on longer repetitions (DRY); 0: none.")
    dry_base: float | None = _repetition("How fast the DRY penalty grows with the repetition's length.")
    dry_allowed_length: int | None = _repetition("Repetitions of up to N tokens have no DRY penalty.")
    no_repeat_ngram_size: int | None = _repetition("No N tokens in a row occur twice; 0: they may.")
    bad_words: list[str] | None = _repetition("Never write TEXT.", "--bad-word")
    min_new_tokens: int | None = _length("Let no token end the text before N tokens.")
    seed: int | None = _sampling("The same seed gives the same text.")
    stop: list[str] | None = _length("End before TEXT, taken literally.")
    eos: list[int] | None = _length("End after token ID.", metavar="ID")
    ignore_eos: bool = _length("Let no token end the text.", default=False)


@dataclass(frozen=True, kw_only=True)
class GenerateFlags:
    """The fields of `GenerateOptions` that a command line can give; None leaves an option to the checkpoint."""

    n: int | None = _texts("N texts, with '---' lines between them.", "--samples", min=1)
    beams: int | None = _texts("Search with N beams; prints the best text, or --samples.")
    length_penalty: float | None = _texts("Above 0, long texts rank higher among beams.")
    logprobs: int | None = _output("With --json: logprobs of each token and of the N likeliest.")
    prompt_logprobs: int | None = _output("The same for the prompt's tokens.")
    time_limit: float | None = _length("End the text after SECONDS.", metavar="SECONDS")
    json_schema: Path | None = _form("JSON that the JSON Schema in FILE validates.")
    regex: str | None = _form("A text that matches PATTERN from end to end.", metavar="PATTERN")
    grammar: Path | None = _form("A text of the grammar in FILE, in Lark's syntax.")
    choice: list[str] | None = _form("One of several texts.")


def options_of(sampling: SamplingFlags, texts: GenerateFlags | None = None) -> dict[str, Any]:
    """The flags in use, as keyword arguments of `LanguageModel.generate`.

    Raises:
        RequestError: a value outside its range, or options that contradict each other; here, before a model is
            loaded for nothing.
    """
    with waiting("starting …"):  # the first import of torch takes a second
        from onward.language_model import GenerateOptions
    values = vars(sampling) | ({} if texts is None else vars(texts))
    options = {name: value for name, value in values.items() if not (value is None or value is False or value == [])}
    if "grammar" in options:
        options["grammar"] = read_text(options["grammar"])
    if "json_schema" in options:
        options["json_schema"] = _json_of(options["json_schema"])
    # A checkpoint's defaults may sample; they are not known yet.
    GenerateOptions(**({} if options.get("beams", 1) > 1 else {"temperature": 1.0}) | options)
    return options


def _json_of(file: Path) -> Any:
    text = read_text(file)
    try:
        return parse_request_json(text)
    except TextError as error:
        raise RequestError(f"{str(file)!r} is not a JSON Schema: {error}") from error


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """How a model is loaded: arguments of `onward.load`."""

    dtype: str | None = _model(
        "bfloat16, float16 or float32; else the model's own.",
        metavar="NAME",
        autocompletion=_one_of("bfloat16", "float16", "float32"),
    )
    device: str = _model("cpu, cuda, …; else CUDA if available.", default="auto", metavar="NAME", show_default=False)
    quantize: str | None = _model(
        "Quantize the weights: int8, int4 or iq4_nl.",
        metavar="NAME",
        autocompletion=_one_of("int8", "int4", "iq4_nl"),
    )
    merge: str | None = _model("Merge an adapter (a folder or hub id) into the weights.", metavar="ADAPTER")
    name_map: Path | None = _model("JSON: a checkpoint's names of weights to Hugging Face's.")
    max_seq_len: int | None = _model("Context length in tokens; else the model's own.")
    compile: str = _model(
        "Backend: native, cuda, inductor or eager; auto, the default, takes the best.",
        default="auto",
        metavar="NAME",
        show_default=False,
        autocompletion=_one_of("auto", "native", "cuda", "inductor", "eager"),
    )
    pipeline: int = _model("Spread the layers over N processes.", default=1, show_default=False)
    threads: int | None = _model("CPU threads; else as many as `onward info` shows.")


@dataclass(frozen=True, kw_only=True)
class ModelFlags(LoadFlags):
    """Which model, and how it is loaded: arguments of `onward.load`."""

    model: str = _model(
        "A folder, a hub id or (default) 'demo'.", "-m", default="demo", metavar="SOURCE", show_default=False
    )


SourceArgument = Annotated[
    str | None, Argument(metavar="SOURCE", help="The model: a folder, a hub id or 'demo'; the same as --model.")
]


def with_source(flags: ModelFlags, source: str | None) -> ModelFlags:
    """The flags with the model of the argument, if there is one.

    Raises:
        RequestError: the model is named twice.
    """
    if source is None:
        return flags
    if flags.model != ModelFlags.model:
        raise RequestError(f"the model is named twice, {source!r} and --model {flags.model}: give one")
    return dataclasses.replace(flags, model=source)


@dataclass(frozen=True, kw_only=True)
class TemplateFlags:
    """Variables of the chat template; None leaves one to the template."""

    thinking: bool | None = _chat(
        "Let the model think before it answers, or not; else as its chat template has it.", show_default=False
    )
    template_option: list[str] | None = _chat(
        "A variable of the chat template, its value JSON or text.", metavar="NAME=VALUE"
    )

    @property
    def is_set(self) -> bool:
        """Whether a flag is in use."""
        return self.thinking is not None or bool(self.template_option)


@dataclass(frozen=True, kw_only=True)
class AdapterFlags:
    """The adapters that requests may name."""

    adapter: list[str] | None = _model("Load an adapter (a folder or hub id) by a name.", metavar="NAME=SOURCE")

    def sources(self) -> dict[str, str]:
        """The source of each adapter by its name.

        Raises:
            RequestError: a value that is not NAME=SOURCE, or a name that occurs twice.
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
        """The first adapter as an option of requests; empty without one."""
        return {"adapter": next(iter(self.sources()))} if self.adapter else {}


@dataclass(frozen=True, kw_only=True)
class DraftFlags:
    """The drafter of speculative decoding."""

    draft: str | None = _model(
        "Draft tokens for the model to verify; the text is the same. 'lookup', 'suffix', or a model of the same "
        "vocabulary that is several times smaller.",
        metavar="SOURCE",
    )


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """The limits of an `Engine`; None leaves one to the engine."""

    max_sequences: int | None = flag("Maximum number of texts at once.")
    cache_memory: float | None = flag(
        "GiB of KV cache, for all models together; else up to a quarter of the memory.", metavar="GIB"
    )
    max_waiting: int | None = flag("Maximum number of requests that wait in the engine.")
    max_waiting_tokens: int | None = flag("Maximum number of tokens in their prompts.")
    max_step_ms: float | None = flag(
        "Target step time in ms while prompts are processed; else 1000.",
        default=1000.0,
        metavar="MS",
        show_default=False,
    )
    overcommit: float | None = flag(
        "Reserve 1/X of the cache that texts may need; the newest is preempted if memory runs short."
    )

    def limits(self) -> dict[str, Any]:
        """As keyword arguments of `Engine`.

        Raises:
            RequestError: a cache_memory outside its range; the engine checks the others.
        """
        limits = {name: value for name, value in vars(self).items() if value is not None}
        if self.cache_memory is not None:
            if not 0 < self.cache_memory < 2**20:
                raise RequestError(f"--cache-memory must be a number of GiB above 0; got {self.cache_memory}")
            limits["cache_memory"] = int(self.cache_memory * 2**30)
        return limits


@dataclass(frozen=True, kw_only=True)
class ServerEngineFlags(EngineFlags):
    """The limits of an engine whose clients wait for each token, and may leave the length of their texts open."""

    max_step_ms: float | None = flag(
        "Target step time in ms while prompts are processed; else 2.25x a decode step, at least 100.", metavar="MS"
    )
    overcommit: float | None = flag(
        "Reserve 1/X of the cache that texts may need, else a quarter; the newest is preempted if memory runs short.",
        default=4.0,
        show_default=False,
    )


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Let Typer see every `flag` among a command's parameters, also those of parameters that are dataclasses."""
    parameters = inspect.signature(command).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in parameters if dataclasses.is_dataclass(p.annotation)}

    @wraps(command)
    def flat(**arguments: Any) -> None:
        for name, group in groups.items():
            arguments[name] = group(**{each.name: arguments.pop(each.name) for each in fields(group)})
        command(**arguments)

    seen: list[inspect.Parameter] = []
    for parameter in parameters:
        if parameter.name in groups:
            seen += _parameters(groups[parameter.name])
        elif isinstance(parameter.default, Field):
            seen.append(_parameter(parameter.name, parameter.annotation, parameter.default))
        else:
            seen.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
    vars(flat)["__signature__"] = inspect.Signature(seen)
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in seen}
    return flat


def _parameters(group: type[Any]) -> list[inspect.Parameter]:
    """Its own fields first, then those of the group that it extends."""
    hints = get_type_hints(group)
    inherited = {f.name for base in group.__bases__ if dataclasses.is_dataclass(base) for f in fields(base)}
    ordered = sorted(fields(group), key=lambda each: each.name in inherited)
    return [_parameter(each.name, hints[each.name], each) for each in ordered]


def _parameter(name: str, annotation: Any, declared: "Field[Any]") -> inspect.Parameter:
    """A parameter as Typer reads it; without names of its own, its flag is called as the parameter."""
    settings = dict(declared.metadata)
    names = list(settings.pop("names"))
    kind = get_args(annotation)[0] if isinstance(annotation, UnionType) else annotation
    if not any(each.startswith("--") for each in names):
        own = name.replace("_", "-")
        names.append(f"--{own}/--no-{own}" if kind is bool and declared.default is not False else f"--{own}")
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
        settings["help"] += " Repeatable."
    settings.setdefault("metavar", _METAVARS.get(kind))
    option = Option(*names, **settings)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=declared.default, annotation=Annotated[annotation, option]
    )


class GroupedCommand(TyperCommand):
    """A command whose help has a section for each group of options, in plain text of 80 columns."""

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
        # With the last group, for a section of its own would say no more.
        last = sections.pop("Last")
        sections = {name: rows for name, rows in sections.items() if rows}
        sections[list(sections)[-1]] += last
        width = max(len(name) for rows in sections.values() for name, _ in rows)
        for name, rows in sections.items():
            with formatter.section(name):
                formatter.write_dl([(f"{names:<{width}}", text) for names, text in rows])
