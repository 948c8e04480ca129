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
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from onward import __version__
from onward.cli.batch import batch
from onward.cli.bench import bench
from onward.cli.chat import chat
from onward.cli.convert import convert, quantize
from onward.cli.embed import embed
from onward.cli.evaluate import evaluate, score
from onward.cli.flags import GROUPS, with_flags
from onward.cli.generate import generate
from onward.cli.info import info
from onward.cli.prefix_cache import prefix_cache
from onward.cli.serve import deploy, serve
from onward.cli.suggestions import check_short_options, unknown_command, unknown_option
from onward.cli.terminal import is_terminal, report
from onward.cli.verify import verify
from onward.errors import OnwardError, OnwardWarning, OptionError, RequestError

# Typer bundles click since 0.2x; old and new versions share only this name for click's usage errors.
_UsageError: Any = typer.BadParameter.__base__

_INTERRUPTED = 130
_HELP = "Help"  # the section of options without a group
_NAMES = 31  # the most columns of the names in the help: their texts begin beside them

# Errors from printing to a full disk, a lost terminal or a closed descriptor.
_NOT_WRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


class Commands(TyperGroup):
    """The commands, with a suggestion for an unknown one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not ctx.resilient_parsing and args[0] not in self.commands:
            raise RequestError(unknown_command(args[0], self.commands))
        return super().resolve_command(ctx, args)


class Command(TyperCommand):
    """A command with a section of its help for each group of options, in plain text, and a suggestion for short options
    of other programs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            check_short_options(args, ctx)
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(_usage(param) for param in self.get_params(ctx) if param.param_type_name == "argument")]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", *GROUPS, _HELP)}
        parameters: list[Any] = self.get_params(ctx)
        for param in parameters:
            if param.param_type_name == "argument":
                sections["Arguments"].append((_argument_name(param), param.help))
            else:
                section = getattr(param, "rich_help_panel", None) or _HELP
                sections[section].append((_option_names(param), param.help))
        width = max(len(name) for rows in sections.values() for name, _ in rows)
        for name, rows in sections.items():
            if rows:
                with formatter.section(name):
                    formatter.write_dl([(f"{names:<{width}}", text) for names, text in rows], col_max=_NAMES)


def _argument_name(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def _usage(param: Any) -> str:
    name = _argument_name(param)
    return (name if param.required else f"[{name}]") + ("..." if param.nargs == -1 else "")


def _option_names(param: Any) -> str:
    """'-f, --file FILE', or '--thinking / --no-thinking'."""
    names = ", ".join(sorted(param.opts, key=lambda name: len(re.findall("^-*", name)[0])))
    if param.secondary_opts:
        return f"{names} / {', '.join(param.secondary_opts)}"
    return names if param.is_flag or not param.metavar else f"{names} {param.metavar}"


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


for _function, _example in (
    (generate, 'generate "Once upon a time" -n 200 -t 0.8 --seed 7'),
    (chat, 'chat demo --system "You answer in one sentence."'),
    (serve, "serve Qwen/Qwen3-0.6B --quantize int8 --port 8000"),
    (deploy, "deploy Qwen/Qwen3-0.6B --replicas 4 --quantize int8"),
    (batch, "batch requests.jsonl results.jsonl -m Qwen/Qwen3-0.6B"),
    (embed, "embed texts.jsonl -o embeddings.jsonl -m Qwen/Qwen3-Embedding-0.6B"),
    (score, "score --file story.txt"),
    (verify, "verify receipt.json -m Qwen/Qwen3-0.6B"),
    (evaluate, "eval arc_easy hellaswag --limit 100 -m Qwen/Qwen3-0.6B"),
    (quantize, "quantize Qwen/Qwen3-0.6B qwen3-iq4 --format iq4_nl"),
    (convert, "convert qwen3-iq4 qwen3.gguf --to gguf"),
    (bench, "bench Qwen/Qwen3-0.6B --quantize int8 --profile"),
    (info, "info demo --context 1024 --batch 8"),
    (prefix_cache, "prefix-cache info ~/.cache/onward-prefixes"),
):
    app.command(_example.split()[0], cls=Command, epilog=f"Example: onward {_example}")(with_flags(_function))


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
