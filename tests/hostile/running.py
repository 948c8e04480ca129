"""Run an attack, and list all problems of a server during and after it."""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.hostile.attacks import Attack
from tests.hostile.neighbours import PATIENCE, Waits
from tests.hostile.program import Standing
from tests.hostile.sending import CLOSED, NO_ANSWER, Answer, Target, whole

GROWTH = 300.0  # MB that the server may use for hostile requests of any kind
_BY_CODE = {NO_ANSWER: "no answer", CLOSED: "closed"}


@dataclass(frozen=True)
class Outcome:
    """growth: most memory during the attack over that before it, in MB. problems: empty if the server passed."""

    name: str
    statuses: tuple[int, ...]
    waits: Waits
    growth: float
    seconds: float
    problems: tuple[str, ...]

    def __str__(self) -> str:
        worst = ", ".join(f"{kind} {self.waits.worst(kind):.2f} s" for kind in self.waits.seconds)
        statuses = "/".join(_BY_CODE.get(status, str(status)) for status in sorted(set(self.statuses)))
        verdict = "; ".join(self.problems) or "passed"
        figures = f"{statuses or '-'} after {self.seconds:.2f} s, +{self.growth:.0f} MB, worst {worst}"
        return f"{self.name}: {figures}: {verdict}"


def run(standing: Standing, name: str, attacks: Sequence[Attack], seconds: float = 0.0) -> Outcome:
    """Run attacks one after the other, together with the other clients of one model. Restart a server that they broke.

    seconds: how long each is repeated; it is sent once at least.
    """
    program = standing.program
    bodies = [attack.bodies() for attack in attacks]
    before = program.memory()
    program.neighbours.begin(attacks[0].model)
    began = time.monotonic()
    answers = [sent(program.target, attack, each, seconds) for attack, each in zip(attacks, bodies, strict=True)]
    took = time.monotonic() - began
    waits = program.neighbours.end()
    growth = waits.peak - before
    problems = [
        f"{attack.name}: {problem}"
        for attack, each in zip(attacks, answers, strict=True)
        for problem in dict.fromkeys(answer_problem(attack, answer) for answer in each)
        if problem
    ]
    problems += [f"a neighbour got {fault}" for fault in dict.fromkeys(waits.faults)]
    problems += [
        f"{kind} of a neighbour took {PATIENCE:g} s or more" for kind in waits.seconds if waits.worst(kind) >= PATIENCE
    ]
    problems += [f"{defect[:2000]}" for defect in program.defects()]
    if growth > GROWTH:
        problems.append(f"memory grew by {growth:.0f} MB")
    busy = {"the server": "has ended"} if program.has_ended else program.until_idle()
    if busy:
        problems.append(f"after it, {busy}")
        standing.close()
    statuses = tuple(answer.status for each in answers for answer in each)
    return Outcome(name, statuses, waits, growth, took, tuple(problems))


def sent(target: Target, attack: Attack, bodies: Sequence[bytes], seconds: float = 0.0) -> list[Answer]:
    """The answers that all clients of an attack got."""
    end = time.monotonic() + seconds

    def client(body: bytes) -> list[Answer]:
        answers: list[Answer] = []
        while True:
            try:
                answers += attack.send(target, attack.path, body, dict(attack.headers))
            except OSError:  # it was disconnected while it sent
                answers.append(Answer(CLOSED))
            if time.monotonic() >= end:
                return answers

    with ThreadPoolExecutor(attack.clients) as pool:
        return [answer for each in pool.map(client, bodies) for answer in each]


def answer_problem(attack: Attack, answer: Answer) -> str:
    """The problems of an answer; empty if there are none."""
    if answer.status not in attack.statuses and not answer.is_refusal_for_now:
        expected = " or ".join(_BY_CODE.get(status, str(status)) for status in sorted(attack.statuses)) or "none"
        return f"answered with {_BY_CODE.get(answer.status, answer.status)}, not {expected}: {answer.body[:300]!r}"
    is_ours = attack.send is whole or answer.headers.get("content-type") == "application/json"
    return error_problem(answer) if is_ours and answer.status >= 400 else ""


def error_problem(answer: Answer) -> str:
    """The problems of an error's body; empty if there are none."""
    try:
        body: Any = json.loads(answer.body)
        error = body["error"]
        keys = {"type", "message"} if body.get("type") == "error" else {"message", "type", "param", "code"}
        well_formed = {*error} - {"details"} == keys and bool(error["message"])
    except (ValueError, LookupError, TypeError):
        well_formed = False
    return "" if well_formed else f"{answer.status} with a body that is no error: {answer.body[:300]!r}"
