"""Onward compared with transformers, llama.cpp, ik_llama.cpp, OpenVINO and onnxruntime on the same weights, in one run.

    make peers                                  (installs them, each into an environment of its own)
    python -m benchmarks.compare [options]

The shape of Qwen3-0.6B or another one (--shape), batch 1, greedy, fresh prompts. The contenders at a precision take
turns in every round, while the others are stopped, and the read bandwidth of the machine is measured between rounds.
Figures are medians. The last line is one JSON object. See benchmarks/README.md.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.checkpoints import SHAPES
from benchmarks.compare import report, table
from benchmarks.compare.contenders import (
    CONTENDERS,
    DEFAULT_SHAPE,
    OURS,
    PRECISIONS,
    Contender,
    NotAvailableError,
    contenders_of,
)
from benchmarks.compare.measure import (
    Plan,
    contender_command,
    measure_batch,
    measure_demo,
    measure_precision,
)
from benchmarks.compare.picture import picture
from benchmarks.compare.process import seconds_to_first_token
from benchmarks.compare.turns import progress
from benchmarks.machine import description

QUICK = Plan(rounds=2, tokens=8)
EXTRAS = ("start", "batch", "demo")


def main() -> None:
    options = _options()
    plan = _plan(options)
    chosen, missing = _available(options.shape, options.precisions, options.contenders)
    for label, reason in missing.items():
        print(f"missing: {label}: {reason}")
    reports, checks = [], []
    result: dict = {"machine": description(), "shape": options.shape, "plan": dataclasses.asdict(plan)}
    result["missing"] = missing
    for precision in options.precisions:
        contenders = [contender for contender in chosen if contender.precision == precision]
        found = report.precision_report(precision, measure_precision(contenders, plan), options.shape)
        print(*table.precision_lines(found), "", sep="\n", flush=True)
        reports.append(found)
        checks += found.checks()
    result["precisions"] = {found.precision: found.as_json() for found in reports}
    checks += _extras(options.extras, chosen, plan, result)
    print(*table.context_lines(reports), "", *table.check_lines(checks), sep="\n")
    result["checks"] = [report.rounded(check.as_json()) for check in checks]
    if options.picture:
        machine = f"{result['machine']['processor']}, {plan.threads} threads"
        options.picture.write_text(picture(reports, machine))
    line = json.dumps(result)
    if options.json:
        options.json.write_text(line + "\n")
    print(line)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(contender.name for contender in CONTENDERS))
    parser.add_argument("--shape", choices=SHAPES, default=DEFAULT_SHAPE, help="others are drawn in memory (README)")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--contenders", nargs="+", choices=names, default=names, help=f"{OURS} is always among them")
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--threads", type=int, default=Plan.threads)
    parser.add_argument("--quick", action="store_true", help="2 rounds of 8 tokens, to check that everything works")
    parser.add_argument("--no-long", action="store_true", help="leave out decoding after 4,000 tokens")
    parser.add_argument("--extras", nargs="*", choices=EXTRAS, default=list(EXTRAS), help="additional measurements")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the JSON to this file")
    parser.add_argument("--picture", type=Path, metavar="PATH", help="draw an SVG into this file")
    options = parser.parse_args()
    if options.shape != DEFAULT_SHAPE:
        options.extras = []
    return options


def _plan(options: argparse.Namespace) -> Plan:
    plan = QUICK if options.quick else Plan(rounds=options.rounds)
    return dataclasses.replace(plan, threads=options.threads, long=not options.no_long)


def _available(shape: str, precisions: Sequence[str], names: Sequence[str]) -> tuple[list[Contender], dict[str, str]]:
    """The requested contenders whose models exist, and for the others the reason why not."""
    chosen, missing = [], {}
    for contender in contenders_of(shape):
        if contender.precision not in precisions or contender.name not in (*names, OURS):
            continue
        try:
            contender.model()
        except NotAvailableError as error:
            missing[contender.label] = str(error)
        else:
            chosen.append(contender)
    return chosen, missing


def _extras(which: Sequence[str], chosen: Sequence[Contender], plan: Plan, result: dict) -> list[report.Check]:
    """Run the requested additional measurements; each adds its figures to `result`."""
    in_bf16 = [contender for contender in chosen if contender.precision == "bf16"]
    checks = []
    if "start" in which and in_bf16:
        progress("process start to first token")
        commands = {c.label: contender_command(c, plan) for c in in_bf16 if not c.variant}
        taken = seconds_to_first_token(commands, min(plan.rounds, 3))
        seconds = {name: statistics.median(values) for name, values in taken.items()}
        print(*table.start_lines(seconds), sep="\n")
        result["seconds_to_first_token"] = report.rounded(seconds)
        checks += report.start_checks(seconds)
    if "batch" in which:
        checks += report.batch_checks(measure_batch(plan))
    demo = [contender for contender in in_bf16 if contender.worker in ("onward", "transformers")]
    if "demo" in which and len(demo) == 2:
        session = measure_demo(demo, plan)
        result["demo"] = report.rounded({name: s.decode_rate(32) for name, s in session.samples.items()})
        checks += report.demo_checks(session)
    return checks


if __name__ == "__main__":
    sys.exit(main())
