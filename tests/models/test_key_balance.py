"""Balanced keys: the same scores, bit for bit, with floats, and smaller errors with rows of 8 bits."""

import pytest
import torch
from torch.utils import _pytree as pytree

from onward.models import architecture_of, build_model, named_params, pack_params
from onward.models.key_balance import balanced_keys
from onward.ops.kv_format import FORMATS
from onward.testing import tiny_model

IDS = torch.randint(0, 60, (1, 150), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
# Biases of keys, a norm of keys, a fused projection, interleaved pairs of half a head, and a model left as it is.
FAMILIES = ("qwen2", "qwen3", "llama", "phi3", "glm4", "glm", "gptoss", "gemma3", "deepseekv3", "qwen3next", "olmo2")


def with_outliers(family, **options):
    """A model whose keys have some features a hundred times the others, with small queries there."""
    stock = tiny_model(family, **options)
    named = zip(pytree.tree_leaves(named_params(architecture_of(stock))), pytree.tree_leaves(stock.params), strict=True)
    for name, tensor in named:
        if isinstance(name, str) and name.endswith(("k_proj.bias", "k_norm.weight")):
            tensor.copy_(torch.where(torch.arange(len(tensor)) % 16 % 8 == 5, 60.0, tensor))
        if isinstance(name, str) and name.endswith(("q_proj.bias", "q_norm.weight", "q_proj.weight")):
            large = torch.arange(len(tensor)) % 16 % 8 == 5
            tensor[large] = tensor[large] / 100
    return stock


def logits(model, architecture, params, format=None):
    model = build_model(architecture, params, cache_format=format)
    with torch.no_grad():
        return model(IDS, torch.zeros(1, dtype=torch.int32), model.new_cache(1, 160))[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_packed", [False, True])
def test_balancing_changes_no_bit_of_a_score(family, dtype, is_packed):
    stock = tiny_model(family, seed=3, dtype=dtype)
    architecture, params = architecture_of(stock), pack_params(stock.params) if is_packed else stock.params
    balanced = balanced_keys(architecture, params)
    assert torch.equal(logits(stock, architecture, balanced), logits(stock, architecture, params))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_key_outliers_cost_little_in_8_bits(family):
    """Against floats the error falls to a quarter at least: the step of a row is a hundredth of what it was."""
    stock = with_outliers(family, seed=2, head_dim=16)
    architecture, int8 = architecture_of(stock), FORMATS[torch.int8]
    floats = logits(stock, architecture, stock.params)
    plain, balanced = (
        (logits(stock, architecture, params, int8) - floats).abs().mean()
        for params in (stock.params, balanced_keys(architecture, stock.params))
    )
    assert balanced < plain / 4
