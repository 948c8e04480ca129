"""A pipeline gives the bits of one process: for families, formats, batches, drafts, sessions and the engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import ASKED, PROMPTS, over_ranks, same
from safetensors.torch import load_file, save_file

import onward
from demo_adapters import demo_adapter
from onward.distributed.group import MAX_TOKENS
from onward.distributed.pipeline import Microbatch, divide_layers, microbatches
from onward.errors import RequestError
from onward.language_model.fingerprint import model_fingerprint
from onward.testing import random_checkpoint

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2", "gptoss", "deepseekv3"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.stride(3)
def test_pipeline_equals_one_process(family: str, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, family, num_hidden_layers=3, dtype=torch.bfloat16)
    one = onward.load(folder)
    with over_ranks(folder, 2) as split:
        assert same(one, split, temperature=0)
        assert torch.equal(one.logits(PROMPTS[3]), split.logits(PROMPTS[3]))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("quantize", [None, "int8", "int4", "iq4_nl"])
@pytest.mark.stride(3)
def test_any_ranks_and_formats(world: int, quantize: str | None, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, num_hidden_layers=4, tie_word_embeddings=True, hidden_size=64)
    one = onward.load(folder, quantize=quantize)
    if world == 1:
        assert same(one, onward.load(folder, quantize=quantize, pipeline=1), temperature=0)
        return
    with over_ranks(folder, world, quantize=quantize) as split:
        assert same(one, split, temperature=1.0, seed=3)


def test_every_way_to_decode(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "model", num_hidden_layers=4)
    one = onward.load(folder)
    with over_ranks(folder, 3) as split:
        assert same(one, split, draft="lookup", temperature=0)
        assert same(one, split, n=2, seed=1, temperature=1.0)
        assert same(one, split, beams=2)
        assert same(one, split, prompt_logprobs=1, temperature=0)
        first = [lm.generate(PROMPTS[3], **ASKED, temperature=0) for lm in (one, split)]
        assert first[1].prompt_tokens == first[0].prompt_tokens
        again = split.generate(PROMPTS[3], **ASKED, temperature=0)
        assert again.cached_tokens > 0, "a prefix is found again"
        assert (again.token_ids, again.logprobs) == (first[0].token_ids, first[0].logprobs)


def test_many_rows_are_split_into_microbatches(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, num_hidden_layers=2)
    prompts = [[row % 200 + 1, 3, 4] for row in range(40)]
    one = onward.load(folder)
    with over_ranks(folder, 2) as split:
        ours, theirs = (lm.generate(prompts, **ASKED, temperature=0) for lm in (one, split))
        assert [(a.token_ids, a.logprobs) for a in ours] == [(b.token_ids, b.logprobs) for b in theirs]


def test_rows_that_read_each_other_stay_together() -> None:
    table = torch.arange(64, dtype=torch.int32).view(32, 2)
    tokens, offsets = torch.zeros(32, 1, dtype=torch.int32), torch.full((32,), 70, dtype=torch.int32)
    assert [len(part.tokens) for part in microbatches(Microbatch(tokens, offsets, table, None), 2)] == [16, 16]
    table[20] = table[3]
    assert len(microbatches(Microbatch(tokens, offsets, table, None), 2)) == 1, "two rows of one text"
    table[20] = torch.tensor([table[3, 1], 99])
    assert len(microbatches(Microbatch(tokens, offsets, table, None), 2)) == 1, "a row that reads what another writes"


def test_only_the_last_microbatch_of_a_prompt_has_a_result() -> None:
    tokens, offsets = torch.zeros(1, 128, dtype=torch.int32), torch.tensor([64], dtype=torch.int32)
    table, last = torch.arange(4, dtype=torch.int32).view(1, 4), torch.tensor([[127]])
    parts = microbatches(Microbatch(tokens, offsets, table, last), 3)
    assert [(part.tokens.shape[1], int(part.offsets), part.has_result) for part in parts] == [
        (42, 64, False),
        (43, 106, False),
        (43, 149, True),
    ]
    assert parts[-1].logits_at is not None
    assert parts[-1].logits_at.tolist() == [[42]]


def test_session_over_several_calls(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "model", num_hidden_layers=3)
    one = onward.load(folder)
    with over_ranks(folder, 2) as split:
        texts = []
        for lm in (one, split):
            session = onward.Session(lm)
            session.generate(PROMPTS[2], **ASKED, temperature=0)
            session.save(tmp_path / "session")
            restored = onward.Session.load(tmp_path / "session", lm)
            assert restored.tokens == session.tokens
            texts.append(restored.generate([*session.tokens, 7, 8], **ASKED, temperature=0))
        assert texts[0].token_ids == texts[1].token_ids
        assert texts[0].logprobs == texts[1].logprobs


def test_engine(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, num_hidden_layers=3)
    one = onward.load(folder)
    with over_ranks(folder, 2) as split, onward.Engine(one) as alone, onward.Engine(split) as engine:
        submitted = [
            [e.submit(prompt, **ASKED, seed=4, temperature=1.0) for prompt in PROMPTS] for e in (alone, engine)
        ]
        results = [[generation.result() for generation in generations] for generations in submitted]
        for a, b in zip(*results, strict=True):
            assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)


def test_too_many_tokens_at_once_are_refused_and_change_nothing(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path)
    one = onward.load(folder)
    with over_ranks(folder, 2) as split:
        cache = split.model.new_blocks(1).view(torch.zeros(1, 4, dtype=torch.int32))
        with pytest.raises(RequestError, match="prefill_chunk"):
            split.model(torch.zeros(1, MAX_TOKENS + 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), cache)
        with pytest.raises(RequestError, match="takes no cache="):
            split.generate(PROMPTS[0], cache=split.new_cache(1, 64), max_new_tokens=4)
        with pytest.raises(RequestError, match="takes no adapters yet: load it without pipeline="):
            split.load_adapter("poet", demo_adapter(tmp_path / "adapter", seed=0))
        assert same(one, split, temperature=0)


def test_fingerprints_cover_every_ranks_weights(tmp_path: Path) -> None:
    folders = [random_checkpoint(tmp_path / str(seed), seed=0) for seed in range(3)]
    weights = load_file(folders[2] / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][13, 7] += 2**-8  # of rank 1
    save_file(weights, folders[2] / "model.safetensors", metadata={"format": "pt"})
    found = []
    for folder in folders:
        with over_ranks(folder, 2) as split:
            found.append(model_fingerprint(split.model))
    assert found[0] == found[1] != found[2]


def test_layers_are_divided_evenly() -> None:
    assert divide_layers([1] * 4, 2, ends=0) == [range(2), range(2, 4)]
    assert divide_layers([1] * 6, 2, ends=2) == [range(2), range(2, 6)]
    assert divide_layers([1] * 4, 4, ends=100) == [range(1), range(1, 2), range(2, 3), range(3, 4)]


def test_each_rank_only_reads_its_layers(tmp_path: Path) -> None:
    """Without the other ranks' tensors the checkpoint is enough for a stage."""
    from onward.distributed.pipeline import stage_of
    from onward.models import read_config
    from onward.models.architecture import parameter_shapes
    from onward.testing import tiny_config

    decoder = read_config(tiny_config("qwen3", num_hidden_layers=4))
    parts = [set(parameter_shapes(stage_of(decoder, rank, 3))) for rank in range(3)]
    assert set.union(*parts) == set(parameter_shapes(decoder))
    assert sum(map(len, parts)) == len(parameter_shapes(decoder))


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("qwen3", {"pipeline": 3}, "as many layers"),
        ("qwen3", {"pipeline": 0}, "pipeline"),
        ("lfm2", {"pipeline": 2}, "recurrent"),
        ("gemma4", {"pipeline": 2}, "Gemma"),
        ("qwen3", {"pipeline": 2, "device": "cuda"}, "cuda"),
        ("qwen3", {"pipeline": 2, "adapters": {"a": "b"}}, "adapters"),
    ],
)
def test_unsupported_models_are_named(family: str, options: dict[str, Any], expected: str, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, family)
    with pytest.raises(RequestError, match=expected):
        onward.load(folder, **options)
