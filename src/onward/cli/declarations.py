"""Declare a command's options as `flag`s, turn them into Typer parameters, and print its help in groups."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import Field, field, fields
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer import Option
from typer.core import TyperCommand

from onward.errors import OnwardError
from onward.util.options import LENGTH, OUTPUT, REPETITION, SAMPLING, STRUCTURE, TEXTS

INPUT = "Input"
NETWORK = "Network"
AUTHENTICATION = "Authentication"
REPLICAS = "Replicas"
TASKS = "Tasks"
QUANTIZATION = "Quantization"
MEASUREMENT = "Measurement"
MODEL = "Model"
MEMORY = "Memory"
CHAT = "Chat"
BATCHING = "Batching and memory"
REQUESTS = "Requests"
LIMITS = "Limits"
LOGGING = "Logging"
_HELP = "Help"
# In the order of the help.
GROUPS = (
    *(INPUT, NETWORK, AUTHENTICATION, REPLICAS, TASKS, QUANTIZATION, MEASUREMENT, MODEL, MEMORY, CHAT),
    *(BATCHING, REQUESTS, LIMITS, LOGGING),
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
    names, bounds, shown = list(settings.pop("names")), settings.pop("bounds"), settings.pop("shown")
    kind = get_args(annotation)[0] if isinstance(annotation, UnionType) else annotation
    if (long := long_name(name, names)) not in names:
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


def long_name(name: str, names: Sequence[str]) -> str:
    """The flag of a parameter: the long name among its `names`, or one made from its own name."""
    return next((each for each in names if each.startswith("--")), f"--{name.replace('_', '-')}")


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


class GroupedCommand(TyperCommand):
    """A command whose help has a section for each group of options, in plain text."""

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
                    formatter.write_dl([(f"{names:<{width}}", text) for names, text in rows])


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
