"""Waiting for a generation: threads, tasks, several at once, and some that give up."""

import asyncio
import gc
import threading
import time
import weakref

import pytest
from checked_engine import CheckedEngine

from held_engine import held
from onward import LanguageModel
from onward.engine import Engine
from onward.errors import EngineBusyError, EngineError
from onward.testing import ByteTokenizer, tiny_model

LM = LanguageModel(tiny_model(seed=7), ByteTokenizer(), prefix_memory=0)
WHOLE = LM.generate("abc", max_new_tokens=20)
SECONDS = 60


def slowly(ids, text):
    time.sleep(0.005)
    return False


def ids_of(pieces):
    return [piece.token_id for piece in pieces]


# ── threads ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_many_threads_submit_at_once():
    prompts = [f"{'ab' * (k % 5)}{k}" for k in range(24)]
    options = [{"draft": ["lookup", "suffix", None][k % 3], "temperature": 1.0, "seed": k} for k in range(24)]
    alone = [
        LM.generate(p, max_new_tokens=8, **o | {"draft": None}).token_ids for p, o in zip(prompts, options, strict=True)
    ]
    served = {}
    with CheckedEngine(LM, max_sequences=6) as engine:

        def client(k):
            served[k] = engine.submit(prompts[k], max_new_tokens=8, **options[k]).result(SECONDS).token_ids

        threads = [threading.Thread(target=client, args=(k,)) for k in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [served[k] for k in range(24)] == alone


def test_the_same_model_generates_in_another_thread_meanwhile():
    with CheckedEngine(LM) as engine:
        generations = [engine.submit("abc", max_new_tokens=20, stop_when=slowly) for _ in range(3)]
        assert LM.generate("abc", max_new_tokens=20).token_ids == WHOLE.token_ids
        assert [one.result(SECONDS).token_ids for one in generations] == [WHOLE.token_ids] * 3


def test_several_consumers_iterate_over_one_generation_from_its_start():
    collected = []
    with CheckedEngine(LM) as engine:
        generation = engine.submit("abc", max_new_tokens=20, stop_when=slowly)
        threads = [threading.Thread(target=lambda: collected.append(ids_of(generation))) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert ids_of(generation) == WHOLE.token_ids
        for thread in threads:
            thread.join(SECONDS)
        assert ids_of(generation) == WHOLE.token_ids
    assert collected == [WHOLE.token_ids] * 3
    assert "".join(piece.text for piece in generation) == WHOLE.text


def test_a_stopped_consumer_leaves_the_request_running():
    with CheckedEngine(LM) as engine:
        generation = engine.submit("abc", max_new_tokens=20, stop_when=slowly)
        for piece in generation:
            assert piece.token_id == WHOLE.token_ids[0]
            break
        assert generation.result(SECONDS).token_ids == WHOLE.token_ids


def test_result_with_a_timeout():
    with CheckedEngine(LM) as engine:
        generation = engine.submit("abc", max_new_tokens=20, stop_when=slowly)
        with pytest.raises(TimeoutError, match=r"not ended within 0\.001 s"):
            generation.result(0.001)
        assert not generation.done
        assert generation.result(SECONDS).token_ids == WHOLE.token_ids
        assert generation.done
        assert generation.result(0) is generation.result()


def test_a_full_queue_refuses_at_once_with_a_retry_time():
    holding = threading.Event()
    with CheckedEngine(LM, max_sequences=1, max_waiting=2, max_waiting_tokens=10) as engine:
        first = engine.submit("abc", max_new_tokens=3, stop_when=lambda ids, text: not holding.wait(SECONDS))
        next(iter([first]))
        while engine.stats().running < 1:
            time.sleep(0.001)
        waiting = [engine.submit("abc", max_new_tokens=3) for _ in range(2)]
        with pytest.raises(EngineBusyError, match=r"2 requests wait \(max_waiting=2\)") as refused:
            engine.submit("abc")
        assert 0 < refused.value.retry_after <= 600
        waiting[0].cancel()
        holding.set()
        assert waiting[1].result(SECONDS).token_ids == WHOLE.token_ids[:3]
    with CheckedEngine(LM, max_sequences=1, max_waiting_tokens=10) as engine:
        holding.clear()
        first = engine.submit("abc", max_new_tokens=3, stop_when=lambda ids, text: not holding.wait(SECONDS))
        while engine.stats().running < 1:
            time.sleep(0.001)
        long = engine.submit("a" * 50, max_new_tokens=1)
        with pytest.raises(EngineBusyError, match="50 tokens of prompts wait"):
            engine.submit("abc")
        holding.set()
        assert long.result(SECONDS).finish_reason == "length"


def test_a_preempted_client_continues_with_the_same_texts():
    options = {"n": 4, "temperature": 1.0, "seed": 3, "max_new_tokens": 180, "ignore_eos": True}
    alone = [choice.token_ids for choice in LM.generate("a" * 70, **options).choices]
    lm = LanguageModel(LM.model, ByteTokenizer(), prefix_memory=0, prefill_chunk=8)
    with CheckedEngine(lm, max_sequences=4) as engine:
        hog = engine.submit("a" * 70, stop_when=slowly, client="a", **options)
        while len(hog.pieces()) < 300:
            time.sleep(0.001)
        assert engine.submit("abc", max_new_tokens=20, client="b").result(SECONDS).token_ids == WHOLE.token_ids
        assert not hog.done
        steps, left = engine.stats().steps, 180 - len(hog.pieces()) / 4
        assert [choice.token_ids for choice in hog.result(SECONDS).choices] == alone
        stats = engine.stats()
    assert stats.preemptions == 1
    assert stats.steps - steps < left + 25, "only the first text is computed again: the cache still has the others"


# ── asyncio ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tasks_await_and_iterate():
    async def pieces_of(generation):
        return [piece async for piece in generation]

    async def serve(engine):
        generations = [engine.submit("abc", max_new_tokens=20) for _ in range(4)]
        streams = [asyncio.create_task(pieces_of(one)) for one in generations]
        completions = await asyncio.gather(*[_awaited(one) for one in generations])
        assert [one.token_ids for one in completions] == [WHOLE.token_ids] * 4
        assert [ids_of(await stream) for stream in streams] == [WHOLE.token_ids] * 4
        assert ids_of(await pieces_of(generations[0])) == WHOLE.token_ids
        assert (await generations[0]) is completions[0]

    with CheckedEngine(LM) as engine:
        asyncio.run(asyncio.wait_for(serve(engine), SECONDS))


async def _awaited(generation):
    return await generation


def test_a_cancelled_task_leaves_the_request_running():
    async def serve(engine):
        generation = engine.submit("abc", max_new_tokens=20, stop_when=slowly)
        task = asyncio.create_task(_awaited(generation))
        async for _ in generation:
            break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_awaited(generation), 0.005)
        assert not generation._listeners
        assert (await generation).token_ids == WHOLE.token_ids

    with CheckedEngine(LM) as engine:
        asyncio.run(asyncio.wait_for(serve(engine), SECONDS))


def test_a_loop_closed_early_does_not_affect_other_requests():
    with CheckedEngine(LM) as engine:
        generation = engine.submit("abc", max_new_tokens=20, stop_when=slowly)
        loop = asyncio.new_event_loop()
        waiting = generation._until()
        task = loop.create_task(waiting)
        loop.call_soon(loop.stop)
        loop.run_forever()
        assert generation._listeners
        task._log_destroy_pending = False
        loop.close()
        assert generation.result(SECONDS).token_ids == WHOLE.token_ids
        waiting.close()


def test_the_changes_of_a_step_reach_a_loop_in_one_call(monkeypatch):
    calls, events = [], []
    generations = []

    async def serve(engine):
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *arguments: (calls.append(1), call(*arguments)))
        generations.extend(engine.submit(text, max_new_tokens=8) for text in ("abc", "abd", "abe"))
        for generation in generations:
            generation.watch(lambda: events.append(1))
            generation.watch(lambda: events.append("end"), pieces=False)
        for generation in generations:
            await generation
        while events.count("end") < len(generations):
            await asyncio.sleep(0.001)

    with CheckedEngine(LM) as engine:
        asyncio.run(asyncio.wait_for(serve(engine), SECONDS))
        steps = engine.stats().steps
    assert len(calls) <= steps + len(generations)
    assert events.count("end") == len(generations)
    for generation in generations:
        times = [when for when, _ in generation.arrivals]
        assert times == sorted(times)
        assert times[0] >= generation.submitted
        assert sum(count for _, count in generation.arrivals) == len(generation.pieces()) == 8
        assert generation.pieces(5) == generation.pieces()[5:]


def test_an_ended_watch_gets_no_more_calls():
    events = []

    async def serve(engine):
        with held(engine):
            generation = engine.submit("abc", max_new_tokens=20)
            end = generation.watch(lambda: events.append(1))
            end()
            end()
        await generation

    with CheckedEngine(LM) as engine:
        asyncio.run(asyncio.wait_for(serve(engine), SECONDS))
    assert not events


def test_an_engine_reports_how_long_its_step_has_been_running():
    hangs, resume = threading.Event(), threading.Event()

    def stop_when(ids, text):
        hangs.set()
        resume.wait(SECONDS)
        return True

    with CheckedEngine(LM) as engine:
        assert engine.seconds_since_step == 0
        generation = engine.submit("abc", stop_when=stop_when)
        assert hangs.wait(SECONDS)
        since = engine.seconds_since_step
        time.sleep(0.05)
        assert engine.seconds_since_step >= since + 0.05
        resume.set()
        generation.result(SECONDS)
    assert engine.seconds_since_step == 0
    with pytest.raises(EngineError):
        engine.check_open()


def test_errors_reach_awaiting_tasks():
    def fails(ids, text):
        raise ValueError("mine")

    async def serve(engine):
        generation = engine.submit("abc", stop_when=fails)
        with pytest.raises(ValueError, match="mine"):
            await generation
        with pytest.raises(ValueError, match="mine"):
            async for _ in generation:
                pass

    with CheckedEngine(LM) as engine:
        asyncio.run(asyncio.wait_for(serve(engine), SECONDS))


# ── who holds what ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_unreferenced_engine_serves_its_requests_and_ends():
    engine = Engine(LM)
    thread = engine._worker._thread
    generations = [engine.submit("abc", max_new_tokens=20) for _ in range(3)]
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    assert [one.result(SECONDS).token_ids for one in generations] == [WHOLE.token_ids] * 3
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_an_engine_references_no_ended_request():
    with CheckedEngine(LM) as engine:
        for options in ({}, {"n": 2, "temperature": 1.0}, {"beams": 2}, {"draft": "lookup"}, {"time_limit": 1000.0}):
            generation = engine.submit("abc", max_new_tokens=5, **options)
            generation.result(SECONDS)
            gone = weakref.ref(generation)
            engine.generations.clear()
            del generation
            engine.submit("abcd", max_new_tokens=2).result(SECONDS)  # the last step's work lives until the next
            gc.collect()
            assert gone() is None, options


def test_a_generation_references_no_engine():
    engine = Engine(LM)
    generation = engine.submit("abc", max_new_tokens=2)
    generation.result(SECONDS)
    engine.close()
    worker = weakref.ref(engine._worker)
    del engine
    gc.collect()
    assert worker() is None
    assert generation.done


def test_an_engine_is_not_copied(tmp_path):
    import copy
    import pickle

    with CheckedEngine(LM) as engine:
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(EngineError, match="an engine cannot be copied or pickled"):
                attempt(engine)
        assert repr(engine).startswith("<CheckedEngine: 0 running, 0 waiting")
