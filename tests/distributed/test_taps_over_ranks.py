"""Taps of every rank have the bits of one process: hidden states, embeddings, lenses, generated and steered rows."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from rank_threads import ASKED, PROMPTS, over_ranks
from transformers import Qwen3Config, Qwen3Model

import onward
from onward import Completion, LanguageModel, Steer
from onward.errors import RequestError
from onward.ops.tap import updating
from onward.protocols import BodyReader
from onward.testing import random_checkpoint

Pair = tuple[LanguageModel, LanguageModel]
# One tap of each of three ranks, and both ends.
TAPS: dict[str, Any] = {"embedding": "last", "layers.0": "new", "layers.2": "all", "layers.4": "all", "norm": "new"}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "seed": 3, "n": 2},
    "beams": {"beams": 2},
    "drafted": {"temperature": 0, "draft": "lookup"},
    "scored": {"temperature": 0, "prompt_logprobs": 1},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The model in one process, and over three ranks."""
    folder = random_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=5, dtype=torch.bfloat16)
    with over_ranks(folder, 3) as split:
        yield onward.load(folder), split


def assert_same(ours: Completion, theirs: Completion) -> None:
    for a, b in zip(ours.choices, theirs.choices, strict=True):
        assert (a.token_ids, a.logprobs, a.prompt_logprobs) == (b.token_ids, b.logprobs, b.prompt_logprobs)
        assert (a.taps is None) == (b.taps is None)
        for name, values in (a.taps or {}).items():
            assert torch.equal(values, b.taps[name]), name


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gptoss", "deepseekv3"])
@pytest.mark.stride(2)
def test_every_tap_of_a_family(family: str, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, family, num_hidden_layers=3)
    one = onward.load(folder)
    with over_ranks(folder, 2) as split:
        assert split.model.taps == one.model.taps
        ours, theirs = (lm.hidden_states(PROMPTS, list(one.model.taps)) for lm in (one, split))
        for a, b in zip(ours, theirs, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in one.model.taps)


@pytest.mark.parametrize("at", ["all", "last", "mean"])
def test_hidden_states_alone_together_and_in_chunks(pair: Pair, at: Any) -> None:
    one, split = pair
    ours = one.hidden_states(PROMPTS, list(TAPS), at=at)
    in_chunks = LanguageModel(split.model, compile="eager", prefill_chunk=7)
    alone = [split.hidden_states(prompt, list(TAPS), at=at) for prompt in PROMPTS]
    for found in (
        split.hidden_states(PROMPTS, list(TAPS), at=at),
        in_chunks.hidden_states(PROMPTS, list(TAPS), at=at),
        alone,
    ):
        for a, b in zip(ours, found, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in TAPS)


def test_many_rows_go_in_parts(pair: Pair) -> None:
    prompts = [[row % 200 + 1, 3, 4] for row in range(40)]
    ours, theirs = (lm.generate(prompts, taps=TAPS, temperature=0, **ASKED) for lm in pair)
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b)


def steers() -> list[dict[str, Any]]:
    """Options of one request each: taps of every rank, positions, and rows that do not change."""
    draws = torch.Generator().manual_seed(1)
    one, several = (torch.randn(*shape, 32, generator=draws) * 4 for shape in ((), (3,)))
    return [
        {"steer": {"layers.0": one}},
        {},
        {"steer": {"layers.2": Steer(one, replace=True, at="new"), "layers.3": one}, "taps": {"layers.3": "all"}},
        {"steer": {"layers.4": Steer(several, at=[0, 2, 1]), "norm": Steer(one, at=slice(3, 9))}},
        {"prompt_embeds": {1: several}, "taps": TAPS},
        {"steer": {"embedding": Steer(one, scale=0.1), "norm": Steer(one, replace=True, at="prompt")}},
    ]


@pytest.mark.parametrize("way", WAYS)
def test_steered_rows_beside_rows_that_are_not(pair: Pair, way: str) -> None:
    prompts = [PROMPTS[index % 3 + 1] for index in range(len(steers()))]
    for _ in range(2):  # the second time over cached prefixes
        ours, theirs = (lm.generate(prompts, per_prompt=steers(), **ASKED, **WAYS[way]) for lm in pair)
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b)
    assert len({tuple(each.token_ids) for each in theirs}) == len(prompts)


def test_steered_rows_in_chunks_in_engines_and_in_parts(pair: Pair) -> None:
    one, split = pair
    prompt = PROMPTS[2]
    expected = [one.generate(prompt, **each, **ASKED, seed=4) for each in steers()]
    in_chunks = LanguageModel(split.model, compile="eager", prefill_chunk=7)
    for each, whole in zip(steers(), expected, strict=True):
        assert_same(whole, in_chunks.generate(prompt, **each, **ASKED, seed=4))
    with onward.Engine(split) as engine:
        handles = [engine.submit(prompt, **each, **ASKED, seed=4) for each in steers()]
        for handle, whole in zip(handles, expected, strict=True):
            assert_same(whole, handle.result())
    for row in split.generate([prompt] * 40, **steers()[2], **ASKED, seed=4):
        assert_same(expected[2], row)


def test_a_run_patched_with_its_own_values_keeps_its_bits(pair: Pair) -> None:
    _, split = pair
    plain = split.generate(PROMPTS[2], **ASKED, temperature=0)
    for name, values in split.hidden_states(PROMPTS[2], list(TAPS)).items():
        steer = {name: Steer(values, replace=True, at="prompt")}
        assert_same(plain, split.generate(PROMPTS[2], steer=steer, **ASKED, temperature=0))


def test_a_control_vector_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "controlvector")
    for layer in range(6):
        writer.add_tensor(f"direction.{layer}", np.linspace(-layer, 2, 192, dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    one = onward.load("demo", control_vectors={"v": tmp_path / "v.gguf"})
    body = {"prompt": "The girl", "max_tokens": 8, "temperature": 0, "control_vector": {"name": "v", "at": "new"}}
    with over_ranks(one.source, 2, control_vectors={"v": tmp_path / "v.gguf"}) as split:
        ours, theirs = (
            lm.generate(*BodyReader(lm, "m").read("/v1/completions", body).requests).token_ids for lm in (one, split)
        )
    assert ours == theirs != one.generate("The girl", max_new_tokens=8, temperature=0).token_ids


def test_a_session_is_steered(pair: Pair) -> None:
    vector = steers()[0]["steer"]["layers.0"]
    texts = []
    for lm in pair:
        session = onward.Session(lm)
        options = {"steer": {"layers.3": vector}, "temperature": 0, **ASKED}
        first = session.generate(PROMPTS[2], **options)
        texts.append(session.generate([*PROMPTS[2], *first.token_ids, 7], **options))
    assert_same(*texts)
    assert texts[0].cached_tokens == texts[1].cached_tokens > 0


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_read_beside_rows_that_do_not(pair: Pair, way: str) -> None:
    each = [{"taps": TAPS}, {}, {"taps": {"layers.3": "new"}}, {"taps": {"norm": "all"}}]
    for _ in range(2):  # the second time over cached prefixes
        ours, theirs = (lm.generate(PROMPTS, per_prompt=each, **ASKED, **WAYS[way]) for lm in pair)
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b)


def test_engine(pair: Pair) -> None:
    one, split = pair
    each = [TAPS, None, {"layers.3": "new"}, {"norm": "all"}]
    with onward.Engine(split) as engine:
        handles = [
            engine.submit(prompt, taps=taps, **ASKED, seed=4) for prompt, taps in zip(PROMPTS, each, strict=True)
        ]
        for handle, prompt, taps in zip(handles, PROMPTS, each, strict=True):
            assert_same(one.generate(prompt, taps=taps, **ASKED, seed=4), handle.result())


def test_embeddings_and_lenses(pair: Pair) -> None:
    one, split = pair
    assert torch.equal(one.embed(PROMPTS), split.embed(PROMPTS))
    ours, theirs = (lm.lens(PROMPTS[2]) for lm in pair)
    assert ours.taps == theirs.taps
    for name in ("top_ids", "top_logprobs", "next_logprobs"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))


def test_reranking() -> None:
    documents = ["A fox ran home.", "The sun is hot and"]
    one = onward.load("demo")
    with over_ranks(one.source, 2) as split:
        for lm in (one, split):
            lm.embedding = replace(lm.embedding, answers=(7, 9))
        ours, theirs = (lm.rerank("fox", documents, template="{query}: {document}") for lm in (one, split))
        assert ours == theirs
        assert ours[0] != ours[1]


def test_a_checkpoint_without_a_head(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        intermediate_size=64, max_position_embeddings=256,
    )  # fmt: skip
    Qwen3Model(config).save_pretrained(tmp_path)
    one, ids = onward.load(tmp_path), [[1, 2, 3], [4, 5]]
    with over_ranks(tmp_path, 2) as split:
        assert torch.equal(one.embed(ids), split.embed(ids))
        with pytest.raises(RequestError, match="no head over the vocabulary"):
            split.generate(ids, max_new_tokens=1)


def test_unknown_taps_are_refused_by_name(pair: Pair) -> None:
    for lm in pair:
        with pytest.raises(
            RequestError, match=r"'layers.5', which the model's forward does not have; it has embedding"
        ):
            lm.hidden_states(PROMPTS[0], "layers.5")
        with pytest.raises(RequestError, match=r"steer names 'layers.5', which the model's forward does not have"):
            lm.generate(PROMPTS[0], steer={"layers.5": torch.ones(32)})


def test_functions_of_values_are_refused_before_any_work(pair: Pair) -> None:
    _, split = pair
    with (
        updating({"layers.1": lambda x: x}),
        pytest.raises(RequestError, match="steered by requests, not by functions"),
    ):
        split.generate(PROMPTS[0], **ASKED)
    assert_same(*(lm.generate(PROMPTS[0], **ASKED, temperature=0) for lm in pair))
