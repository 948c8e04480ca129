"""New weights for a running engine: every token is that of the weights of its version."""

import asyncio
import random
import threading
import time
from itertools import pairwise

import pytest
import torch
from checked_engine import CheckedEngine
from safetensors.torch import load_file

import onward
from onward.errors import EngineError, OptionError, RequestError
from onward.testing import random_checkpoint

FAMILIES = ["qwen3", "gemma2", "lfm2"]  # global layers; sliding windows; recurrent layers
PROMPTS = [[5, 6, 7] * 30, [9, 8] * 50, [5, 6, 7] * 25 + [3], [11, 4, 2]]
SAMPLED = {"temperature": 1.0, "ignore_eos": True, "logprobs": 1}
COUNT = 3  # checkpoints


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoints(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    return [random_checkpoint(root / str(seed), request.param, seed=seed) for seed in range(COUNT)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    root = tmp_path_factory.mktemp("llama")
    return [random_checkpoint(root / str(seed), "llama", seed=seed) for seed in range(COUNT)]


def tensors(folder):
    return load_file(folder / "model.safetensors")


def solo(checkpoint, prompt, **options):
    return onward.load(checkpoint).generate(prompt, **options)


def updates(engine, checkpoints, in_flight, rng, count):
    """Update at random moments. Returns the checkpoint of each version."""
    of_version = {0: checkpoints[0]}
    for _ in range(count):
        time.sleep(rng.uniform(0, 0.03))
        checkpoint = rng.choice(checkpoints)
        of_version[engine.update_weights(tensors(checkpoint), in_flight=in_flight)] = checkpoint
    return of_version


def submitted(engine, rng, count=10):
    """Requests with other options each, from another thread, while updates happen."""
    requests, generations = [], []
    for seed in range(count):
        options = {**SAMPLED, "seed": seed, "max_new_tokens": rng.choice([1, 8, 40, 70])}
        options |= rng.choice([{}, {"n": 2}, {"draft": "lookup"}, {"frequency_penalty": 0.5}, {"prompt_logprobs": 0}])
        requests.append((rng.choice(PROMPTS), options))

    def submit():
        for prompt, options in requests:
            generations.append(engine.submit(prompt, **options))
            time.sleep(rng.uniform(0, 0.01))

    thread = threading.Thread(target=submit)
    thread.start()
    return thread, requests, generations


def runs(text):
    """(first token, token after the last, version) of each run of a text."""
    starts = [*(first for first, _ in text.weights_versions), len(text.token_ids)]
    return [(*span, version) for span, (_, version) in zip(pairwise(starts), text.weights_versions, strict=True)]


def assert_versions(generation, completion):
    """Pieces and completion tell the same versions, which never decrease."""
    for choice, text in enumerate(completion.choices):
        versions = [piece.weights_version for piece in generation.pieces() if piece.choice == choice]
        assert versions == sorted(versions)
        assert versions == [version for start, end, version in runs(text) for _ in range(start, end)]
        assert all(left != right for (_, left), (_, right) in pairwise(text.weights_versions))


def assert_same_texts(mine, theirs):
    for own, other in zip(mine.choices, theirs.choices, strict=True):
        assert (own.token_ids, own.logprobs) == (other.token_ids, other.logprobs)


@pytest.mark.parametrize("seed", range(2))
def test_finish_gives_each_text_one_version(checkpoints, seed):
    rng = random.Random(seed)
    with CheckedEngine(onward.load(checkpoints[0]), max_sequences=4) as engine:
        thread, requests, generations = submitted(engine, rng)
        of_version = updates(engine, checkpoints, "finish", rng, 4)
        thread.join()
        for (prompt, options), generation in zip(requests, generations, strict=True):
            completion = generation.result(60)
            assert_versions(generation, completion)
            ((_, version),) = completion.weights_versions
            assert_same_texts(completion, solo(of_version[version], prompt, **options))


@pytest.mark.parametrize("seed", range(2))
def test_recomputed_texts_equal_decoding_with_each_version(checkpoints, seed):
    """Token by token: the continuation of the earlier ids by an engine with only those weights."""
    rng = random.Random(seed)
    with CheckedEngine(onward.load(checkpoints[0]), max_sequences=4, overcommit=2.0) as engine:
        thread, requests, generations = submitted(engine, rng)
        of_version = updates(engine, checkpoints, "recompute", rng, 4)
        thread.join()
        completions = [generation.result(60) for generation in generations]
        assert any(len(text.weights_versions) > 1 for each in completions for text in each.choices)
        for generation, completion in zip(generations, completions, strict=True):
            assert_versions(generation, completion)
    replays = {checkpoint: CheckedEngine(onward.load(checkpoint), max_sequences=4) for checkpoint in checkpoints}
    for (prompt, options), completion in zip(requests, completions, strict=True):
        options = {**options, "prompt_logprobs": None}
        bounds = {bound for text in completion.choices for start, end, _ in runs(text) for bound in (start, end)}
        for start, end in pairwise(sorted(bounds)):
            (version,) = {v for text in completion.choices for first, last, v in runs(text) if first <= start < last}
            emitted = [text.token_ids[:start] for text in completion.choices]
            replay = replays[of_version[version]].resume(
                prompt, emitted=emitted if len(emitted) > 1 else emitted[0], **{**options, "max_new_tokens": end}
            )
            for own, other in zip(completion.choices, replay.result(60).choices, strict=True):
                assert own.token_ids[start:end] == other.token_ids[start:end]
                assert own.logprobs[start:end] == other.logprobs[start:end]


@pytest.mark.parametrize("seed", range(2))
def test_streams_change_weights_at_the_same_tokens_as_keep(checkpoints, seed):
    rng = random.Random(seed)
    with CheckedEngine(onward.load(checkpoints[0]), max_sequences=16) as engine:
        thread, requests, generations = submitted(engine, rng)
        of_version = updates(engine, checkpoints, "keep", rng, 4)
        thread.join()
        completions = [generation.result(60) for generation in generations]
    assert any(len(text.weights_versions) > 1 for each in completions for text in each.choices)
    lm = onward.load(checkpoints[0])
    for (prompt, options), generation, completion in zip(requests, generations, completions, strict=True):
        assert_versions(generation, completion)
        for text in completion.choices:
            alone = {**options, "seed": text.seed, "n": 1, "draft": None}
            versions = dict(text.weights_versions)
            lm.update_weights(tensors(of_version[versions[0]]))
            token_ids, logprobs = [], []
            for piece in lm.stream(prompt, **alone):
                token_ids.append(piece.token_id)
                logprobs.append(piece.logprobs)
                if len(token_ids) in versions:
                    lm.update_weights(tensors(of_version[versions[len(token_ids)]]))
            assert (token_ids, logprobs) == (text.token_ids, text.logprobs)


@pytest.mark.parametrize("in_flight", ["finish", "recompute", "keep"])
def test_no_request_reuses_prefixes_of_older_weights(checkpoints, in_flight):
    with CheckedEngine(onward.load(checkpoints[0]), max_sequences=4) as engine:
        options = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        running = engine.submit(PROMPTS[0], **options | {"max_new_tokens": 150})
        next(iter(running))
        engine.submit(PROMPTS[0], **options).result(60)
        assert engine.submit(PROMPTS[0], **options).result(60).cached_tokens > 0
        assert engine.update_weights(tensors(checkpoints[1]), in_flight=in_flight) == 1
        after = engine.submit(PROMPTS[0], **options).result(60)
        # A recomputed text may have computed the prompt again.
        assert after.cached_tokens == 0 or in_flight == "recompute"
        assert after.token_ids == solo(checkpoints[1], PROMPTS[0], **options).token_ids
        assert after.weights_versions == [(0, 1)]
        running.result(60)
        assert engine.update_weights(tensors(checkpoints[0]), in_flight=in_flight) == 2
        assert engine.submit(PROMPTS[0], **options).result(60).cached_tokens == 0


@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_a_beam_search_restarts(llama, in_flight):
    options = {"beams": 3, "max_new_tokens": 60, "ignore_eos": True}
    with CheckedEngine(onward.load(llama[0]), max_sequences=4) as engine:
        search = engine.submit(PROMPTS[0], **options)
        while engine.stats().steps < 10:
            time.sleep(0.001)
        engine.update_weights(tensors(llama[1]), in_flight=in_flight)
        completion = search.result(60)
        assert completion.weights_versions == [(0, 1)]
        assert completion.token_ids == solo(llama[1], PROMPTS[0], **options).token_ids


def test_preempted_requests_finish_before_the_update(llama):
    """Also when their memory ran out, and requests of other clients wait before them."""
    nbytes = 2**18
    with CheckedEngine(onward.load(llama[0]), max_sequences=8, cache_memory=nbytes, overcommit=8.0) as engine:
        options = {"max_new_tokens": 100, "temperature": 1.0, "ignore_eos": True}
        running = [engine.submit(PROMPTS[3], seed=seed, client=str(seed % 2), **options) for seed in range(8)]
        while not engine.stats().preemptions and not all(each.done for each in running):
            time.sleep(0.001)
        assert engine.stats().preemptions
        waiting, version = [engine.submit(PROMPTS[3], seed=9, client="other", **options) for _ in range(3)], []
        thread = threading.Thread(target=lambda: version.append(engine.update_weights(tensors(llama[1]))))
        thread.start()
        thread.join(60)
        assert version == [1]
        for each in (*running, *waiting):
            assert len(each.result(60).weights_versions) == 1
        for seed, each in enumerate(running):
            if each.result().weights_versions == [(0, 0)]:
                assert each.result().token_ids == solo(llama[0], PROMPTS[3], seed=seed, **options).token_ids


def test_updates_of_several_threads_apply_one_after_the_other(llama):
    with CheckedEngine(onward.load(llama[0]), max_sequences=4) as engine:
        running = engine.submit(PROMPTS[0], max_new_tokens=100, ignore_eos=True)
        modes = ["finish", "keep", "recompute", "keep", "finish"]
        versions = []
        threads = [
            threading.Thread(
                target=lambda mode=mode: versions.append(engine.update_weights(tensors(llama[1]), in_flight=mode))
            )
            for mode in modes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(versions) == [1, 2, 3, 4, 5]
        assert engine.weights_version == 5
        assert running.result(60).token_ids


def test_an_engine_of_a_trained_model_serves_its_latest_weights(llama):
    lm = onward.load(llama[0], trainable=True)
    options = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    with CheckedEngine(lm, max_sequences=4) as engine:
        before = engine.submit(PROMPTS[0], **options).result(60)
        assert_same_texts(before, lm.generate(PROMPTS[0], **options))
        optimizer = torch.optim.AdamW(lm.parameters(), lr=0.01)
        lm.logprobs(PROMPTS[0]).sum().backward()
        optimizer.step()
        assert_same_texts(before, engine.submit(PROMPTS[0], **options).result(60))
        assert lm.generate(PROMPTS[0], **options).logprobs != before.logprobs
        assert engine.update_weights(lm.named_parameters()) == engine.weights_version == 1
        assert_same_texts(engine.submit(PROMPTS[0], **options).result(60), lm.generate(PROMPTS[0], **options))


def test_the_fingerprint_is_that_of_the_new_weights(llama):
    with CheckedEngine(onward.load(llama[0])) as engine, CheckedEngine(onward.load(llama[1])) as other:
        before = engine.fingerprint
        engine.update_weights(tensors(llama[1]))
        assert engine.fingerprint == other.fingerprint != before


def test_an_update_does_not_block_a_loop(llama):
    async def main(engine):
        generation = engine.submit(PROMPTS[0], max_new_tokens=50, ignore_eos=True)
        update = asyncio.to_thread(engine.update_weights, tensors(llama[1]), in_flight="keep")
        version, completion = await asyncio.gather(update, generation)
        return version, completion

    with CheckedEngine(onward.load(llama[0])) as engine:
        version, completion = asyncio.run(main(engine))
        assert version == 1
        assert len(completion.token_ids) == 50


def test_invalid_updates_leave_the_engine_running(llama):
    weights = tensors(llama[1])
    with CheckedEngine(onward.load(llama[0])) as engine:
        running = engine.submit(PROMPTS[0], max_new_tokens=100, ignore_eos=True, temperature=0)
        with pytest.raises(OptionError, match="in_flight must be one of finish, recompute, keep; got 'abort'"):
            engine.update_weights(weights, in_flight="abort")
        with pytest.raises(RequestError, match="weights are missing"):
            engine.update_weights({})
        with pytest.raises(RequestError, match="not finite"):
            engine.update_weights(weights | {name: tensor * torch.nan for name, tensor in list(weights.items())[-1:]})
        with pytest.raises(OptionError, match="version"):
            engine.update_weights(weights, version=0)
        assert engine.weights_version == 0
        assert (
            running.result(60).token_ids
            == solo(llama[0], PROMPTS[0], max_new_tokens=100, ignore_eos=True, temperature=0).token_ids
        )


def test_a_callback_of_the_engine_cannot_update_it(llama):
    with CheckedEngine(onward.load(llama[0])) as engine:
        weights = tensors(llama[1])

        def update(ids, text):
            engine.update_weights(weights, in_flight="keep")

        with pytest.raises(EngineError, match="a function that the engine calls cannot update its weights"):
            engine.submit(PROMPTS[0], max_new_tokens=4, stop_when=update).result(60)
        assert engine.weights_version == 0
        assert engine.update_weights(weights) == 1


@pytest.mark.parametrize("drain", [True, False])
def test_closing_ends_the_wait_for_an_update(llama, drain):
    with CheckedEngine(onward.load(llama[0])) as engine:
        slow = {"stop_when": lambda text, token: time.sleep(0.01)}  # it outlasts the conversion of the weights
        running = engine.submit(PROMPTS[0], max_new_tokens=160, ignore_eos=True, **slow)
        next(iter(running))
        outcomes = []

        def update():
            try:
                outcomes.append(engine.update_weights(tensors(llama[1])))
            except EngineError as error:
                outcomes.append(str(error))

        thread = threading.Thread(target=update)
        thread.start()
        while not engine._worker._updates._pending:
            time.sleep(0.001)
        engine.close(drain=drain)
        thread.join(60)
        assert len(outcomes) == 1
        assert outcomes[0] == 1 or "was closed before the update" in outcomes[0]
        assert running.result().weights_versions == [(0, 0)]
        assert len(running.result().token_ids) == 160 or not drain
        with pytest.raises(EngineError, match="the engine is closed"):
            engine.update_weights(tensors(llama[1]))


def test_adapters_are_refused(llama, monkeypatch):
    lm = onward.load(llama[0])
    with CheckedEngine(lm) as engine:
        monkeypatch.setattr(lm._adapters, "_by_name", {"poet": None})
        with pytest.raises(RequestError, match="adapters are loaded for the current weights: drop poet first"):
            engine.update_weights(tensors(llama[1]))


def test_an_engine_failure_reaches_the_update(llama, monkeypatch):
    with CheckedEngine(onward.load(llama[0])) as engine:
        monkeypatch.setattr(engine._worker._scheduler, "preempt_all", lambda items: 1 / 0)
        with pytest.raises(EngineError, match=r"the engine has failed: .* before the update of its weights"):
            engine.update_weights(tensors(llama[1]), in_flight="keep")


def test_a_trained_adapter_on_trained_weights_is_refused(llama):
    lm = onward.load(llama[0], trainable=True)
    lm.new_adapter("poet")
    with pytest.raises(RequestError, match="the adapter 'poet' is trained too"):
        onward.Engine(lm)
