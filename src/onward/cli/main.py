"""The `onward` program: its commands, and its exit codes and errors."""

import errno
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from io import TextIOWrapper
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

from onward import __version__
from onward.cli.terminal import is_terminal, report
from onward.errors import OnwardError, OnwardWarning, OptionError, RequestError

# Typer bundles click since 0.2x; old and new versions share only this name for click's usage errors.
_UsageError: Any = typer.BadParameter.__base__


class _Command(NamedTuple):
    """function: "module.function" in this package. summary: the first line of its docstring. example: its arguments."""

    function: str
    summary: str
    example: str


_COMMANDS = {
    "generate": _Command(
        "generate.generate", "Generate text from a prompt.", '"Once upon a time" -n 200 -t 0.8 --seed 7'
    ),
    "chat": _Command("chat.chat", "Chat with a model.", 'demo --system "You answer in one sentence."'),
    "serve": _Command(
        "serve.serve",
        "Serve models through an OpenAI-compatible HTTP API.",
        "Qwen/Qwen3-0.6B --quantize int8 --port 8000",
    ),
    "deploy": _Command(
        "serve.deploy", "Serve a model with several replicas on Ray.", "Qwen/Qwen3-0.6B --replicas 4 --quantize int8"
    ),
    "batch": _Command(
        "batch.batch", "Run a batch of requests in OpenAI's format.", "requests.jsonl results.jsonl -m Qwen/Qwen3-0.6B"
    ),
    "embed": _Command(
        "embed.embed",
        "Compute the embeddings of texts.",
        "texts.jsonl -o embeddings.jsonl -m Qwen/Qwen3-Embedding-0.6B",
    ),
    "score": _Command("evaluate.score", "Compute the perplexity of a text.", "--file story.txt"),
    "verify": _Command(
        "generate.verify", "Check that this model and build generate a text.", "receipt.json -m Qwen/Qwen3-0.6B"
    ),
    "eval": _Command(
        "evaluate.evaluate",
        "Evaluate a model with lm-evaluation-harness.",
        "arc_easy hellaswag --limit 100 -m Qwen/Qwen3-0.6B",
    ),
    "quantize": _Command(
        "convert.quantize", "Quantize a checkpoint to 8 or 4 bits.", "Qwen/Qwen3-0.6B qwen3-iq4 --format iq4_nl"
    ),
    "convert": _Command(
        "convert.convert", "Convert a checkpoint to safetensors or GGUF.", "qwen3-iq4 qwen3.gguf --to gguf"
    ),
    "bench": _Command("bench.bench", "Measure prefill and decode speed.", "Qwen/Qwen3-0.6B --quantize int8 --profile"),
    "info": _Command(
        "info.info", "Show the machine, and a model's architecture and memory use.", "demo --context 1024 --batch 8"
    ),
    "prefix-cache": _Command(
        "prefix_cache.prefix_cache",
        "Show or delete the prefixes that a folder has on disk.",
        "info ~/.cache/onward-prefixes",
    ),
}

_INTERRUPTED = 130

# Errors from printing to a full disk, a lost terminal or a closed descriptor.
_NOT_WRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


class Commands(TyperGroup):
    """The commands, each imported when it is first used, with a suggestion for an unknown one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _COMMANDS_BY_NAME

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not ctx.resilient_parsing and args[0] not in self.commands:
            from onward.cli.command import unknown_command

            raise RequestError(unknown_command(args[0], self.commands))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in _COMMANDS.items()])


class _ImportedCommands(Mapping[str, Any]):
    """The commands by name."""

    def __init__(self) -> None:
        self._imported: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._imported:
            from onward.cli.command import imported_command

            command = _COMMANDS[name]
            self._imported[name] = imported_command(name, command.function, f"Example: onward {name} {command.example}")
        return self._imported[name]

    def __contains__(self, name: object) -> bool:
        return name in _COMMANDS

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


_COMMANDS_BY_NAME = _ImportedCommands()  # each made once in a process

app = typer.Typer(
    cls=Commands,
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
    """Generate text with autoregressive transformers, CPU first.

    A model is a folder in the Hugging Face layout, a GGUF file, a hub id such
    as Qwen/Qwen3-0.6B, or "demo", a small model that comes with the package.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    An `OnwardError`, a usage error or an unwritable standard output prints one line to stderr and returns 2; an
    interrupt returns 130. Any other exception is a bug and keeps its traceback.
    """
    if sys.stdout is None:
        report("error", "standard output is closed: redirect it to a file or /dev/null")
        return 2
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", OnwardWarning)
            _show_warnings_as_lines()
            code = get_command(app).main(arguments, prog_name="onward", standalone_mode=False)
        if code == _INTERRUPTED and is_terminal(sys.stderr):
            typer.echo(err=True)  # ends the line where the terminal printed ^C
        return code if isinstance(code, int) else 0
    except OptionError as error:
        message = f"{_flag_of(error.option)} {error.problem}"
    except OnwardError as error:
        message = str(error)
    except _UsageError as error:
        message = _usage_message(error)
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
    option = getattr(error, "option_name", None)  # click's NoSuchOption and BadOptionUsage
    if isinstance(option, str) and error.ctx is not None and type(error).__name__ == "NoSuchOption":
        from onward.cli.command import unknown_option

        return unknown_option(option, error.ctx)
    message = str(error.format_message()).rstrip(".")
    if extra := re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", message.replace("(s)", "")):
        message = f"too many arguments, from {extra[1].split()[0]!r} on; put a text with spaces in quotes"
    elif isinstance(option, str):
        return f"option {option} needs a value"
    return f"{message[:1].lower()}{message[1:]} (see {error.ctx.command_path if error.ctx else 'onward'} --help)"


def _flag_of(option: str) -> str:
    """The flag of a Python option, for errors; its name if it has none."""
    commands = get_command(app).commands.values()  # type: ignore[attr-defined]
    parameters = (parameter for command in commands for parameter in command.params)
    flags = (name for parameter in parameters if parameter.name == option for name in parameter.opts)
    return next((name for name in flags if name.startswith("--")), option)


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
