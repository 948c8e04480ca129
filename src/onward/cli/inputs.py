"""The inputs of commands: prompts, options of `generate`, models, and variables of chat templates."""

import json
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onward
from onward.cli.flags import AdapterFlags, DraftFlags, LoadFlags, ModelFlags, TemplateFlags, bytes_of
from onward.cli.terminal import is_terminal, note, waiting
from onward.errors import RequestError, TokenizerError
from onward.util.process import without_collections
from onward.util.text import brief
from onward.util.text_input import TextError, decode_text, parse_request_json

if TYPE_CHECKING:
    from onward.language_model import LanguageModel

_WAYS = "pass it as an argument ({}), with --file FILE or through a pipe"


def read_prompt(argument: str | None, file: Path | None, *, example: str) -> str:
    """Return the prompt as text, without the final newline that editors and `echo` add to a file or standard input.

    example: a command line with a prompt, for errors.
    """
    from_input = "-" in (argument, str(file))
    if argument is not None and file is not None:
        raise RequestError("the text is both an argument and a file (--file): use one of them")
    if argument is not None and not from_input:
        return argument
    if file is not None and not from_input:
        where, text = str(file), _read(file, f"the text in {file}")
    else:
        if is_terminal(sys.stdin):
            if not from_input:
                raise RequestError(f"no text: {_WAYS.format(example)}")
            note("type the text, and end it with Ctrl-D on a new line")
        where, text = "standard input", _standard_input("the text in standard input")
    text = text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
    if not text:
        raise RequestError(f"{where} is empty: {_WAYS.format(example)}")
    return text


def read_text(file: Path) -> str:
    """Read a file, or standard input for '-'; raise `RequestError` if it cannot be read as UTF-8."""
    return _standard_input("standard input") if str(file) == "-" else _read(file, repr(str(file)))


def parse_ids(text: str) -> list[int]:
    """Parse token ids, separated by spaces or written as a list."""
    words = re.sub(r"[\[\],]", " ", text).split()
    try:
        return [int(word) for word in words]
    except ValueError:
        wrong = next(word for word in words if not re.fullmatch(r"[+-]?\d+", word))
        raise RequestError(f"--ids needs token ids such as '1 2 3'; got {wrong!r}") from None


def expanded(file: Path) -> Path:
    """Expand ~ as the shell does; the path of an unknown user stays as it is."""
    return Path(os.path.expanduser(file))


def expanded_source(source: str) -> str:
    """Expand ~ in a model source: shells do not in `--model=~/x`."""
    return os.path.expanduser(source) if source.startswith("~") else source


def _read(file: Path, where: str) -> str:
    try:
        return _decoded(expanded(file).read_bytes(), where)
    except OSError as error:
        raise RequestError(f"{str(file)!r} cannot be read: {error.strerror or error}") from error


def _standard_input(where: str) -> str:
    if sys.stdin is None:
        raise RequestError(f"{where} cannot be read: standard input is closed")
    return _decoded(sys.stdin.buffer.read(), where)


def _decoded(content: bytes, where: str) -> str:
    try:
        return decode_text(content)
    except TextError as error:
        raise RequestError(f"{where} is not UTF-8 text: {error}") from error


def check_writable(file: Path) -> None:
    """Raise `RequestError` if a file cannot be written, before hours of work for it."""
    file = expanded(file)
    folder = file.absolute().parent
    if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        problem = "it is a folder" if file.is_dir() else f"{str(folder)!r} is not a folder that you can write to"
        raise RequestError(f"{str(file)!r} cannot be written: {problem}")


def write_json(file: Path, text: str) -> None:
    try:
        expanded(file).write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{str(file)!r} cannot be written: {error.strerror or error}") from error


def finite(value: float) -> float | None:
    """Return None for NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None


def generate_options(*flags: Any) -> dict[str, Any]:
    """Return the flags in use as keyword arguments of `LanguageModel.generate`, checked before a model is loaded.

    flags: `SamplingFlags` and `GenerateFlags`.
    """
    with starting():  # the first import of torch takes a second
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


def load_model(
    flags: ModelFlags, drafting: DraftFlags | None = None, adapting: AdapterFlags | None = None
) -> "LanguageModel":
    """Call `onward.load` with the flags, and show a progress bar."""
    options = load_options(flags, drafting, adapting)
    set_threads(flags)
    folder = find(flags.model)
    with waiting(f"loading {flags.model} …") as show:
        return onward.load(folder, progress=show, **options)


def set_threads(flags: LoadFlags) -> None:
    """Set the number of threads, if the flags do."""
    if flags.threads is not None:
        onward.set_num_threads(flags.threads)
        with starting():
            import torch
        torch.set_num_threads(flags.threads)  # for operators that run in torch


def load_options(flags: LoadFlags, drafting: DraftFlags | None, adapting: AdapterFlags | None) -> dict[str, Any]:
    """Return the flags in use as keyword arguments of `onward.load`."""
    options = {name: value for name, value in vars(flags).items() if value is not None}
    for name in ("model", "threads"):
        options.pop(name, None)
    if flags.prefix_cache_dir is not None:
        options["prefix_cache_dir"] = str(expanded(flags.prefix_cache_dir).absolute())  # replicas have other folders
    if flags.prefix_cache_disk is not None:
        options["prefix_cache_disk"] = bytes_of("--prefix-cache-disk", flags.prefix_cache_disk)
    if drafting is not None and drafting.draft is not None:
        options["draft"] = drafting.draft
    options |= {name: expanded_source(str(options[name])) for name in ("name_map", "merge", "draft") if name in options}
    sources = {} if adapting is None else {"adapters": adapting.sources(), "control_vectors": adapting.vectors()}
    for option, named in sources.items():
        if named:
            options[option] = {name: expanded_source(source) for name, source in named.items()}
    return options


@contextmanager
def starting() -> Iterator[None]:
    """Import modules within the block."""
    with waiting("starting …"), without_collections(long_lived=True):
        yield


@contextmanager
def importing(needs: str, extra: str) -> Iterator[None]:
    """Import the packages of an extra within the block; raise `RequestError` if one is missing."""
    with starting():
        try:
            yield
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.startswith("onward"):
                raise
            raise RequestError(f"{needs} the package {error.name}: pip install 'onward[{extra}]'") from error


def find(source: str) -> Path:
    """Return the folder of a model source; download it if needed."""
    with starting():
        from onward.checkpoint import find_folder
    # Outside the spinner: the hub client shows its own progress bars.
    return find_folder(expanded_source(source), progress=is_terminal(sys.stderr))


def template_variables(flags: TemplateFlags, lm: "LanguageModel", model: str) -> dict[str, Any]:
    """Return the chat template variables that the flags set. model: its name, for errors."""
    if lm.chat_template is None:
        raise TokenizerError(f"{model} has no chat template: use `onward generate` with a plain prompt")
    names = lm.chat_template.variables
    known = f"it reads {', '.join(sorted(names))}" if names else "it reads none"
    variables: dict[str, Any] = {}
    for text in flags.template_option or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise RequestError(f"--template-option takes NAME=VALUE, such as enable_thinking=false; got {text!r}")
        if name not in names:
            raise RequestError(f"the chat template of {model} has no variable {name!r}: {known}")
        variables[name] = as_json_or_text(name, value)
    if flags.thinking is not None:
        switch = lm.chat_template.thinking_switch
        if switch is None:
            flag = "--thinking" if flags.thinking else "--no-thinking"
            raise RequestError(f"{flag}: the chat template of {model} has no switch for thinking; {known}")
        variables[switch] = flags.thinking
    return variables


def as_json_or_text(name: str, value: str) -> Any:
    """Parse a value as JSON, or return it as text if it is not JSON; raise for JSON that is not allowed in requests."""
    try:
        return parse_request_json(value)
    except TextError as error:
        if isinstance(error.__cause__, json.JSONDecodeError):
            return value
        raise RequestError(f"{name} cannot be {brief(value)}: {error}") from error
