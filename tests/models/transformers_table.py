"""Try the causal families of the installed transformers and write the table of docs/transformers.md.

python tests/models/transformers_table.py [FAMILY …]: all of them, or those that are named, whose rows are written anew.
"""

import re
import signal
import sys
from pathlib import Path

import transformers
from tiny_families import Trial, attempt, families

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
# A family that takes longer has no tiny configuration here.
_SECONDS = 60
_ROW = re.compile(r"^\| (\S+) \| (program|eager|not|untried) \| .*\|$", re.MULTILINE)


def row(trial: Trial) -> str:
    why = trial.why.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
    return f"| {trial.family} | {trial.runs} | {why} |"


def table(rows: dict[str, str]) -> str:
    """The table of these rows by family, below their counts."""
    kinds = [found[2] for text in rows.values() if (found := _ROW.match(text))]
    count = {kind: kinds.count(kind) for kind in ("program", "eager", "not", "untried")}
    head = (
        f"transformers {transformers.__version__}: {count['program']} as programs, {count['eager']} eagerly, "
        f"{count['not']} not; of {count['untried']} the generic tiny configuration makes no model."
    )
    lines = [
        BEGIN,
        head,
        "",
        "| family | runs as | why |",
        "|---|---|---|",
        *(rows[name] for name in sorted(rows)),
        END,
    ]
    return "\n".join(lines)


def tried(family: str) -> Trial:
    signal.alarm(_SECONDS)
    try:
        return attempt(family)
    except TimeoutError:
        return Trial(family, "untried", f"no tiny model: it takes more than {_SECONDS} s")
    finally:
        signal.alarm(0)


def main(names: list[str]) -> None:
    signal.signal(signal.SIGALRM, _too_long)
    rows = {found[1]: found[0] for found in _ROW.finditer(PAGE.read_text(encoding="utf-8"))} if names else {}
    for name in names or families():
        trial = tried(name)
        rows[name] = row(trial)
        print(rows[name], f"{trial.error:.1g}", flush=True)
        _write({name: text for name, text in rows.items() if name in families()})


def _write(rows: dict[str, str]) -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + table(rows) + rest.split(END)[1], encoding="utf-8")


def _too_long(*_: object) -> None:
    raise TimeoutError


if __name__ == "__main__":
    main(sys.argv[1:])
