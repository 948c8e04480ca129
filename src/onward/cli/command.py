"""A command of the `onward` program: its import, and its help in plain text."""

import re
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from onward.cli.flags import GROUPS, with_flags
from onward.cli.suggestions import check_short_options

_HELP = "Help"  # the section of options without a group
_NAMES = 31  # the most columns of the names in the help: their texts begin beside them


def imported_command(name: str, function: str, epilog: str) -> Any:
    """Import a command. function: "module.function" in this package. epilog: the last line of its help."""
    module, _, attribute = function.partition(".")
    command = getattr(import_module(f"onward.cli.{module}"), attribute)
    only = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    only.command(name, cls=Command, epilog=epilog)(with_flags(command))
    return get_command(only)


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
