"""Test the causal language models of the installed transformers, and write the results to docs/transformers.md.

python tests/models/transformers_table.py [MODEL_TYPE …]: all models, or only these; other results don't change.
"""

import re
import signal
import sys
import textwrap
from pathlib import Path

import transformers
from tiny_families import Trial, attempt, families

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
HEADINGS = {
    "program": "### As a native program",
    "eager": "### Eagerly",
    "not": "### Not supported",
    "untried": "### Not tested",
}
# A model type that takes longer counts as not tested.
_SECONDS = 60
# A part of an error -> the reason on the page.
_REASONS = {
    "keep a recurrent state": "recurrent layers",
    "takes no past_key_values": "no KV cache, or none that transformers' `past_key_values` holds",
    "update_indexer": "sparse attention, whose indexer has a cache of its own",
    "store_compression_weights": "its KV cache is compressed",
    "attention is not causal": "its attention isn't causal",
    "its own attention mask": "it builds its own attention mask",
    "through transformers' AttentionInterface": "its attention doesn't use transformers' `AttentionInterface`",
    "between its cache and its attention": "a layer changes keys or values between the KV cache and attention",
    "neither causal nor": "its masks are neither causal nor sliding windows",
}
# The outcome of a model type, as in `Trial.runs`, and the reason, which is "" for programs and for untested ones.
Outcome = tuple[str, str]


def outcome(trial: Trial) -> Outcome:
    if trial.runs in ("program", "untried"):
        return trial.runs, ""
    why = trial.why.removeprefix("transformers' own attention runs, since ")
    known = (reason for part, reason in _REASONS.items() if part in why)
    return trial.runs, next(known, why.replace("|", "\\|").replace("<", "&lt;").replace("\n", " "))


def results(outcomes: dict[str, Outcome]) -> str:
    """The part of the page between the marks."""
    parts = [f"Tested with transformers {transformers.__version__}."]
    for kind, heading in HEADINGS.items():
        by_reason: dict[str, list[str]] = {}
        for name in sorted(outcomes):
            if outcomes[name][0] == kind:
                by_reason.setdefault(outcomes[name][1], []).append(f"`{name}`")
        parts.append(f"{heading} ({sum(map(len, by_reason.values()))})")
        if "" in by_reason:
            parts.append(textwrap.fill(", ".join(by_reason[""]), 100, break_on_hyphens=False))
        else:
            rows = [f"| {', '.join(names)} | {reason} |" for reason, names in by_reason.items()]
            parts.append("\n".join(["| `model_type` | reason |", "|---|---|", *rows]))
    return "\n\n".join([BEGIN, *parts, END])


def outcomes_of(page: str) -> dict[str, Outcome]:
    """The outcomes that the page has, by model type."""
    found = {}
    text = page.partition(BEGIN)[2].partition(END)[0]
    for kind, heading in HEADINGS.items():
        section = text.partition(heading)[2].partition("\n\n")[2].partition("\n\n#")[0]
        rows = [line.strip("|").split("|", 1) for line in section.splitlines() if line.startswith("| `")][1:]
        for names, reason in rows or [[section, ""]]:
            found |= dict.fromkeys(re.findall(r"`([\w-]+)`", names), (kind, reason.strip()))
    return found


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
    outcomes = outcomes_of(PAGE.read_text(encoding="utf-8")) if names else {}
    for name in names or families():
        trial = tried(name)
        outcomes[name] = outcome(trial)
        print(name, trial.runs, trial.why, f"{trial.error:.1g}", flush=True)
        _write({name: each for name, each in outcomes.items() if name in families()})


def _write(outcomes: dict[str, Outcome]) -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + results(outcomes) + rest.split(END)[1], encoding="utf-8")


def _too_long(*_: object) -> None:
    raise TimeoutError


if __name__ == "__main__":
    main(sys.argv[1:])
