"""Steering: the rows that ask change, alone as in any batch, and the others keep their bits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onward
from demo_adapters import demo_adapter
from onward import Engine, LanguageModel, Steer
from onward.errors import CheckpointError, RequestError
from onward.models import Run
from onward.ops.tap import updating
from onward.program import ForwardBatch
from onward.testing import tiny_model

PROMPT = "Once upon a time there was a little dog who"
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return onward.load("demo")


@pytest.fixture(scope="module")
def vector(lm: LanguageModel) -> torch.Tensor:
    return torch.randn(lm.model.taps["norm"].shape, generator=torch.Generator().manual_seed(1)) * 4


def steers(vector: torch.Tensor) -> list[dict[str, Any] | None]:
    return [
        {"layers.2": vector},
        None,
        {"layers.2": Steer(vector, scale=0.5), "norm": Steer(vector)},
        {"layers.2": Steer(vector, replace=True)},
        {"embedding": Steer(vector, scale=0.01)},
    ]


def test_steered_rows_are_the_same_alone_in_batches_engines_and_eagerly(lm, vector):
    alone = [lm.generate(PROMPT, steer=steer, **GREEDY).token_ids for steer in steers(vector)]
    assert len({tuple(ids) for ids in alone}) == len(alone)
    together = lm.generate([PROMPT] * len(alone), per_prompt=[{"steer": steer} for steer in steers(vector)], **GREEDY)
    assert [each.token_ids for each in together] == alone
    for draft in (None, "lookup"):
        with Engine(lm, max_sequences=8) as engine:
            handles = [engine.submit(PROMPT, steer=steer, draft=draft, **GREEDY) for steer in steers(vector)]
            assert [handle.result().token_ids for handle in handles] == alone
    eager = LanguageModel(lm.model, lm.tokenizer, compile="eager", prefill_chunk=3)
    assert [eager.generate(PROMPT, steer=steer, **GREEDY).token_ids for steer in steers(vector)] == alone


def test_samples_and_beams_are_steered_too(lm, vector):
    for options in ({"n": 3, "temperature": 1.0, "seed": 3}, {"beams": 3, "n": 3}):
        texts = lm.generate(PROMPT, steer={"layers.2": vector}, max_new_tokens=8, **options).choices
        with Engine(lm) as engine:
            other = engine.submit(PROMPT, steer={"layers.2": vector}, max_new_tokens=8, **options).result()
        assert [each.token_ids for each in other.choices] == [each.token_ids for each in texts]
        assert texts[0].token_ids != lm.generate(PROMPT, max_new_tokens=8, **options).token_ids


def test_values_at_taps_are_the_steered_ones(lm, vector):
    steer = {"layers.2": Steer(vector, replace=True)}
    taps = lm.generate(
        PROMPT, steer=steer, taps={"layers.2": "all", "layers.1": "all", "layers.3": "all"}, **GREEDY
    ).taps
    dtype = lm.model.taps["norm"].dtype
    assert bool((taps["layers.2"] == vector.to(dtype)).all())
    plain = lm.generate(PROMPT, taps={"layers.1": "all", "layers.3": "all"}, **GREEDY)
    count = len(lm.encode(PROMPT))
    assert torch.equal(taps["layers.1"][:count], plain.taps["layers.1"][:count])
    assert not torch.equal(taps["layers.3"][:count], plain.taps["layers.3"][:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patching_a_run_with_its_own_values_changes_no_bit(dtype):
    """By the update of a forward at every position, and by a request whose text has a single position."""
    model = tiny_model(dtype=dtype)
    ids = [(11 * i) % 258 for i in range(23)]

    def forward(compile: str = "eager") -> Any:
        batch = ForwardBatch(
            torch.tensor([ids], dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            model.new_cache(1, 64),
            taps=tuple(model.taps),
        )
        return Run(model, compile).step(batch)

    plain = forward()
    for name in model.taps:
        with updating(lambda at, x, name=name: plain.taps[name] if at == name else x):
            patched = forward()
        assert torch.equal(patched.logits, plain.logits)
    lm = LanguageModel(model)
    for name, state in lm.hidden_states([5], list(model.taps), at="last").items():
        one = lm.generate([5], max_new_tokens=1, temperature=0, logprobs=3, taps={"norm": "last"})
        patched = lm.generate(
            [5], max_new_tokens=1, temperature=0, logprobs=3, taps={"norm": "last"},
            steer={name: Steer(state, replace=True)},
        )  # fmt: skip
        assert patched.token_ids == one.token_ids
        assert patched.logprobs == one.logprobs
        assert torch.equal(patched.taps["norm"], one.taps["norm"])


def test_a_steered_forward_is_a_program_and_leaves_other_rows_as_they_are(lm, vector):
    lm.generate(PROMPT, steer={"layers.2": vector}, max_new_tokens=1)
    adapted, ids = lm._model_run.adapted, lm.encode(PROMPT)
    assert adapted.why_eager == ""
    cache = adapted.model.new_cache(2, 256)._replace(adapters=(torch.zeros(2, dtype=torch.int32),))
    program = onward.compile(
        adapted.model.forward, params=adapted.model.params, cache=cache, tokens=0, backend="native", fallback="raise"
    )
    tokens, offsets = torch.tensor([ids, ids], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    logits, _ = program(tokens, offsets, cache)
    assert torch.equal(logits[0], lm.logits(ids).to(logits.dtype))


def test_a_steer_beside_adapters_and_after_many_others(lm, tmp_path):
    lm = LanguageModel(lm.model, lm.tokenizer)
    lm.load_adapter("other", demo_adapter(tmp_path / "other", 3))
    adapted = lm.generate(PROMPT, adapter="other", **GREEDY).token_ids
    width = lm.model.taps["norm"].shape[0]
    texts: dict[int, list[int]] = {}
    for number in range(40):  # more than there are slots at once
        steer = {f"layers.{number % 6}": torch.full((width,), 0.05 * number)}
        texts[number] = lm.generate(PROMPT, steer=steer, **GREEDY).token_ids
    both = lm.generate(
        [PROMPT, PROMPT],
        per_prompt=[{"adapter": "other"}, {"steer": {"layers.1": torch.full((width,), 0.35)}}],
        **GREEDY,
    )
    assert [each.token_ids for each in both] == [adapted, texts[7]]
    assert lm.adapters._stacks.capacity.slots == 16


def control_vector(path: Path, vectors: dict[int, np.ndarray], kind: str = "controlvector") -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, kind)
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", len(vectors))
    for layer, values in vectors.items():
        writer.add_tensor(f"direction.{layer}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_control_vector_file_steers_its_layers(lm, vector, tmp_path):
    other = (vector * 0.5).numpy()
    path = control_vector(tmp_path / "happy.gguf", {2: vector.numpy(), 3: other})
    want = lm.generate(PROMPT, steer={"layers.2": vector, "layers.3": torch.tensor(other)}, **GREEDY)
    for given in (path, str(path)):
        assert lm.generate(PROMPT, steer=given, **GREEDY).token_ids == want.token_ids
    wrong = control_vector(tmp_path / "model.gguf", {2: other}, kind="llama")
    with pytest.raises(RequestError, match=r"needs a control vector, and .*model\.gguf is a GGUF file of 'llama'"):
        lm.generate(PROMPT, steer=wrong)


def test_bad_input_is_one_clear_error(lm, vector, tmp_path):
    (tmp_path / "text.gguf").write_text("a text, and no tensors: " * 9)
    own = LanguageModel(onward.Model(lambda t, o, c, p: (p[t.long()], c), torch.eye(9), lambda b, n: torch.zeros(b), 9))
    for steer, problem in (
        ({"layers.99": vector}, r"steer names 'layers.99', .* it has embedding, layers.0, .*norm"),
        ({"norm": vector[:5]}, r"steer needs a vector of \[192\] for 'norm'; got \[5\]"),
        ({"norm": vector[None]}, r"steer needs a vector \[D\] for 'norm'; got a tensor \[1, 192\]"),
        ({"norm": "happy"}, "needs a vector .* got str"),
        ({"norm": vector * float("nan")}, "numbers that are not finite"),
        ({"norm": Steer(vector, scale=float("inf"))}, "needs a finite scale"),
        ({}, "must map names of taps to vectors"),
        ("nothing.gguf", "names no file: 'nothing.gguf'"),
        (tmp_path / "text.gguf", "is not a GGUF file"),
    ):
        with pytest.raises((RequestError, CheckpointError), match=problem):
            lm.generate(PROMPT, steer=steer)
    lm.load_adapter("poet", demo_adapter(tmp_path / "poet", 3))
    with pytest.raises(RequestError, match="steer does not work with an adapter yet"):
        lm.generate(PROMPT, steer={"norm": vector}, adapter="poet")
    with pytest.raises(RequestError, match="the model's forward does not have; it has none"):
        own.generate([1], steer={"norm": vector}, max_new_tokens=1)
