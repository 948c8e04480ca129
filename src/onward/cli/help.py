"""Help in groups: what a command's many options are about, in plain text of 80 columns."""

from typing import Any

from typer.core import TyperCommand

PROMPT = "Prompt"
CHAT = "Chat"
MODEL = "Model"
LENGTH = "Length and stops"
SAMPLING = "Sampling"
REPETITION = "Repetition and bans"
FORM = "The form of the text"
TEXTS = "Several texts"
OUTPUT = "Output"
# In the order of the help; what a command has for itself alone stands first, without a group.
GROUPS = (PROMPT, MODEL, CHAT, LENGTH, SAMPLING, REPETITION, FORM, TEXTS, OUTPUT)


class GroupedCommand(TyperCommand):
    """A command whose help has a section for each group of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments: list[tuple[str, str]] = []
        options: dict[str, list[tuple[str, str]]] = {group: [] for group in ("Options", *GROUPS)}
        last: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if param.param_type_name == "argument":
                arguments.append(record)
            elif "--help" in param.opts:
                last.append(record)
            else:
                options[getattr(param, "rich_help_panel", None) or "Options"].append(record)
        sections = {name: rows for name, rows in ({"Arguments": arguments} | options).items() if rows}
        # With the last group, for a section of its own would say no more.
        sections[list(sections)[-1]] += last
        width = max(len(name) for rows in sections.values() for name, _ in rows)
        for name, rows in sections.items():
            with formatter.section(name):
                formatter.write_dl([(f"{names:<{width}}", text) for names, text in rows])
