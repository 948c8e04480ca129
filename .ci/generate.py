"""Write the files that are generated from declarations, or fail if a file differs. `make contracts` runs it.

python .ci/generate.py            compare
python .ci/generate.py --write    write

    src/onward/__init__.pyi                       the public names, for type checkers     onward's table of modules
    src/onward/sampling/options_dict.py           the options as keywords, likewise       fields of SamplingParams
    src/onward/language_model/options_dict.py     the same                                fields of GenerateOptions
    src/onward/cli/option_flags.py                the options as flags, without torch     both
    docs/reference/options.md                     the reference of options                both
    docs/reference/limits.md                      the limits of request bodies            fields of Limits
    docs/supported-models.md                      its table of families                   models.families
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from types import EllipsisType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import onward  # noqa: E402
from onward import GenerateOptions, SamplingParams  # noqa: E402
from onward.checkpoint.gguf.export import WRITTEN  # noqa: E402
from onward.distributed.pipeline import stage_of  # noqa: E402
from onward.errors import RequestError  # noqa: E402
from onward.language_model.options import option_names  # noqa: E402
from onward.models import read_config  # noqa: E402
from onward.models.families import KNOWN_MODELS, KnownModels  # noqa: E402
from onward.protocols import Limits  # noqa: E402
from onward.sampling.transforms import Adjustment, Filter, transforms_of  # noqa: E402
from onward.testing.tiny import tiny_config  # noqa: E402
from onward.util.options import LENGTH, OUTPUT, REPETITION, SAMPLING, STRUCTURE, TEXTS, Option, options_of  # noqa: E402

HEADER = "Written by .ci/generate.py from the declarations of options."
WIDTH = 120
GROUPS = {"LENGTH": LENGTH, "SAMPLING": SAMPLING, "REPETITION": REPETITION, "STRUCTURE": STRUCTURE}
GROUPS |= {"TEXTS": TEXTS, "OUTPUT": OUTPUT}
# Options of `GenerateOptions` that the flags of `onward chat` include; it has those of `SamplingParams` too.
IN_CHATS = ("max_new_tokens", "stop", "reasoning_budget", "reasoning_budget_message")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the files that differ")
    write = parser.parse_args().write
    differing = [name for name, text in generated().items() if (ROOT / name).read_text(encoding="utf-8") != text]
    for name in differing:
        if write:
            (ROOT / name).write_text(generated()[name], encoding="utf-8")
        print(
            f"{name}: written" if write else f"error: {name} differs: run python .ci/generate.py --write",
            file=None if write else sys.stderr,
        )
    return 1 if differing and not write else 0


def generated() -> dict[str, str]:
    """The texts of all generated files, by path."""
    options = options_of(GenerateOptions)
    ordered = {name: options[name] for name in option_names()}
    sampling = {name: option for name, option in ordered.items() if name in options_of(SamplingParams)}
    rest = {name: option for name, option in ordered.items() if name not in sampling}
    unseeded = {name: option for name, option in sampling.items() if name != "seed"}
    seed = {"seed": sampling["seed"]}
    chats = {name: option for name, option in ordered.items() if name in (*sampling, *IN_CHATS)}
    others = {name: option for name, option in rest.items() if name not in IN_CHATS}
    return {
        "src/onward/__init__.pyi": stub(),
        "src/onward/sampling/options_dict.py": keywords(
            ("UnseededOptionsDict", "TypedDict", "The options of `SamplingParams` but for the seed.", unseeded),
            ("SamplingOptionsDict", "UnseededOptionsDict", KEYWORDS.format("SamplingParams"), seed),
        ),
        "src/onward/language_model/options_dict.py": keywords(
            ("GenerateOptionsDict", "SamplingOptionsDict", KEYWORDS.format("GenerateOptions"), rest),
            imports={"onward.sampling.options_dict": {"SamplingOptionsDict"}},
        ),
        "src/onward/cli/option_flags.py": flags(
            ("SamplingFlags", "The options of `SamplingParams`, the maximum length and stop strings.", chats),
            ("GenerateFlags", "The other options of `GenerateOptions`.", others),
        ),
        "docs/reference/options.md": page(ordered),
        "docs/reference/limits.md": limits(options_of(Limits)),
        "docs/supported-models.md": supported_models(),
    }


KEYWORDS = "The options of `{}` as keyword arguments, for editors and type checkers."


def stub() -> str:
    """The stub of the package for type checkers: its table of public names as imports."""
    lines = ["# Written by .ci/generate.py from the tables in __init__.py.", ""]
    lines += [f"from onward import {name} as {name}" for name in onward._SUBMODULES]
    for module, names in onward._MODULES.items():
        lines += [f"from onward.{module} import {name} as {name}" for name in names.split()]
    return "\n".join([*lines, "", "__version__: str", ""])


# ── keywords ──────────────────────────────────────────────────────────────────────────────────────────────


def keywords(*kinds: tuple[str, str, str, Mapping[str, Option]], imports: Mapping[str, Set[str]] | None = None) -> str:
    """A module of `TypedDict`s, each with a name, a base, a docstring and options."""
    used: dict[str, set[str]] = defaultdict(set, {module: set(names) for module, names in (imports or {}).items()})
    blocks = []
    for name, base, doc, options in kinds:
        if base == "TypedDict":
            used["typing"].add(base)
        fields = [f"    {option.name}: {annotation(option.takes, used)}" for option in options.values()]
        blocks.append("\n".join([f"class {name}({base}, total=False):", f'    """{doc}"""', "", *fields]))
    lines = [f"from {module} import {', '.join(sorted(names))}" for module, names in used.items()]
    owners = ("torch", "onward")  # sorted in this order after the standard library
    sections = [
        sorted(line for line in lines if next((each for each in owners if each in line.split()[1]), "") == owner)
        for owner in ("", *owners)
    ]
    heads = ["\n".join(section) for section in sections if section]
    return "\n\n\n".join([f'"""{HEADER}"""\n\n' + "\n\n".join(heads), *blocks]) + "\n"


def annotation(hint: Any, used: dict[str, set[str]]) -> str:
    """The source of a type; adds the names that the source must import to `used`."""
    if hint is NoneType or hint is None:
        return "None"
    if isinstance(hint, EllipsisType):
        return "..."
    if isinstance(hint, list):  # the arguments of a Callable
        return f"[{', '.join(annotation(each, used) for each in hint)}]"
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " | ".join(annotation(each, used) for each in arguments)
    if origin is Literal:
        used["typing"].add("Literal")
        return f"Literal[{', '.join(map(_quoted, arguments))}]"
    if arguments:
        return f"{annotation(origin, used)}[{', '.join(annotation(each, used) for each in arguments)}]"
    name = "Any" if hint is Any else hint.__qualname__
    if hint.__module__ != "builtins":
        used[hint.__module__].add(name)
    return name


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


# ── flags ─────────────────────────────────────────────────────────────────────────────────────────────────


def flags(*kinds: tuple[str, str, Mapping[str, Option]]) -> str:
    """A module of dataclasses of flags, each with a name, a docstring and options."""
    blocks = []
    for name, doc, options in kinds:
        lines = [line for option in options.values() if option.flag != "" for line in flag(option)]
        head = f'@dataclass(frozen=True, kw_only=True)\nclass {name}:\n    """{doc}'
        blocks.append(f'{head}\n\n    None, False and [] leave an option to the checkpoint\'s defaults.\n    """\n\n')
        blocks[-1] += "\n".join(lines)
    source = "\n\n\n".join(blocks)
    groups = sorted(name for name in GROUPS if f"group={name}" in source)
    imports = ["from dataclasses import dataclass", *(["from pathlib import Path"] if "Path" in source else []), ""]
    imports += ["from onward.cli.flags import flag", f"from onward.util.options import {', '.join(groups)}"]
    return "\n".join([f'"""{HEADER}"""', "", *imports]) + f"\n\n\n{source}\n"


def flag(option: Option) -> Iterator[str]:
    """The source lines of an option's field in a dataclass of flags."""
    if option.metavar == "FILE":
        kind = "Path"
    elif option.kind is not None:
        kind = f"list[{option.kind.__name__}]" if option.is_list else option.kind.__name__
    else:
        kind = "list[str]"  # such as bad_words, whose texts are a part of the values
    group = next(name for name, words in GROUPS.items() if words == option.group)
    arguments = [_quoted(option.help), *([_quoted(option.flag)] if option.flag else []), f"group={group}"]
    if option.metavar and kind != "Path":
        arguments.append(f"metavar={_quoted(option.metavar)}")
    if option.show_default:
        arguments.append(f"show_default={_quoted(option.show_default)}")
    if kind == "bool":
        arguments.append("default=False")
    start = f"    {option.name}: {kind if kind == 'bool' else f'{kind} | None'} = flag("
    yield from _call(start, arguments)


def _call(start: str, arguments: Iterable[str]) -> Iterator[str]:
    joined = ", ".join(arguments)
    if len(start + joined) < WIDTH:
        yield f"{start}{joined})"
    else:
        yield from (start, f"        {joined}", "    )")


# ── the reference ─────────────────────────────────────────────────────────────────────────────────────────

PAGE = """\
<!-- Written by .ci/generate.py from the declarations of options. -->

# Options

These are keyword arguments of `generate`, `stream`, `chat` and `stream_chat`.
[Generate text](../generating.md) and [Sampling](../sampling.md) have examples. An option without a
default comes from the checkpoint, or is off. The flags are those of `onward generate`.
"""
CLASSES = """\
## Types

::: onward.SamplingParams

::: onward.Request

::: onward.GenerateOptions

::: onward.GenerateOptionsDict

::: onward.ChatOptionsDict

## Transforms

`SamplingParams` has the options of these, in the order in which they work.
"""


def page(options: Mapping[str, Option]) -> str:
    """docs/reference/options.md."""
    parts = [PAGE]
    for group in GROUPS.values():
        head = [f"## {group}", "", "| option | default | values | flag | |", "|---|---|---|---|---|"]
        rows = [row(option) for option in options.values() if option.group == group]
        parts.append("\n".join([*head, *rows, ""]))
    kinds = [*transforms_of(SamplingParams, Adjustment), *transforms_of(SamplingParams, Filter)]
    return "\n".join([*parts, CLASSES, "\n\n".join(f"::: {kind.__module__}.{kind.__name__}" for kind in kinds), ""])


def limits(options: Mapping[str, Option]) -> str:
    """docs/reference/limits.md."""
    rows = [f"| `{name}` | {option.default:,} | {option.help.removesuffix('.')} |" for name, option in options.items()]
    head = ["# Limits of request bodies", "", LIMITS_TEXT, "", "| limit | default | applies to |", "|---|---|---|"]
    return "\n".join([*head, *rows, ""])


LIMITS_TEXT = """\
`onward serve`, `onward deploy` and `onward batch` check these limits before they tokenize, render
or compile anything. A body that exceeds one is rejected with status 400 and an error that names the
field. Change a limit with `--limit NAME=N`, or with `Settings(limits={"n": 16})` in Python.

For limits of connections, memory and time, see [Limits](../limits.md)."""


def row(option: Option) -> str:
    """An option's row in the table of its group."""
    default = option.show_default or ("" if option.default in (None, ()) else f"`{option.default!r}`")
    if option.kind in (int, float):
        bounds = option.bounds.removeprefix("of ").replace(" or more", " …")
        values = f"{option.kind.__name__}, {bounds}".removesuffix(", ")
    else:
        values = option.kind.__name__ if option.kind else ""
    values += ", or several" if option.is_list else ""
    return f"| `{option.name}` | {default} | {values} | {flag_cell(option)} | {option.help} |"


def flag_cell(option: Option) -> str:
    if option.flag == "":
        return ""
    long = f"--{option.name.replace('_', '-')}"
    names = [option.flag, long] if option.flag and not option.flag.startswith("--") else [option.flag or long]
    metavar = option.metavar or {int: "N", float: "X", bool: ""}.get(option.kind, "TEXT")  # type: ignore[arg-type]
    return f"`{', '.join(names)} {metavar}".rstrip() + "`"


# ── model families ────────────────────────────────────────────────────────────────────────────────────────

BEGIN, END = "<!-- families: begin -->\n", "<!-- families: end -->\n"


def supported_models() -> str:
    """docs/supported-models.md, whose table is generated."""
    before, _, rest = (ROOT / "docs/supported-models.md").read_text(encoding="utf-8").partition(BEGIN)
    head = [
        "| Models | `architectures` in config.json | Read GGUF | Write GGUF | `pipeline=` |",
        "|---|---|---|---|---|",
    ]
    rows = [family_row(known) for known in KNOWN_MODELS]
    return before + BEGIN + "\n".join([*head, *rows, ""]) + END + rest.partition(END)[2]


def family_row(known: KnownModels) -> str:
    """A row in the table of families. A cell says yes or lists GGUF's architectures, or is empty for no."""
    architectures, gguf = (", ".join(f"`{name}`" for name in names) for names in (known.architectures, known.gguf))
    writes = "yes" if WRITTEN.keys() & known.architectures else ""
    return f"| {known.names} | {architectures} | {gguf} | {writes} | {'yes' if splits(known) else ''} |"


def splits(known: KnownModels) -> bool:
    """Whether a typical config of the family runs as a pipeline."""
    config = read_config(tiny_config(known.architectures[0].removesuffix("ForCausalLM").lower()))
    try:
        stage_of(config, rank=0, world=2)
    except RequestError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
