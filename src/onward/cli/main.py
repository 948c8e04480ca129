"""The `onward` program: its commands, and its exit codes and errors."""

import errno
import os
import re
import sys
import warnings
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated, Any, NoReturn

import typer
from typer.main import get_command

from onward import __version__
from onward.cli.batch import batch
from onward.cli.bench import bench
from onward.cli.chat import chat
from onward.cli.convert import convert, quantize
from onward.cli.evaluate import evaluate, score
from onward.cli.flags import GroupedCommand, with_flags
from onward.cli.generate import generate
from onward.cli.info import info
from onward.cli.serve import deploy, serve
from onward.cli.terminal import is_terminal, report
from onward.errors import OnwardError, OnwardWarning
from onward.util.option_names import REMOVED, meant

# Typer bundles click since 0.2x; old and new versions share only this name for click's usage errors.
_UsageError: Any = typer.BadParameter.__base__

_INTERRUPTED = 130

# Python options whose flags have another name.
_FLAGS = {"n": "samples", "num_return_sequences": "samples", "bad_words": "bad_word"}

# Errors from printing to a full disk, a lost terminal or a closed descriptor.
_NOT_WRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"onward {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True, epilog='Example: onward generate "Once upon a time"')
def onward(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Generate text from autoregressive transformers.

    A model is a folder in the Hugging Face layout, a hub id such as
    Qwen/Qwen3-0.6B, or "demo", a small model bundled with the package.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _function, _example in (
    (generate, 'generate "Once upon a time" -n 200 -t 0.8 --seed 7'),
    (chat, 'chat demo --system "You answer in one sentence."'),
    (serve, "serve Qwen/Qwen3-0.6B --quantize int8 --port 8000"),
    (deploy, "deploy Qwen/Qwen3-0.6B --replicas 4 --quantize int8"),
    (batch, "batch requests.jsonl results.jsonl -m Qwen/Qwen3-0.6B"),
    (score, "score --file story.txt"),
    (evaluate, "eval arc_easy hellaswag --limit 100 -m Qwen/Qwen3-0.6B"),
    (quantize, "quantize Qwen/Qwen3-0.6B qwen3-iq4 --format iq4_nl"),
    (convert, "convert qwen3-iq4 qwen3.gguf --to gguf"),
    (bench, "bench Qwen/Qwen3-0.6B --quantize int8 --profile"),
    (info, "info demo --context 1024 --batch 8"),
):
    app.command(_example.split()[0], cls=GroupedCommand, epilog=f"Example: onward {_example}")(with_flags(_function))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    An `OnwardError`, a usage error or an unwritable standard output prints one line to stderr and returns 2; an
    interrupt returns 130. Any other exception is a bug and keeps its traceback.
    """
    if sys.stdout is None:
        report("error", "standard output is closed, and nothing could be printed: redirect it to /dev/null instead")
        return 2
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", OnwardWarning)
            _show_warnings_as_lines()
            code = get_command(app).main(arguments, prog_name="onward", standalone_mode=False)
        if code == _INTERRUPTED and is_terminal(sys.stderr):
            typer.echo(err=True)  # ends the line where the terminal printed ^C
        return code if isinstance(code, int) else 0
    except OnwardError as error:
        message = str(error)
    except _UsageError as error:
        at = error.ctx.command_path if error.ctx else "onward"
        message = f"{_usage_message(error)} (see {at} --help)"
    except OSError as error:
        # An error without a file name comes from a stream.
        if error.filename is not None or error.errno not in _NOT_WRITABLE:
            raise
        message = f"standard output cannot be written: {error.strerror}"
    except typer.Abort as abort:
        # Old versions of Typer abort on an interrupt; all of them abort on EOFError, which is not one.
        if isinstance(abort.__cause__, EOFError):
            raise abort.__cause__ from None
        return _INTERRUPTED
    report("error", message)
    return 2


def _usage_message(error: Any) -> str:
    """Return a usage error as one line, with a suggestion for an unknown option."""
    option = getattr(error, "option_name", None)  # click's NoSuchOption
    if not isinstance(option, str) or not option.startswith("--") or error.ctx is None:
        return str(error.format_message())
    parameters = error.ctx.command.params
    flags = {flag.lstrip("-").replace("-", "_") for each in parameters for flag in each.opts if flag.startswith("--")}
    name = option.lstrip("-").replace("-", "_")
    if name in REMOVED:
        return f"no such option: {option}; {REMOVED[name]}"
    hint = meant(_FLAGS.get(name, name), flags) or ""
    # A hint may contain an explanation: "max_new_tokens (it does not count the prompt)".
    alike = sorted(flag for flag in flags if name in flag.split("_")) or re.findall(r"^\w+", hint)
    question = f". Did you mean {' or '.join('--' + each.replace('_', '-') for each in alike)}?" if alike else ""
    return f"no such option: {option}{question}"


def main() -> NoReturn:
    if isinstance(sys.stdout, TextIOWrapper):
        # Escape characters that the terminal's encoding lacks, instead of failing.
        sys.stdout.reconfigure(errors="backslashreplace")
    code = run()
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError:
            # Python would flush the rest at exit, and print a traceback.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = code or 2
    sys.exit(code)


def _show_warnings_as_lines() -> None:
    show_others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **named: Any) -> None:
        if issubclass(category, OnwardWarning):
            report("warning", str(message))
        else:
            show_others(message, category, *place, **named)

    warnings.showwarning = show
