"""Threads that share a model, a drafter and an engine: every call gives the same result as alone."""

import sys
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from onward import LanguageModel
from onward.decoding.speculation import Speculator
from onward.engine import Engine
from onward.testing import ByteTokenizer, tiny_model

THREADS, CALLS = 6, 36


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Python changes threads some 250 times as often as it does by default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    yield
    sys.setswitchinterval(before)


def language_model(seed: int) -> LanguageModel:
    return LanguageModel(tiny_model(seed=seed), ByteTokenizer())


def call(at: int, lm: LanguageModel, drafter: Speculator) -> Any:
    """A call of one of six kinds. Prompts begin alike, so that calls find each other's prefixes."""
    prompt = "ab" * (1 + at * 5 % 8) + "xyz"[: at % 4]
    options: dict[str, Any] = {"max_new_tokens": 12, "seed": at, "temperature": 1.0}
    match at // THREADS % 6:
        case 0:
            return lm.generate(prompt, **options).token_ids
        case 1:
            return lm.generate(prompt, **options, draft=drafter).token_ids
        case 2:
            return lm.score(prompt).log_likelihood
        case 3:
            stream = lm.stream(prompt, **options)
            ids = [piece.token_id for piece in islice(stream, 3)]
            stream.close()
            return ids
        case 4:
            return [score.log_likelihood for score in lm.score_continuations(prompt, ["a", "bc", "xyz"])]
        case _:
            return lm.generate(prompt, **options, regex="[a-z]{3,9}").token_ids


def submitted(at: int) -> tuple[str, dict[str, Any]]:
    return "abab" * (1 + at % 4), {"max_new_tokens": 8, "seed": at, "temperature": 1.0}


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("seed", range(2))
def test_threads_and_an_engine_equal_each_call_alone(seed: int) -> None:
    lm, drafter = language_model(seed), Speculator("suffix")
    results: dict[int, Any] = {}
    generations: dict[int, Any] = {}
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            # Each thread begins with another kind, so that all kinds run at once.
            for at in range(thread, CALLS, THREADS):
                number = (at + thread * THREADS) % CALLS
                results[number] = call(number, lm, drafter)
                if at % 5 == 0:
                    prompt, options = submitted(number)
                    generations[number] = engine.submit(prompt, **options)
        except BaseException as error:
            errors.append(error)

    with Engine(lm, max_sequences=4) as engine:
        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not errors
        of_engine = {number: generation.result().token_ids for number, generation in generations.items()}
        stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert sorted(results) == list(range(CALLS))
    alone, drafter = language_model(seed), Speculator("suffix")
    assert results == {number: call(number, alone, drafter) for number in results}
    for number, ids in of_engine.items():
        prompt, options = submitted(number)
        assert ids == alone.generate(prompt, **options).token_ids
