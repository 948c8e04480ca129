"""A command of the `onward` program: its import, its help in plain text, and errors for unknown options and commands,
which suggest a near name, or the equivalent of a name from another program."""

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from onward.cli.flags import GROUPS, with_flags
from onward.errors import RequestError
from onward.util.option_names import REMOVED, equivalent, near

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


# Commands of other programs: what to run instead, and what to do without one.
_COMMANDS = {
    "complete": "onward generate",
    "completion": "onward generate",
    "perplexity": "onward score",
    "run": "onward generate or onward chat",
    "show": "onward info",
}
_NO_COMMANDS = {
    "download": "models are downloaded from the hub on first use",
    "help": "use onward --help or onward COMMAND --help",
    "list": "models are folders, or in the hub cache: hf cache ls",
    "ls": "models are folders, or in the hub cache: hf cache ls",
    "pull": "models are downloaded from the hub on first use",
    "version": "use onward --version",
}

# Options of other programs, by what to write instead. Those of Python libraries are in `onward.util.option_names`.
_OPTIONS = {
    "--adapter NAME=SOURCE": "--lora-adapters --lora-modules",
    "--allow-origin": "--allowed-origins --cors-allow-origin",
    "--cache-memory (in GiB)": "--gpu-memory-utilization --kv-cache-memory-bytes",
    "--chat": "--apply-chat-template",
    "--draft": "--model-draft --speculative-config --speculative-model -md",
    "--file": "--prompt-file",
    "--grammar FILE": "--grammar-file",
    "--host": "--hostname",
    "--include": "--include-path",
    "--json-schema FILE": "--json-schema-file",
    "--max-new-tokens": "--predict",
    "--max-requests": "--max-concurrent-requests",
    "--max-seq-len": "--max-total-tokens -c",
    "--max-sequences": "--max-batch-size --parallel",
    "--name": "--alias --served-model-name",
    "--model": "--hf-repo --model-id --model-name-or-path --model-path --pretrained -hf",
    "--model NAME=SOURCE": "--alias --served-model-name",
    "--no-access-log": "--disable-log-requests",
    "--output": "--output-path",
    "--pipeline (it splits the layers across processes)": "--num-shard",
    "--quantize": "--quantization",
    "--replicas": "--data-parallel-size",
    "--shots": "--num-fewshot",
    "--system": "--system-prompt -sys",
}
_NO_OPTIONS = {
    "--conversation -cnv": "for a conversation, use onward chat",
    "--gpu-layers --n-gpu-layers -ngl": "all layers run on one device, which --device selects",
    "--prompt -p": 'the prompt is an argument: onward generate "Once upon a time"',
    "--ssl-certfile --ssl-keyfile": "put a proxy with TLS in front of the server",
    "--tasks": "the tasks are arguments: onward eval arc_easy hellaswag",
    "--trust-remote-code": "Onward never runs code from a checkpoint",
}

# Options without a flag, by the function that has them.
PYTHON_ONLY = {
    "ageing": "Engine",
    "cache_salt": "generate",
    "cancel": "generate",
    "constraint": "generate",
    "dry_sequence_breakers": "generate",
    "early_stopping": "generate",
    "logit_bias": "generate",
    "message_format": "load",
    "prefill_chunk": "LanguageModel",
    "prefix_memory": "LanguageModel",
    "progress": "load",
    "stop_when": "generate",
    "taps": "generate",
    "trainable": "load",
    "via": "load",
}


def unknown_command(name: str, commands: Collection[str]) -> str:
    """Return the error for an unknown command."""
    if name in _NO_COMMANDS:
        return f"no command {name}; {_NO_COMMANDS[name]}"
    if " " in name:
        return "no command; did you mean onward generate PROMPT?"
    similar = get_close_matches(name, commands, n=1)
    hint = _COMMANDS.get(name) or (f"onward {similar[0]}" if similar else "")
    return f"no command {name}; did you mean {hint}?" if hint else f"no command {name} (see onward --help)"


def unknown_option(option: str, context: Any) -> str:
    """Return the error for an unknown option. context: click's, for the command that lacks it."""
    flags, name = _flags(context.command), option.lstrip("-").replace("-", "_")
    error = f"no option {option}"
    if name in REMOVED:
        return f"{error}; {REMOVED[name]}"
    if advice := next((advice for names, advice in _NO_OPTIONS.items() if _is_one_of(option, names)), ""):
        return f"{error}; {advice}"
    if hint := _equivalent(option, name, flags):
        return f"{error}; did you mean {hint}?"
    commands = context.parent.command.commands if context.parent else context.command.commands
    others = {each: _flags(command) for each, command in commands.items()}
    if where := _where({each: _equivalent(option, name, flags) for each, flags in others.items()}):
        return f"{error} for {context.command_path}; {where}"
    if name in PYTHON_ONLY:
        return f"{error}; only Python has it: {PYTHON_ONLY[name]}({name}=…)"
    alike = sorted({flag for words, flag in flags.items() if name in words.split("_")})
    if 0 < len(alike) < 4:
        return f"{error}; did you mean {_joined(alike, 'or')}?"
    if hint := near(name, flags):
        return f"{error}; did you mean {flags[hint]}?"
    if where := _where({each: flags.get(near(name, flags) or "") for each, flags in others.items()}):
        return f"{error} for {context.command_path}; {where}"
    return f"{error} (see {context.command_path} --help)"


def check_short_options(arguments: list[str], context: Any) -> None:
    """Raise `RequestError` for a short option of another program, such as -ngl, that parses as -n with a value."""
    names = {name for names in (*_OPTIONS.values(), *_NO_OPTIONS) for name in names.split()}
    for before, option in zip(["", *arguments], arguments, strict=False):
        if len(option) > 2 and option[1] != "-" and option in names and not before.startswith("-"):
            raise RequestError(unknown_option(option, context))


def _equivalent(option: str, name: str, flags: Mapping[str, str]) -> str | None:
    """The flag, or an expression with one, that does what an option of another spelling, program or library does."""
    if name in flags:
        return flags[name]
    for hint, names in _OPTIONS.items():
        if _is_one_of(option, names) and hint.split()[0] in flags.values():
            return hint
    alias = equivalent(name, flags)
    return None if alias is None else _as_flags(alias, flags)


def _where(hints: Mapping[str, str | None]) -> str:
    """'generate and chat have --temperature', from what other commands have; "" if none has anything."""
    hint = next(filter(None, hints.values()), None)
    if hint is None:
        return ""
    commands = [command for command, other in hints.items() if other == hint]
    return f"{_joined(commands, 'and')} {'has' if len(commands) == 1 else 'have'} {hint}"


def _as_flags(hint: str, flags: Mapping[str, str]) -> str:
    """'quantize="int8"' becomes '--quantize int8'; a note in parentheses stays."""

    def as_flag(match: re.Match[str]) -> str:
        flag = flags.get(match["name"], match["name"])
        return flag if match["value"] is None else f"{flag} {match['value']}"

    expression, parenthesis, note = hint.partition(" (")
    return re.sub(r'(?P<name>\w+)(="(?P<value>\w+)")?', as_flag, expression) + parenthesis + note


def _is_one_of(option: str, names: str) -> bool:
    return option.replace("_", "-") in names.split()


def _flags(command: Any) -> dict[str, str]:
    """The long flags of a command, by their words and by the names of their parameters in Python."""
    flags: dict[str, str] = {}
    for parameter in command.params:
        names = [name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--")]
        flags |= {name[2:].replace("-", "_"): name for name in names}
        if names:
            flags.setdefault(parameter.name, names[0])
    return flags


def _joined(texts: list[str], word: str) -> str:
    return f" {word} ".join([*([", ".join(texts[:-1])] if texts[1:] else []), texts[-1]])
