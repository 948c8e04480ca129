"""A fleet of replicas, simulated with the engine's policy, the router and the budget of retries as they are.

    python -m benchmarks.fleet --measure .benchmarks/fleet.json         (two runs of the real engine: minutes)
    python -m benchmarks.fleet --measure-pair .benchmarks/fleet.json    (two replicas of `onward deploy`: minutes)
    python -m benchmarks.fleet .benchmarks/fleet.json [--markdown PAGE]

The first two fit nothing; they write what was measured. The third fits the time of a step from a run, predicts the
other one and what the two replicas did, and simulates fleets of replicas of that speed.
"""

import argparse
import itertools
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.checkpoints import random_checkpoint
from benchmarks.fleet.fleet import Arrival, Fleet, Plan
from benchmarks.fleet.measured import Run, run_all
from benchmarks.fleet.pair import REPLICAS, SEQUENCES, measure_pair
from benchmarks.fleet.step import StepTime, error, fit
from benchmarks.fleet.workload import trace
from benchmarks.serve.figures import quantile

# Seconds to the first token, and of the mean gap of a request, within which it is of use to its client.
_FIRST, _GAP = 10.0, 0.25
# Fleets by which two replicas are predicted.
_FLEETS = 9
# Replicas, and requests a second for each, by which it is found how many a replica can serve.
_FULL, _TOO_MANY = 50, 0.6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--measure", action="store_true", help="measure, and write it there")
    parser.add_argument("--measure-pair", action="store_true", help="measure two replicas, and add it there")
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals")
    parser.add_argument("--warm", type=float, default=60.0, help="seconds before them, which count in no figure")
    parser.add_argument("--plans", nargs="+", metavar="PART", help="simulate only those whose name has a PART")
    parser.add_argument("--rate", type=float, default=0.4, help="requests a second for each replica")
    parser.add_argument("--markdown", type=Path, metavar="PATH")
    options = parser.parse_args()
    if options.measure:
        run_all(str(random_checkpoint()), "int8", options.measured, sequences=16, count=60, rate=0.9)
        return
    if options.measure_pair:
        measure_pair(options.measured, count=40, rate=0.5)
        return
    began = time.perf_counter()
    measured = json.loads(options.measured.read_text())
    runs = {name: Run.read(fields) for name, fields in measured["runs"].items()}
    lines = [*_pair_lines(runs["fit of the pair"], runs["pair"]), ""] if "pair" in runs else []
    if "fit" not in runs:
        print(*lines, sep="\n")
        return
    clock = fit(runs["fit"].steps)
    lines += [*_fit_lines(clock, {name: runs[name] for name in ("fit", "held out")}), ""]
    lines += [*_held_out_lines(clock, runs["held out"], measured["sequences"]), ""]
    print(*lines, sep="\n", flush=True)
    for line in _fleet_lines(clock, options):
        lines.append(line)
        print(line, flush=True)
    lines += ["", f"{time.perf_counter() - began:.0f} s on one core"]
    print(lines[-1])
    if options.markdown:
        command = shlex.join(["python", "-m", "benchmarks.fleet", *sys.argv[1:]])
        options.markdown.write_text(
            f"# A fleet, {time.strftime('%Y-%m-%d')}\n\n`{command}`\n\n```\n" + "\n".join(lines) + "\n```\n"
        )


# ── one engine ──────────────────────────────────────────────────────────────────────────────────────────────────


def _fit_lines(clock: StepTime, runs: dict[str, Run]) -> Iterator[str]:
    yield "the time of a step, fitted from the first run (ms)"
    names = ("step", "row", "position", "chunk", "token", "pair")
    yield "  " + ", ".join(f"{name} {1000 * getattr(clock, name):.4g}" for name in names)
    yield f"{'':28}{'steps':>8}{'error p50':>12}{'p90':>8}{'of the sum':>12}"
    for name, run in runs.items():
        errors = sorted(abs(error(clock, step)) for step in run.steps)
        took = sum(step.seconds for step in run.steps)
        said = sum(clock.seconds(step.rows, step.context, step.chunks) for step in run.steps)
        figures = f"{quantile(errors, 0.5):>12.1%}{quantile(errors, 0.9):>8.1%}{said / took - 1:>+12.1%}"
        yield f"  {name:26}{len(errors):>8}{figures}"


def _held_out_lines(clock: StepTime, run: Run, sequences: int) -> Iterator[str]:
    """The other run of the real engine, predicted from its arrivals."""
    arrivals = [Arrival(one.at, one.prompt, one.new) for one in run.asked]
    fleet = Fleet(Plan(1, patience=0, max_sequences=sequences, blocks=10**6), clock).run(arrivals)
    yield f"{len(arrivals)} requests of another run of the real engine, predicted (ms)"
    yield from _compared(run, arrivals, _gaps(fleet))


def _pair_lines(alone: Run, run: Run) -> Iterator[str]:
    """Two replicas behind the ingress, predicted from the steps of an engine that had another one beside it.

    Which replica a request goes to depends on their names, which are random: predictions are those of several fleets.
    """
    clock = fit(alone.steps)
    plan = Plan(REPLICAS, patience=0, max_sequences=SEQUENCES, blocks=10**6)
    arrivals, gaps = [], Counter[int]()
    for number in range(_FLEETS):
        asked = [Arrival(one.at, one.prompt, one.new, f"{number} {at}") for at, one in enumerate(run.asked)]
        gaps += _gaps(Fleet(plan, clock).run(asked))
        arrivals += asked
    yield from _fit_lines(clock, {"an engine beside another": alone})
    yield ""
    yield f"{len(run.asked)} requests to {REPLICAS} replicas of `onward deploy`, predicted by {_FLEETS} fleets (ms)"
    yield from _compared(run, arrivals, gaps)


def _compared(run: Run, arrivals: Sequence[Arrival], simulated: Counter[int]) -> Iterator[str]:
    first = [tokens[0] - one.at for tokens, one in zip(run.tokens, run.asked, strict=True)]
    gaps = [after - before for tokens in run.tokens for before, after in itertools.pairwise(tokens)]
    yield f"{'':28}{'measured':>10}{'simulated':>11}{'error':>8}"
    for share in (0.5, 0.99):
        said = quantile([_first(arrival) for arrival in arrivals], share)
        yield _beside(f"first token, p{100 * share:.0f}", quantile(first, share), said)
    for share in (0.5, 0.99):
        yield _beside(f"gap, p{100 * share:.0f}", quantile(gaps, share), _of_counts(simulated, share))
    ends = max(tokens[-1] for tokens in run.tokens), max(arrival.last or 0.0 for arrival in arrivals)
    yield _beside("all", *ends)


def _beside(name: str, measured: float, simulated: float) -> str:
    return f"  {name:26}{1000 * measured:>10,.0f}{1000 * simulated:>11,.0f}{simulated / measured - 1:>+8.0%}"


# ── fleets ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _fleet_lines(clock: StepTime, options: argparse.Namespace) -> Iterator[str]:
    seconds, warm = options.seconds, options.warm
    plan = Plan(options.replicas, warm=warm)
    every = options.rate * options.replicas
    yield (
        f"SIMULATED: {options.replicas:,} replicas, {every:,.0f} requests/s for {seconds:.0f} s after {warm:.0f} s, "
        "of the shape in workload.py"
    )
    most = options.replicas * _capacity(clock, replace(plan, replicas=_FULL), seconds)
    yield f"all together serve at most {most:,.0f} requests/s: the rate of {_FULL} which always have some that wait"
    rates = f"{'asked/s':>8}{'of most':>8}{'useful/s':>9}"
    tokens = f"{'first p50':>10}{'p99':>8}{'gap p50':>9}{'p99':>8}"
    yield f"{'':32}{rates}{tokens}{'cached':>8}{'deaths':>7}{'retries':>8}{'failed':>8}"
    storm = replace(plan, deaths=[(warm + seconds / 2, 0.3)], patience=_FIRST, again=2)
    plans = {
        "affinity": plan,
        "least loaded": replace(plan, affinity=False),
        "affinity, 1 failure a minute": replace(plan, failures=1 / 60),
        "affinity, 1 failure a second": replace(plan, failures=1.0),
        "  begun anew, not resumed": replace(plan, failures=1.0, resume=False),
        "30 % die at once, a budget": storm,
        "30 % die at once, no budget": replace(storm, budget=False),
    }
    for name, each in plans.items():
        if options.plans and not any(part in name for part in options.plans):
            continue
        arrivals = trace(every, warm + seconds)
        yield _fleet_line(name, Fleet(each, clock).run(arrivals), seconds, most)


def _capacity(clock: StepTime, plan: Plan, seconds: float) -> float:
    """Requests a second that a replica ends when more wait than it can serve, and nobody leaves."""
    until = plan.warm + seconds
    fleet = Fleet(replace(plan, patience=0), clock).run(trace(_TOO_MANY * plan.replicas, until))
    return sum(plan.warm <= at < until for at in fleet.ended) / seconds / plan.replicas


def _fleet_line(name: str, fleet: Fleet, seconds: float, most: float) -> str:
    served = [arrival for arrival in fleet.requests if arrival.last is not None]
    first = [_first(arrival) for arrival in served]
    useful = sum(_is_useful(arrival) for arrival in served)
    prompts = sum(engine.prompt_tokens for engine in fleet.retired)
    cached = sum(engine.cached_tokens for engine in fleet.retired) / max(1, prompts)
    failed = 1 - len(served) / max(1, len(fleet.requests))
    asked, gaps = len(fleet.requests) / seconds, _gaps(fleet)
    return (
        f"  {name:30}{asked:>8,.0f}{asked / most:>8.0%}{useful / seconds:>9,.0f}"
        f"{quantile(first, 0.5):>9.2f}s{quantile(first, 0.99):>7.1f}s"
        f"{1000 * _of_counts(gaps, 0.5):>7.0f}ms{1000 * _of_counts(gaps, 0.99):>6.0f}ms"
        f"{cached:>8.0%}{fleet.deaths:>7,}{fleet.retries:>8,}{failed:>8.1%}"
    )


def _is_useful(arrival: Arrival) -> bool:
    assert arrival.last is not None
    assert arrival.first is not None
    return _first(arrival) <= _FIRST and arrival.last - arrival.first <= _GAP * max(1, arrival.new - 1)


def _first(arrival: Arrival) -> float:
    assert arrival.first is not None
    return arrival.first - arrival.at


def _gaps(fleet: Fleet) -> Counter[int]:
    return sum((engine.gaps for engine in fleet.retired), Counter())


def _of_counts(counts: Counter[int], share: float) -> float:
    """The quantile of tenths of milliseconds that are counted, in seconds."""
    left = share * counts.total()
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value / 1e4
    return 0.0


if __name__ == "__main__":
    main()
