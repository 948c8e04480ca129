"""Bodies drawn from the server's own document: most valid ones are answered, and none breaks the server.

By default a few hundred; `ONWARD_TESTS=full` draws 10,000, and `make fuzz` new ones each time.
"""

import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import jsonschema
import pytest
from hypothesis import strategies as st
from tests.hostile.attacks import Attack, chat, respond, text
from tests.hostile.bodies import HOSTILE, Bodies, Operation, operations
from tests.hostile.neighbours import PATIENCE
from tests.hostile.program import Standing
from tests.hostile.running import GROWTH, error_problem
from tests.hostile.sending import Answer, Target, as_bytes, ask

FULL = os.environ.get("ONWARD_TESTS") == "full"
BODIES = 5_000 if FULL else 150  # of each kind
ACCEPTED = 0.3  # at least this share of the bodies that fit the document
pytestmark = pytest.mark.timeout(3600)


def drawn(values: st.SearchStrategy[Any], count: int, check: Callable[[Any], None]) -> None:
    """Call `check` with `count` examples, the same in every run."""
    health = list(hypothesis.HealthCheck)

    @hypothesis.settings(max_examples=count, suppress_health_check=health, phases=[hypothesis.Phase.generate])
    @hypothesis.given(values)
    def examine(value: Any) -> None:
        check(value)

    examine()


class Fuzzed:
    """A server whose document the bodies come from. answered: the statuses of the answers."""

    def __init__(self, target: Target, model: str = "demo") -> None:
        self.target = target
        self.document = json.loads(ask(target, "/openapi.json", None, method="GET").body)
        self.bodies = Bodies(self.document, model)
        # The same handlers under two prefixes: one is enough.
        self.operations = [each for each in operations(self.document) if each.path.startswith("/v1/")]
        self.answered: Counter[int] = Counter()

    def sound(self) -> st.SearchStrategy[tuple[Operation, bytes]]:
        """Bodies that fit the document."""
        return st.one_of([self._with(each, self.bodies.of(each.schema).map(as_bytes)) for each in self.operations])

    def hostile(self) -> st.SearchStrategy[tuple[Operation, bytes]]:
        return st.one_of([self._with(each, self.bodies.hostile(each.schema)) for each in self.operations])

    def _with(
        self, operation: Operation, bodies: st.SearchStrategy[bytes]
    ) -> st.SearchStrategy[tuple[Operation, bytes]]:
        return st.tuples(st.just(operation), bodies)

    def send(self, operation: Operation, body: bytes) -> Answer:
        answer = ask(self.target, operation.path, body)
        self.answered[answer.status] += 1
        sent = f"{operation.path} {body[:1500]!r} -> {answer.status} {answer.body[:500]!r}"
        assert answer.status < 500 or answer.is_refusal_for_now, sent
        assert answer.status in operation.statuses, sent
        if answer.status != 200:
            assert not error_problem(answer), sent
            assert self._is_of_body(json.loads(answer.body)["error"].get("param"), operation, body), sent
        elif answer.headers["content-type"] == "application/json":
            json.loads(answer.body)
        else:
            assert b"internal_error" not in answer.body, sent
        return answer

    def _is_of_body(self, param: Any, operation: Operation, body: bytes) -> bool:
        """Whether an error names a field of the body, or one that could be there."""
        if param is None:
            return True
        try:
            fields = json.loads(body)
        except ValueError:
            fields = {}
        # A name may itself hold a dot or a bracket.
        known = [*self.bodies.fields(operation.schema), *(fields if isinstance(fields, dict) else ())]
        return any(param == name or param.startswith((f"{name}.", f"{name}[")) for name in known)


@pytest.fixture
def fuzzed(keyed: Standing) -> Any:
    """Beside neighbours; afterwards everything is back."""
    program = keyed.program
    program.neighbours.begin("demo")
    before = program.memory()
    try:
        yield Fuzzed(program.target)
    finally:
        waits = program.neighbours.end()
        busy = program.until_idle()
        if busy or program.has_ended:
            keyed.close()
    assert not busy
    assert not waits.faults
    assert all(waits.worst(kind) < PATIENCE for kind in waits.seconds)
    assert waits.peak - before < GROWTH
    assert not program.defects()


def test_bodies_that_match_the_schema(fuzzed: Fuzzed) -> None:
    drawn(fuzzed.sound(), BODIES, lambda each: fuzzed.send(*each))
    assert fuzzed.answered[200] >= ACCEPTED * fuzzed.answered.total(), fuzzed.answered
    print(f"\naccepted: {fuzzed.answered[200]} of {fuzzed.answered.total()}")


def test_bodies_with_a_hostile_value(fuzzed: Fuzzed) -> None:
    drawn(fuzzed.hostile(), BODIES, lambda each: fuzzed.send(*each))
    print(f"answered: {fuzzed.answered}")


def test_each_field_with_each_hostile_value(fuzzed: Fuzzed) -> None:
    """By default every 25th pair, in full all of them."""
    least = {"messages": chat(), "prompt": text(), "input": respond(), "tokens": {"tokens": [1]}}
    least |= {"items": {"items": [{"role": "user", "content": "x"}]}}
    least |= {"input_file_id": {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"}}
    least |= {"lora_name": {"lora_name": "x", "lora_path": "x"}, "metadata": {"metadata": {}}}
    least |= {"weights_path": {"weights_path": "x"}, "model": {}}
    pairs = [
        (operation, field, value)
        for operation in fuzzed.operations
        for field in fuzzed.bodies.fields(operation.schema)
        for value in HOSTILE.values()
    ]
    for operation, field, value in pairs[:: 1 if FULL else 25]:
        names = fuzzed.bodies.fields(operation.schema)
        body = dict(next(of for name, of in least.items() if name in names))
        body = {name: of for name, of in body.items() if name in names}
        attack = Attack("", operation.path, {**body, field: "@"}, frozenset())
        fuzzed.send(operation, attack.bodies()[0].replace(b'"@"', value))


def test_the_generator_follows_the_schema(fuzzed: Fuzzed) -> None:
    for operation in fuzzed.operations:
        schema = {**operation.schema, "components": fuzzed.document["components"]}
        validator = jsonschema.Draft202012Validator(schema)
        drawn(fuzzed.bodies.of(operation.schema), 20, validator.validate)
