"""Tensor parallel ranks give the bits of one process, for any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import over_ranks, same

import onward
from onward.errors import RequestError
from onward.testing import random_checkpoint

PROMPT = list(range(5, 135))
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "granite", "smollm3", "seedoss"]
# Heads, columns and a vocabulary that four ranks can share.
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 96}


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_equal_one_process(family: str, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, family, dtype=torch.bfloat16, **SIZES)
    one = onward.load(folder)
    with over_ranks(folder, 2, "tensor") as split:
        assert same(one, split, temperature=0)
        assert torch.equal(one.logits(PROMPT), split.logits(PROMPT))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("quantize", [None, "int8", "int4", "iq4_nl"])
@pytest.mark.parametrize("tied", [False, True])
def test_any_ranks_and_formats(world: int, quantize: str | None, tied: bool, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, tie_word_embeddings=tied, **SIZES, vocab_size=260)
    one = onward.load(folder, quantize=quantize)
    with over_ranks(folder, world, "tensor", quantize=quantize) as split:
        assert same(one, split, temperature=1.0, seed=3)


def test_a_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, **SIZES, vocab_size=259)
    one = onward.load(folder)
    with over_ranks(folder, 2, "tensor") as split:
        assert same(one, split, temperature=0)


def test_every_way_to_decode(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "model", **SIZES)
    one = onward.load(folder)
    with over_ranks(folder, 2, "tensor") as split:
        assert same(one, split, draft="lookup", temperature=0)
        assert same(one, split, n=2, seed=1, temperature=1.0)
        assert same(one, split, beams=2)
        assert same(one, split, prompt_logprobs=1, temperature=0)
        session, ours = onward.Session(split), onward.Session(one)
        session.generate(PROMPT, max_new_tokens=4)
        session.save(tmp_path / "session")
        restored = onward.Session.load(tmp_path / "session", split)
        ours.generate(PROMPT, max_new_tokens=4)
        more = [*restored.tokens, 7]
        assert restored.generate(more, max_new_tokens=8).token_ids == ours.generate(more, max_new_tokens=8).token_ids


@pytest.mark.parametrize(
    ("family", "options", "wanted"),
    [
        ("qwen3", {"tensor": 3}, "must divide the model's 4 attention heads"),
        ("qwen3", {"tensor": 2, "pipeline": 2}, "by layers or within"),
        ("phi3", {"tensor": 2}, "several projections"),
        ("olmo2", {"tensor": 2}, "normalised together"),
        ("deepseekv3", {"tensor": 2}, "LatentAttention"),
    ],
)
def test_what_cannot_be_split_is_named(family: str, options: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, family)
    with pytest.raises(RequestError, match=wanted):
        onward.load(folder, **options)
