"""Programs with a softcap in attention, or values of another width than the keys: the bits of eager calls."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import onward
from onward import native
from onward.cache import CachePlan, KVCache, KVPool, LayerShape, PagedKVCache
from onward.ops.heads import BLOCK

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library was built")
HEADS, GROUPS, DIM, VOCAB, MAX_LEN = 4, 2, 24, 31, 2 * BLOCK
HEADS_OF = {"q": HEADS, "k": GROUPS, "v": GROUPS}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tables(value_dim: int) -> dict[str, Tensor]:
    """Queries, keys and values of every token: all that is computed is the attention."""
    widths = {"q": HEADS * DIM, "k": GROUPS * DIM, "v": GROUPS * value_dim}
    return {name: random(VOCAB, width, seed=seed) for seed, (name, width) in enumerate(widths.items())}


def dense(batch: int, value_dim: int) -> KVCache:
    return KVCache.of(CachePlan((LayerShape(GROUPS, DIM, value_dim),), torch.float32), batch, MAX_LEN)


def paged(batch: int, value_dim: int) -> PagedKVCache:
    count = batch * MAX_LEN // BLOCK
    blocks = KVPool(CachePlan((LayerShape(GROUPS, DIM, value_dim),), torch.float32), count)
    return blocks.view(torch.arange(count, dtype=torch.int32).flip(0).view(batch, -1))


def attention_of(tokens: Tensor, offsets: Tensor, cache: Any, params: dict[str, Tensor], softcap: float | None) -> Any:
    q, k, v = (
        F.embedding(tokens, params[name]).unflatten(-1, (heads, -1)).transpose(1, 2) for name, heads in HEADS_OF.items()
    )
    return cache.attend(0, q, k, v, offsets, softcap=softcap).transpose(1, 2).flatten(2), cache


@pytest.mark.parametrize("new_cache", [dense, paged])
@pytest.mark.parametrize(("value_dim", "softcap"), [(DIM, 3.0), (16, None), (40, 0.5)])
def test_a_program_has_the_bits_of_eager_calls(new_cache: Any, value_dim: int, softcap: float | None) -> None:
    def forward(tokens: Tensor, offsets: Tensor, cache: Any, params: dict[str, Tensor]) -> Any:
        return attention_of(tokens, offsets, cache, params, softcap)

    weights = tables(value_dim)
    program = onward.compile(forward, params=weights, cache=new_cache(1, value_dim), fallback="raise")
    ours, theirs = new_cache(2, value_dim), new_cache(2, value_dim)
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    for count in (70, 1, 1, 3):
        tokens = torch.arange(2 * count, dtype=torch.int32).view(2, count) % VOCAB
        logits, ours = program(tokens, offsets, ours)
        expected, theirs = forward(tokens, offsets, theirs, weights)
        assert torch.equal(logits, expected)
        offsets = offsets + count


def test_torchs_own_attention_with_narrower_values_has_a_kernel() -> None:
    def forward(tokens: Tensor, offsets: Tensor, cache: Any, params: dict[str, Tensor]) -> Any:
        x = F.embedding(tokens, params["embed"]).unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x[..., :VOCAB], is_causal=True)[:, 0], cache

    weights = {"embed": random(VOCAB, 32, seed=0)}
    program = onward.compile(forward, params=weights, cache=(), fallback="raise")
    tokens, offsets = torch.arange(7, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int32)
    got, expected = program(tokens, offsets, ())[0], forward(tokens, offsets, (), weights)[0]
    # Weighted means of normal values, in two orders of up to 39 additions and with two exps of 2 units each.
    torch.testing.assert_close(got, expected, rtol=0, atol=48 * 2**-23 * 5)
