"""Onward's engine compared with OpenVINO GenAI's and llama.cpp's while requests come and go, in one run.

    make peers                                  (installs them, each into an environment of its own)
    python -m benchmarks.serve [options]

Random weights in the shape of Qwen3-0.6B, greedy, fresh random prompts. The contenders take turns in every round, while
the others are stopped, and the machine's read bandwidth is measured between turns. See benchmarks/README.md.

parts:
  closed    N clients in a closed loop, prompts of 128, 64 new tokens: output tokens/s
  decode    N rows together, prompts aside: tokens/s; and the prefill's
  arrivals  requests of all sizes at random times: time to first token, gaps between tokens
  long      a prompt of 4,000 tokens while 8 rows decode: the gaps between their tokens
  prefix    a cached prefix of 2,000 tokens: time to first token
  paging    one text at a time: a paged and a dense cache, the engine and generate
"""

import argparse
import dataclasses
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.compare.contenders import PRECISIONS, Contender, NotAvailableError
from benchmarks.machine import description
from benchmarks.serve import report
from benchmarks.serve.course import PEERS, Plan, measure, peers_of
from benchmarks.serve.parts import PARTS
from onward import native

QUICK = Plan(rounds=1, clients=(1, 4, 16), each=1, arrivals=12, tokens=16)


def main() -> None:
    options = _options()
    plan = _plan(options)
    run: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", "benchmarks.serve", *sys.argv[1:]]),
        "machine": description() | {"isa": native.isa(), "threads": plan.threads},
        "plan": dataclasses.asdict(plan),
        "missing": {},
    }
    peers = {precision: _available(precision, options.peers, run["missing"]) for precision in options.precisions}
    for label, reason in run["missing"].items():
        print(f"missing: {label}: {reason}")
    _note(options.json, run, "w")
    sheets = []
    for name in options.parts:
        for precision in options.precisions:
            sheet = measure(PARTS[name], precision, plan, peers[precision])
            print(*report.sheet_lines(sheet), "", sep="\n", flush=True)
            _note(options.json, sheet.as_json(), "a")
            sheets.append(sheet)
    print(*report.summary_lines(sheets), sep="\n")
    if options.markdown:
        options.markdown.write_text(report.markdown(run, sheets))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--clients", nargs="+", type=int, metavar="N", help="of the closed loop; rows of decode")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="one small round, to check that everything works")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write JSON lines there: the run, then each table")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write a page for benchmarks/results there")
    return parser.parse_args()


def _plan(options: argparse.Namespace) -> Plan:
    choices = {"clients": options.clients, "rounds": options.rounds, "threads": options.threads}
    chosen = {name: value for name, value in choices.items() if value is not None}
    return dataclasses.replace(QUICK if options.quick else Plan(), **chosen)


def _available(precision: str, names: list[str], missing: dict[str, str]) -> list[Contender]:
    """The peers whose models exist; adds the reasons for the others to `missing`."""
    available = []
    for peer in peers_of(precision, names):
        try:
            peer.model()
        except NotAvailableError as error:
            missing[peer.label] = str(error)
        else:
            available.append(peer)
    return available


def _note(path: Path | None, line: dict[str, Any], mode: str) -> None:
    """Write each line as soon as it is known, because a run of hours may be interrupted."""
    if path:
        with path.open(mode) as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
