"""A whole decoder keeps the guarantee of its ops: a token's logits have the same bits however it is processed."""

import dataclasses
from functools import lru_cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rounding import DTYPES, same_bits
from torch import Tensor

from onward import native
from onward.language_model import quantize
from onward.models import Model, pack_params
from onward.testing import tiny_model

# As in test_bit_exactness: the definitions promise nothing of the kind.
KERNELS_ALONE = True
ROOM = 640
few = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


@lru_cache
def model(dtype: torch.dtype, format: str) -> Model:
    """Grouped heads, norms of heads, a window in one layer."""
    windows = {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1}
    stock = tiny_model("qwen3", dtype=dtype, max_position_embeddings=ROOM, **windows)
    if format != "stock":
        return quantize(stock, format)
    return dataclasses.replace(stock, params=pack_params(stock.params))


def ids(count: int, seed: int) -> Tensor:
    return torch.randint(258, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def logits_in_chunks(model: Model, rows: Tensor, offsets: Tensor, chunks: list[int], cache) -> Tensor:
    """rows [B, T] one chunk after the other -> [B, T, V]."""
    parts = []
    for part in rows.split(chunks, 1):
        parts.append(model(part, offsets, cache)[0])
        offsets = offsets + part.shape[1]
    return torch.cat(parts, 1)


@st.composite
def cut(draw, total: int) -> list[int]:
    """Sizes of chunks: single tokens at the end, as decoding has them, and a few larger ones before."""
    single = draw(st.integers(0, min(total, 5)))
    sizes, left = [], total - single
    while left:
        sizes.append(draw(st.just(left) | st.integers(1, left)))
        left -= sizes[-1]
    return sizes + [1] * single


@pytest.mark.parametrize("format", ["stock", "int8", "int4", "iq4_nl"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data(), tokens=st.integers(1, 600), batch=st.integers(1, 4), seed=st.integers(0, 2**16))
@few
def test_token_alone_equals_the_token_batched_and_chunked(dtype, format, data, tokens, batch, seed):
    """The row in a batch with rows at other positions, and alone in chunks, with other numbers of threads."""
    subject = model(dtype, format)
    rows = torch.stack([ids(tokens, seed + row) for row in range(batch)])
    row = data.draw(st.integers(0, batch - 1))
    offsets = torch.tensor([data.draw(st.integers(0, ROOM - tokens)) for _ in range(batch)], dtype=torch.int32)
    offsets[row] = 0
    # What the others see before their offset does not matter, but is no NaN: it is what an empty cache holds.
    cache = subject.new_cache(batch, ROOM)
    for buffer in (*cache.keys, *cache.values):
        buffer.normal_(generator=torch.Generator().manual_seed(seed))
    native.set_num_threads(data.draw(st.integers(1, 4)))
    together = logits_in_chunks(subject, rows, offsets, [tokens], cache)[row]
    native.set_num_threads(data.draw(st.integers(1, 4)))
    alone = logits_in_chunks(
        subject, rows[row : row + 1], offsets[row : row + 1], data.draw(cut(tokens)), subject.new_cache(1, ROOM)
    )[0]
    assert same_bits(alone, together)
    # The head run at one position alone.
    at = data.draw(st.integers(0, tokens - 1))
    picked, _ = subject(
        rows[row : row + 1], offsets[row : row + 1], subject.new_cache(1, ROOM), logits_at=torch.tensor([[at]])
    )
    assert same_bits(picked[0, 0], together[at])
