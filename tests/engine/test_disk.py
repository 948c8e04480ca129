"""An engine reads prefixes from disk while it runs steps."""

import threading
import time

import pytest
from checked_engine import CheckedEngine

from onward import LanguageModel
from onward.prefix_store import PrefixStore
from onward.testing import ByteTokenizer, tiny_model

SECONDS = 60
PROMPT = [number * 37 % 251 for number in range(200)]
OPTIONS = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
FULL = 192
MODEL = tiny_model("qwen3", seed=11)
EXPECTED = LanguageModel(MODEL, ByteTokenizer()).generate(PROMPT, **OPTIONS)


def lm(folder):
    return LanguageModel(MODEL, ByteTokenizer(), prefix_cache_dir=folder)


@pytest.fixture
def folder(tmp_path):
    """A folder with the blocks of the prompt."""
    with CheckedEngine(lm(tmp_path)) as engine:
        engine.submit(PROMPT, **OPTIONS).result(SECONDS)
    assert engine.slots.disk_counts.written >= 3
    return tmp_path


class SlowReads:
    """Reads wait for `go`. begun: how many have begun."""

    def __init__(self, monkeypatch):
        self.go, self.begun, read = threading.Event(), 0, PrefixStore.read

        def slow(store, parts):
            self.begun += 1
            assert self.go.wait(SECONDS)
            return read(store, parts)

        monkeypatch.setattr(PrefixStore, "read", slow)

    def wait(self):
        while not self.begun:
            time.sleep(0.001)


@pytest.fixture
def reads(monkeypatch):
    return SlowReads(monkeypatch)


def same(generation):
    completion = generation.result(SECONDS)
    assert (completion.token_ids, completion.logprobs) == (EXPECTED.token_ids, EXPECTED.logprobs)
    return completion.cached_tokens


def test_other_requests_run_while_one_waits_for_the_disk(folder, reads):
    with CheckedEngine(lm(folder)) as engine:
        waits = engine.submit(PROMPT, **OPTIONS)
        reads.wait()
        for number in range(3):
            assert len(engine.submit([number, 1, 2], **OPTIONS).result(SECONDS).token_ids) == 8
        assert not waits.done
        assert waits.tokens == 0
        reads.go.set()
        assert same(waits) == FULL
    engine.check()
    assert engine.stats().restored_tokens == FULL


def test_requests_with_a_common_prefix_read_once(folder, reads):
    with CheckedEngine(lm(folder)) as engine:
        generations = [engine.submit(PROMPT, **OPTIONS) for _ in range(6)]
        reads.wait()
        reads.go.set()
        assert [same(each) for each in generations] == [FULL] * 6
        assert engine.stats().restored_tokens == FULL
    engine.check()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_request_can_be_cancelled_while_waiting_for_the_disk(folder, reads, is_first):
    with CheckedEngine(lm(folder)) as engine:
        generations = [engine.submit(PROMPT, **OPTIONS) for _ in range(3)]
        reads.wait()
        cancelled = generations.pop(0 if is_first else 1)
        cancelled.cancel()
        threading.Timer(0.05, reads.go.set).start()
        assert cancelled.result(SECONDS).finish_reason == "cancelled"
        assert all(same(each) in (FULL, len(PROMPT) - 1) for each in generations)
    engine.check()


def test_closing_cancels_requests_that_wait_for_the_disk(folder, reads):
    engine = CheckedEngine(lm(folder))
    waits = engine.submit(PROMPT, **OPTIONS)
    reads.wait()
    threading.Timer(0.05, reads.go.set).start()
    engine.close(drain=False)
    assert waits.result(SECONDS).finish_reason == "cancelled"
    engine.check()


def test_closing_finishes_requests_that_wait_for_the_disk(folder, reads):
    engine = CheckedEngine(lm(folder))
    waits = engine.submit(PROMPT, **OPTIONS)
    reads.wait()
    threading.Timer(0.05, reads.go.set).start()
    engine.close()
    assert same(waits) == FULL
    engine.check()


def test_a_failed_read_fails_its_request_alone(folder, monkeypatch):
    def broken(store, parts):
        raise MemoryError("no memory")

    with CheckedEngine(lm(folder)) as engine:
        monkeypatch.setattr(PrefixStore, "read", broken)
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        assert same(engine.submit(PROMPT, **OPTIONS)) == 0
    engine.check()
