"""Every way to end, each exactly once; the end of a request never ends or changes another."""

import threading
import time

import pytest
import torch
from checked_engine import CheckedEngine

import onward
from onward import LanguageModel
from onward.errors import DraftError, EngineError, OnwardError
from onward.testing import ByteTokenizer, scripted_model, tiny_model

LM = LanguageModel(tiny_model(seed=7), ByteTokenizer(), prefix_memory=0)
OTHERS = [{"temperature": 1.0, "seed": 5, "n": 2}, {"beams": 2}, {"logprobs": 2, "draft": "lookup"}]
SECONDS = 60  # a wait that takes longer never ends


def slowly(ids, text):
    time.sleep(0.01)
    return False


@pytest.fixture(scope="module")
def alone():
    return [texts(LM.generate("the others", max_new_tokens=30, **options)) for options in OTHERS]


def texts(completion):
    return [(choice.token_ids, choice.text, choice.logprobs) for choice in completion.choices]


class AmongOthers:
    """An engine that serves other requests while something happens to one."""

    def __init__(self, alone, lm=LM, **limits):
        self.engine = CheckedEngine(lm, **limits)
        self.alone = alone

    def __enter__(self):
        self.others = [self.engine.submit("the others", max_new_tokens=30, **options) for options in OTHERS]
        return self.engine

    def __exit__(self, kind, *_):
        if kind is None:
            assert [texts(other.result(SECONDS)) for other in self.others] == self.alone
            self.engine.close()
            self.engine.check()


def test_a_text_ends_by_eos_stop_string_function_or_length(alone):
    whole = LM.generate("abc", max_new_tokens=30)
    assert whole.finish_reason == "length"
    third = whole.token_ids[2]
    character = next(char for char in whole.text if char.isascii())
    stop_when = lambda ids, text: len(ids) == 4  # noqa: E731
    with AmongOthers(alone) as engine:
        by_length = engine.submit("abc", max_new_tokens=30)
        by_eos = engine.submit("abc", max_new_tokens=30, eos=[third])
        by_stop = engine.submit("abc", max_new_tokens=30, stop=character)
        by_function = engine.submit("abc", max_new_tokens=30, stop_when=stop_when)
        at_once = engine.submit("abc", max_new_tokens=0)
        assert at_once.done
        assert (by_length.result(SECONDS).token_ids, by_length.result().finish_reason) == (whole.token_ids, "length")
        assert (by_eos.result(SECONDS).finish_reason, by_eos.result().stopped_by) == ("stop", third)
        assert (by_stop.result(SECONDS).finish_reason, by_stop.result().stopped_by) == ("stop", character)
        assert by_stop.result().text == whole.text[: whole.text.index(character)]
        assert by_function.result(SECONDS).stopped_by is stop_when
        assert by_function.result().token_ids == whole.token_ids[:4]
        assert (at_once.result().token_ids, at_once.result().finish_reason) == ([], "length")
        assert list(at_once) == []


# ── time ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_time_limit_ends_a_running_text(alone):
    with AmongOthers(alone) as engine:
        late = engine.submit("abc", max_new_tokens=200, time_limit=0.2, stop_when=lambda ids, text: time.sleep(0.03))
        completion = late.result(SECONDS)
        assert completion.finish_reason == "time"
        assert 0 < len(completion.token_ids) < 200
        assert [piece.token_id for piece in late] == completion.token_ids


def test_a_time_limit_ends_a_waiting_request():
    holding = threading.Event()
    with CheckedEngine(LM, max_sequences=1) as engine:
        first = engine.submit("abc", max_new_tokens=3, stop_when=lambda ids, text: not holding.wait(SECONDS))
        waiting = engine.submit("abc", time_limit=0.01)
        time.sleep(0.02)
        holding.set()
        assert (waiting.result(SECONDS).finish_reason, waiting.result().token_ids) == ("time", [])
        assert first.result(SECONDS).finish_reason == "length"


def test_a_time_limit_ends_a_request_during_prefill():
    model = scripted_model(lambda ids: 5, vocab_size=8, max_seq_len=256)
    with CheckedEngine(LanguageModel(model, prefill_chunk=16), max_sequences=2) as engine:
        engine.between_steps(lambda: time.sleep(0.02))
        late = engine.submit([1] * 200, time_limit=0.05, max_new_tokens=5)
        assert (late.result(SECONDS).finish_reason, late.result().token_ids) == ("time", [])
    assert sum(len(call.tokens[0]) for call in model.calls) < 200


# ── cancelled ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_cancel_before_while_and_after(alone):
    started = threading.Event()
    with AmongOthers(alone, max_sequences=8) as engine:
        before = engine.submit("abc", max_new_tokens=100)
        before.cancel()
        running = engine.submit(
            "abc", max_new_tokens=200, stop_when=lambda ids, text: started.set() or slowly(ids, text)
        )
        assert started.wait(SECONDS)
        running.cancel()
        running.cancel()
        assert before.result(SECONDS).finish_reason in ("cancelled", "length")
        assert running.result(SECONDS).finish_reason == "cancelled"
        assert 0 < len(running.result().token_ids) < 200
        after = running.result()
        running.cancel()
        assert running.result() is after


def test_cancelling_a_waiting_request_removes_it_from_the_queue():
    holding, started = threading.Event(), threading.Event()

    def hold(ids, text):
        started.set()
        holding.wait(SECONDS)

    with CheckedEngine(LM, max_sequences=1) as engine:
        first = engine.submit("abc", max_new_tokens=2, stop_when=hold)
        assert started.wait(SECONDS)
        waiting = [engine.submit("abc", max_new_tokens=2) for _ in range(3)]
        assert engine.stats().waiting == 3
        waiting[1].cancel()
        holding.set()
        assert [one.result(SECONDS).finish_reason for one in waiting] == ["length", "cancelled", "length"]
        assert first.result().finish_reason == "length"


def test_a_callers_event_cancels_from_another_thread(alone):
    with AmongOthers(alone, max_sequences=6) as engine:
        event = threading.Event()
        several = engine.submit("abc", max_new_tokens=150, temperature=1.0, seed=1, n=2, cancel=event)
        threading.Timer(0.02, event.set).start()
        assert {choice.finish_reason for choice in several.result(SECONDS).choices} <= {"cancelled", "length"}
        already = engine.submit("abc", max_new_tokens=150, cancel=event)
        event.wait(SECONDS)
        assert already.result(SECONDS).finish_reason == "cancelled"


# ── closed ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("drain", [True, False])
def test_close_ends_running_and_waiting_requests(drain):
    engine = CheckedEngine(LM, max_sequences=2)
    options = {} if drain else {"stop_when": slowly}
    generations = [engine.submit("abc", max_new_tokens=100, **options) for _ in range(5)]
    next(iter(generations[0]))
    engine.close(drain=drain)
    assert all(generation.done for generation in generations)
    reasons = [generation.result().finish_reason for generation in generations]
    assert reasons == ["length"] * 5 if drain else "cancelled" in reasons
    engine.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.submit("abc")


def test_close_while_another_thread_closes_and_drains():
    engine = CheckedEngine(LM, max_sequences=1)
    generation = engine.submit("abc", max_new_tokens=240, stop_when=slowly)
    draining = threading.Thread(target=engine.close)
    draining.start()
    engine.close(drain=False)
    draining.join(SECONDS)
    assert not draining.is_alive()
    assert generation.result(0).finish_reason == "cancelled"


def test_an_error_in_a_with_statement_cancels():
    with pytest.raises(KeyError), CheckedEngine(LM) as engine:  # noqa: PT012
        generation = engine.submit("abc", max_new_tokens=240, stop_when=slowly)
        raise KeyError
    assert generation.result(0).finish_reason == "cancelled"


def test_a_callback_may_submit_cancel_and_close():
    follow_ups = []

    def submits(ids, text):
        if len(ids) == 2:
            follow_ups.append(engine.submit("abc", max_new_tokens=3))
        if len(ids) == 3:
            engine.close()

    engine = CheckedEngine(LM)
    first = engine.submit("abc", max_new_tokens=5, stop_when=submits)
    assert first.result(SECONDS).finish_reason == "length"
    assert follow_ups[0].result(SECONDS).token_ids == first.result().token_ids[:3]


# ── failures ────────────────────────────────────────────────────────────────────────────────────────────────────────


def fails_at(length, error):
    def stop_when(ids, text):
        if len(ids) == length:
            raise error

    return stop_when


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3)])
@pytest.mark.parametrize("options", [{}, {"n": 2, "temperature": 1.0, "seed": 1}, {"beams": 3}, {"draft": "lookup"}])
def test_an_error_in_stop_when_ends_its_request_alone(alone, options, error):
    with AmongOthers(alone, max_sequences=12) as engine:
        fails = [engine.submit("abc", max_new_tokens=20, stop_when=fails_at(k, error), **options) for k in (1, 4)]
        also = engine.submit("the others", max_new_tokens=30, **OTHERS[1])
        for generation in fails:
            with pytest.raises(type(error)) as raised:
                generation.result(SECONDS)
            assert raised.value is error
            with pytest.raises(type(error)):
                list(generation)
        assert texts(also.result(SECONDS)) == alone[1]


class FailingDrafter:
    def __init__(self, at):
        self.at = at

    def start(self, request):
        if not self.at:
            raise ValueError("no start")
        return self

    def propose(self, rows):
        if any(len(row.output) >= self.at for row in rows):
            raise ValueError("no draft")
        return [[1] * row.limit for row in rows]


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_failing_drafter_ends_its_request_alone(alone, at):
    with AmongOthers(alone) as engine:
        draft = onward.Speculator(FailingDrafter(at), length=3)
        fails = [engine.submit("abc", max_new_tokens=20, draft=draft) for _ in range(2)]
        for generation in fails:
            with pytest.raises(DraftError, match="FailingDrafter failed"):
                generation.result(SECONDS)


def scripted(fails):
    """A model whose forward raises, or gives NaN, where a row of it has seen the id 13."""

    def following(ids):
        if 13 in ids:
            if fails == "raises":
                raise RuntimeError("thirteen")
            return torch.full((32,), float("nan"))
        return (ids[-1] + 1) % 11

    return scripted_model(following, vocab_size=32, max_seq_len=64)


@pytest.mark.parametrize("fails", ["raises", "nan"])
@pytest.mark.parametrize("options", [{}, {"beams": 2}, {"draft": "lookup"}, {"prompt_logprobs": 1}])
def test_a_forward_that_fails_for_one_request_serves_the_others(fails, options):
    if fails == "raises" and "beams" in options:
        pytest.skip("a forward over several rows of a dense cache takes along the rows between them")
    lm = LanguageModel(scripted(fails), prefill_chunk=4)
    right = [lm.generate([k, k + 1, 2, 3, 4, 5], max_new_tokens=12, **options) for k in range(4)]
    with CheckedEngine(lm, max_sequences=12) as engine:
        served = []
        for k in range(4):
            served.append(engine.submit([k, k + 1, 2, 3, 4, 5], max_new_tokens=12, **options))
            bad = engine.submit([1, 2, 3, 13, 4, 5][: 4 + k % 3], max_new_tokens=12, **options)
        for one, expected in zip(served, right, strict=True):
            completion = one.result(SECONDS)
            assert completion.token_ids == expected.token_ids
            assert completion.prompt_logprobs == expected.prompt_logprobs
        with pytest.raises((RuntimeError, OnwardError)):
            bad.result(SECONDS)


def test_a_failure_of_the_thread_ends_all_with_one_error(monkeypatch):
    engine = CheckedEngine(LM, max_sequences=2)
    generations = [engine.submit("abc", max_new_tokens=200, stop_when=slowly) for _ in range(4)]
    next(iter(generations[0]))

    def plan(rows):
        raise LookupError("no plan")

    monkeypatch.setattr(engine._worker._scheduler, "plan", plan)
    for generation in generations:
        with pytest.raises(EngineError, match="the engine has failed: no plan") as raised:
            generation.result(SECONDS)
        assert isinstance(raised.value.__cause__, LookupError)
    with pytest.raises(EngineError, match="the engine has failed: no plan"):
        engine.submit("abc")
    engine.close()


@pytest.mark.parametrize("call", ["acquire", "reserve", "fork"])
def test_a_failure_of_the_slots_ends_its_request_alone(alone, monkeypatch, call):
    with AmongOthers(alone, max_sequences=9, overcommit=100.0) as engine:
        for other in engine.generations:
            other.result(SECONDS)
        original = getattr(engine.slots, call)

        def fails(*args, **options):
            monkeypatch.setattr(engine.slots, call, original)
            raise MemoryError("no memory")

        monkeypatch.setattr(engine.slots, call, fails)
        # Several texts reserve all their blocks at once; only a single one reserves more as it grows.
        count, new_tokens = (1, 200) if call == "reserve" else (2, 30)
        options = {"n": count, "temperature": 1.0, "seed": 5, "max_new_tokens": new_tokens}
        generations = [engine.submit("the others", **options) for _ in range(2)]
        with pytest.raises(MemoryError):
            generations[0].result(SECONDS)
        expected = alone[0] if count == 2 else texts(LM.generate("the others", **options))
        assert texts(generations[1].result(SECONDS)) == expected


def test_a_cancelled_search_gives_the_best_texts_so_far():
    """As `generate` does where a caller's event is set: texts that went on end as cancelled."""
    with CheckedEngine(LM, max_sequences=4) as engine:
        generation = engine.submit("abc", beams=3, n=3, max_new_tokens=200, eos=())
        engine.between_steps(lambda: generation.cancel() if engine.stats().steps > 8 else None)
        completion = generation.result(SECONDS)
    assert len(completion.choices) == 3
    assert {choice.finish_reason for choice in completion.choices} == {"cancelled"}
    assert all(choice.token_ids for choice in completion.choices)
    scores = [choice.score for choice in completion.choices]
    assert scores == sorted(scores, reverse=True)
