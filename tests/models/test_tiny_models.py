"""The public doubles of `onward.testing` are real checkpoints of real families."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers_reference import TOLERANCE

import onward
from onward.errors import RequestError
from onward.testing import poison, random_checkpoint, tiny_model

FAMILIES = [
    *("qwen3", "qwen2", "llama", "mistral", "gemma2", "gemma3", "olmo2", "olmo3", "smollm3", "granite", "glm", "glm4"),
    *("seedoss", "exaone4", "qwen3_5", "qwen3_5moe", "qwen3next", "phi3", "ministral", "gemma4"),
    *("deepseekv2", "deepseekv3", "glm4moelite", "lfm2", "lfm2moe"),
    *("granitemoehybrid", "bamba", "falconh1", "nemotronh"),
]
IDS = [(11 * i) % 258 for i in range(23)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", [1, 3])
def test_transformers_reads_a_random_checkpoint_like_onward(family, shards, tmp_path):
    folder = random_checkpoint(tmp_path / "new", family, shards=shards, seed=3, sliding_window=7)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        want = theirs(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(onward.load(folder).logits(IDS), want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_equals_its_random_checkpoint(family, tmp_path):
    shape = {} if family == "nemotronh" else {"num_hidden_layers": 1}  # whose layers are of one block each
    in_memory = onward.LanguageModel(tiny_model(family, seed=5, **shape))
    on_disk = onward.load(random_checkpoint(tmp_path, family, seed=5, **shape))
    torch.testing.assert_close(on_disk.logits(IDS), in_memory.logits(IDS), rtol=0, atol=TOLERANCE)


def test_the_seed_determines_the_weights():
    one, same, other = (onward.LanguageModel(tiny_model(seed=seed)).logits(IDS) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)


def test_an_unknown_family_is_refused_by_name():
    with pytest.raises(RequestError, match=r"llama, .*qwen2, qwen3.*; got 'gpt9'"):
        tiny_model("gpt9")


def test_reading_poison_makes_logits_nan():
    model = tiny_model()
    cache = poison(model.new_cache(1, 8))
    tokens, offset = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    logits, _ = model(tokens, offset, cache)  # positions 0, 1, 2 were never written
    assert logits.isnan().all()
