"""All users of a speculator share what it learned: calls in several threads, and an engine."""

import random
import sys
import threading

import pytest

from onward.decoding.speculation import DraftRow, SuffixLookup
from onward.decoding.speculation.pace import LENGTHS, DraftLengthController, RowAcceptance

SECONDS = 60  # a thread that takes longer never ends


@pytest.fixture(autouse=True)
def threads_alternate():
    """Interference between two threads would show within a second."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def at_once(work):
    """Call `work` with random generators in separate threads; returns their errors."""
    errors = []

    def tried(chance):
        try:
            work(chance)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=tried, args=(random.Random(seed),), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def test_a_pace():
    def rounds(chance):
        for _ in range(40):
            rows = chance.randint(1, 40)
            pace.note_plain(rows, 0.010)
            assert 0 <= pace.choose([RowAcceptance(0.95, 15)] * rows, 15) <= 15
            pace.note_round(rows, chance.choice(LENGTHS), 3 * rows, 0.012)
            pace.note_time(0.010)
            assert pace.rest >= 0

    for _ in range(20):
        pace = DraftLengthController()
        assert at_once(rounds) == []


def test_a_suffix_lookup():
    def requests(chance):
        for _ in range(12):
            drafting, prompt = lookup.start(None), [chance.randrange(4) for _ in range(20)]
            rows = [DraftRow(prompt, [], 4) for _ in range(3)]
            for _ in range(12):
                for proposed, row in zip(drafting.propose(rows), rows, strict=True):
                    assert set(proposed) <= set(range(4))
                    row.output.append(chance.randrange(4))

    for _ in range(4):
        lookup = SuffixLookup(max_tokens=300)
        assert at_once(requests) == []
