"""How long other clients wait while one client sends hostile requests, compared with an idle server.

    python -m benchmarks.hostile                     # all of the table in tests/hostile/attacks.py: half an hour
    python -m benchmarks.hostile --concurrent        # only those of several clients
    python -m benchmarks.hostile --only "8 MB" --json result.json

The other clients are a process with a separate API key. They request /health, /metrics and a chat of four tokens, each
20 ms after the last answer, on separate connections. The server serves the demo model with several chat templates. Idle
times are measured in the same run, before and after the attacks. The exit code is 1 if a limit is exceeded or the
server fails.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.hostile.attacks import ATTACKS, Attack
from tests.hostile.neighbours import Waits
from tests.hostile.program import TEMPLATES, Standing
from tests.hostile.running import Outcome, run

from benchmarks.machine import description

SECONDS = 4.0  # of each attack: about 150 requests of each neighbour, so p99 is the second worst
IDLE_SECONDS = 10.0
# A probe of a load balancer or Prometheus that waits this much longer than on an idle server is still well within its
# usual timeout of a second; on two busy cores, a slice of the scheduler and one step of the engine are below it.
PROBE_SECONDS = 0.05
# A person waits for a short answer, and expects the first words within two seconds.
CHAT_SECONDS = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="attacks whose name contains it")
    parser.add_argument("--concurrent", action="store_true", help="only attacks of several clients")
    parser.add_argument("--large", action="store_true", help="without the small requests of one client")
    parser.add_argument("--without-keys", action="store_true", help="all clients have one address and no key")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long each attack is repeated")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write JSON lines there: the run, then each attack")
    options = parser.parse_args()
    attacks = [
        attack
        for attack in ATTACKS
        if options.only in attack.name
        if not options.concurrent or attack.clients > 1
        if not options.large or not attack.is_plain
        if not options.without_keys or attack.model == "demo"
    ]
    failed = 0
    _note(options.json, {"machine": description(), "seconds": options.seconds}, "w")
    with tempfile.TemporaryDirectory() as folder:
        templates = () if options.without_keys else tuple(TEMPLATES)
        with Standing(Path(folder), keyed=not options.without_keys, templates=templates) as standing:
            idle = _idle(standing)
            _print("idle", idle, "")
            for attack in attacks:
                outcome = run(standing, attack.name, [attack], options.seconds)
                problems = [*outcome.problems, *_exceeded(outcome.waits, idle, keyed=not options.without_keys)]
                failed += bool(problems)
                _print(
                    attack.name, outcome.waits, f"{outcome.growth:+5.0f} MB  {'; '.join(problems)[:300] or 'passed'}"
                )
                _note(options.json, _line(attack, outcome, problems), "a")
            _print("idle", _idle(standing), "")
    print(f"{len(attacks) - failed} of {len(attacks)} passed")
    sys.exit(1 if failed else 0)


def _idle(standing: Standing) -> Waits:
    neighbours = standing.program.neighbours
    neighbours.begin("demo")
    time.sleep(IDLE_SECONDS)
    return neighbours.end()


def _exceeded(waits: Waits, idle: Waits, *, keyed: bool) -> list[str]:
    """The limits that p99 exceeds. Without keys, chats aren't limited: they and the attacks belong to one client."""
    limits = {kind: idle.percentile(kind, 99) + PROBE_SECONDS for kind in ("health", "metrics")}
    limits |= {"chat": CHAT_SECONDS} if keyed else {}
    p99 = {kind: waits.percentile(kind, 99) for kind in limits}
    return [f"{kind} {p99[kind]:.3f} s, over {limits[kind]:.3f} s" for kind in limits if p99[kind] > limits[kind]]


def _print(name: str, waits: Waits, rest: str) -> None:
    times = [
        f"{waits.percentile(kind, 50) * 1e3:4.0f} {waits.percentile(kind, 99) * 1e3:6.0f}" for kind in waits.seconds
    ]
    if name == "idle":
        heads = [f"{kind} p50, p99" for kind in waits.seconds]
        print(f"{'ms':40} {'  '.join(f'{head:>20}' for head in heads)}")
    print(f"{name[:40]:40} {'  '.join(f'{each:>20}' for each in times)}  {rest}", flush=True)


def _line(attack: Attack, outcome: Outcome, problems: list[str]) -> dict[str, Any]:
    statuses = Counter(outcome.statuses)
    return dataclasses.asdict(outcome) | {"statuses": statuses, "clients": attack.clients, "problems": problems}


def _note(path: Path | None, line: dict[str, Any], mode: str) -> None:
    if path:
        with path.open(mode) as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
