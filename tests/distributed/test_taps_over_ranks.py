"""Values at the taps of every rank are the bits of one process: hidden states, embeddings, lenses, generated rows."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import ASKED, PROMPTS, over_ranks
from transformers import Qwen3Config, Qwen3Model

import onward
from onward import Completion, LanguageModel
from onward.errors import RequestError
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
