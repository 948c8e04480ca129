"""After thousands of requests, an engine has no more objects and memory than after hundreds.

ONWARD_REQUESTS=100000, as in `make soak`, sets the number of requests; -s shows the memory and objects meanwhile.
"""

import gc
import os
import random
import sys
import threading
import time
import weakref
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path

import pytest
from checked_engine import CheckedEngine

from onward import LanguageModel
from onward.cache.slot import Slot
from onward.decoding import Sequence
from onward.engine import Generation
from onward.engine.request import EngineRequest
from onward.language_model.runner import RequestState
from onward.testing import ByteTokenizer, tiny_model

REQUESTS = int(os.environ.get("ONWARD_REQUESTS", "2500"))
ROWS = 16
SECONDS = 600


def live_objects():
    """Kilobytes of the process' own memory, its threads, and its open files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]), threading.active_count(), len(os.listdir("/proc/self/fd"))


def alive():
    gc.collect()
    kinds = (EngineRequest, RequestState, Sequence, Generation, Slot)
    return Counter(kind.__name__ for kind in map(type, gc.get_objects()) if issubclass(kind, kinds))


def fails(ids, text):
    raise LookupError("mine")


class Clients:
    """Keeps a number of requests of every kind waiting and running, and counts how they end."""

    def __init__(self, engine, outstanding):
        self.engine, self.outstanding = engine, outstanding
        self.ends = Counter()
        self.chance = random.Random(0)
        self.served = deque()
        self.beginnings = ["".join(self.chance.choices("abcdef ", k=140)) for _ in range(5)]

    def serve(self, requests):
        for _ in range(requests):
            while len(self.served) >= self.outstanding:
                self.wait()
            self.submit()
        while self.served:
            self.wait()
        self.engine.generations.clear()

    def submit(self):
        chance = self.chance
        shared = chance.choice(self.beginnings)[: chance.choice([0, 0, 20, 70, 140])]
        prompt = shared + "".join(chance.choices("abcdef ", k=chance.randint(1, 10)))
        options = {"max_new_tokens": chance.randint(1, 6)}
        options |= chance.choice([{}, {}, {"temperature": 1.0, "seed": chance.randrange(1000)}])
        options |= chance.choice(
            [{}, {}, {"draft": "lookup"}, {"eos": range(64)}, {"time_limit": 1e6}, {"logprobs": 1}]
        )
        if chance.random() < 0.05:
            options = {"max_new_tokens": 4, **chance.choice([{"n": 3, "temperature": 1.0}, {"beams": 3}])}
        if chance.random() < 0.02:
            options["stop_when"] = fails
        generation = self.engine.submit(prompt, priority=chance.choice([0, 0, 1]), **options)
        if chance.random() < 0.05:
            generation.cancel()
        self.served.append(generation)

    def wait(self):
        try:
            self.ends[self.served.popleft().result(SECONDS).finish_reason] += 1
        except LookupError:
            self.ends["failed"] += 1


@pytest.mark.timeout(3600 if REQUESTS > 10_000 else 300)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_served_requests():
    model = tiny_model("llama", seed=1, num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    memory = 3 * ROWS * model.new_blocks(1).block_nbytes
    before = alive()
    seen = []
    lm = LanguageModel(model, ByteTokenizer(), prefix_memory=0)
    with CheckedEngine(lm, max_sequences=ROWS, cache_memory=memory) as engine:
        clients = Clients(engine, 2 * ROWS)
        for part in range(10):
            clients.serve(REQUESTS // 10)
            seen.append(live_objects())
            print(f"{(part + 1) * (REQUESTS // 10):8} requests: RssAnon {seen[-1][0]} kB, {seen[-1][1:]}")
        while engine.seconds_since_step:
            time.sleep(0.001)
        assert not alive() - before
    assert {"length", "failed", "cancelled", "stop"} <= set(clients.ends)
    assert {numbers[1:] for numbers in seen[2:]} == {seen[2][1:]}
    # The objects alone of a request that stayed are 5 kB: above 2.5 for each.
    assert seen[-1][0] - seen[2][0] < 2.5 * REQUESTS * 7 / 10


KINDS = {
    "plain": {},
    "several": {"n": 3, "temperature": 1.0},
    "beams": {"beams": 3},
    "drafts": {"draft": "lookup"},
    "constraint": {"choice": ["one", "two"]},
    "failing": {"stop_when": fails},
    "logprobs": {"logprobs": 1, "prompt_logprobs": 1},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", [True, False], ids=["engine", "generate"])
def test_a_requests_state_is_freed_without_the_garbage_collector(kind, engine, monkeypatch):
    """The objects of a request have no reference cycles, so they are freed when it ends."""
    made = {RequestState: [], Sequence: []}
    for cls, references in made.items():

        def noted(self, *arguments, before=cls.__init__, references=references, **options):
            references.append(weakref.ref(self))
            before(self, *arguments, **options)

        monkeypatch.setattr(cls, "__init__", noted)
    lm = LanguageModel(tiny_model("llama", seed=1), ByteTokenizer(), prefix_memory=0)
    options = {"max_new_tokens": 4, **KINDS[kind]}

    def slots():
        return [each for each in gc.get_objects() if isinstance(each, Slot)]

    def left():
        objects = [reference() for references in made.values() for reference in references]
        known = set(map(id, others))
        return [each for each in (*objects, *slots()) if each is not None and id(each) not in known]

    gc.collect()
    others = slots()  # of other tests
    gc.disable()
    try:
        if engine:
            with CheckedEngine(lm, max_sequences=4) as served:
                served.submit("abc", **options)
                while not served.generations[0].done or served.seconds_since_step:
                    time.sleep(0.001)
                served.generations.clear()  # an exception has its traceback's frames
                remaining = left()
        else:
            with suppress(LookupError):
                lm.generate("abc", **options)
            remaining = left()
    finally:
        gc.enable()
    assert len(made[RequestState]) == 1
    assert made[Sequence]
    assert not remaining
