"""Attention and cache writes with a block table have the bits of the dense ones, for any order of the blocks."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_calls import CODES, DTYPES, attention, call, poisoned, strides
from torch import Tensor

from onward import native
from onward.errors import NativeError
from onward.ops.heads import HeadsArguments

BLOCK = 64
per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def in_blocks(generator: torch.Generator, *dense: Tensor) -> tuple[list[Tensor], Tensor]:
    """Tensors [B, G, 64 M, …] cut into blocks [N, G, 64, …], each a strided view of one buffer, in an order drawn by
    lot, with unused blocks between them; and the table [B, M], a view too."""
    batch, heads, positions, _ = dense[0].shape
    row_blocks = positions // BLOCK
    count = batch * row_blocks + 3
    order = torch.randperm(count, generator=generator, dtype=torch.int32)[: batch * row_blocks]
    buffer = poisoned((count, len(dense) + 1, heads, BLOCK, max(t.shape[3] for t in dense)), dense[0].dtype)
    for i, tensor in enumerate(dense):
        cut = tensor.unflatten(2, (row_blocks, BLOCK)).transpose(1, 2)  # [B, M, G, 64, D]
        buffer[order.long(), i, ..., : tensor.shape[3]] = cut.flatten(0, 1)
    table = torch.full((batch, row_blocks + 2), -7, dtype=torch.int32)
    table[:, :row_blocks] = order.view(batch, row_blocks)
    return [buffer[:, i, ..., : tensor.shape[3]] for i, tensor in enumerate(dense)], table[:, :row_blocks]


@given(
    seed=st.integers(0, 2**31), dtype=st.sampled_from(DTYPES), batch=st.integers(1, 3), kv_heads=st.integers(1, 3),
    group=st.sampled_from((1, 2, 7)), dim=st.sampled_from((1, 17, 64, 80, 128)), row_blocks=st.integers(1, 20),
    queries=st.sampled_from((1, 2, 5, 40, 130)), causal=st.booleans(), windowed=st.booleans(), with_sinks=st.booleans(),
    masked=st.booleans(), value_dim=st.sampled_from((None, 24)), softcap=st.sampled_from((0.0, 2.0)),
    threads=st.integers(1, 4), data=st.data(),
)  # fmt: skip
@per_isa
def test_paged_attention_has_the_bits_of_the_dense_one(
    isa: str, seed: int, dtype: torch.dtype, batch: int, kv_heads: int, group: int, dim: int, row_blocks: int,
    queries: int, causal: bool, windowed: bool, with_sinks: bool, masked: bool, value_dim: int | None, softcap: float,
    threads: int, data: st.DataObject,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    positions = BLOCK * row_blocks
    queries = min(queries, positions)
    q = torch.randn(batch, kv_heads * group, queries, dim, generator=generator).to(dtype)
    keys, values = (
        torch.randn(batch, kv_heads, positions, width, generator=generator).to(dtype)
        for width in (dim, value_dim or dim)
    )
    offsets, window = None, 0
    if causal:
        starts = [data.draw(st.integers(0, positions - queries), "offset") for _ in range(batch)]
        offsets = torch.tensor(starts, dtype=torch.int32)
        window = data.draw(st.integers(1, positions), "window") if windowed else 0
        for row, start in enumerate(starts):  # positions past a row's end are not read
            keys[row, :, start + queries :] = math.nan
            values[row, :, start + queries :] = math.nan
    options = {
        "window": window,
        "sinks": torch.randn(kv_heads * group, generator=generator) if with_sinks else None,
        "mask": torch.randn(1, 1, queries, positions, generator=generator) if masked else None,
        "softcap": softcap,
    }
    native.set_num_threads(threads)
    dense = attention(q, keys, values, offsets, **options)
    (key_blocks, value_blocks), table = in_blocks(generator, keys, values)
    if offsets is not None:
        for row, start in enumerate(starts):  # nor entries of the table that no query of the row needs
            table[row, -(-(start + queries) // BLOCK) :] = -1
            if window:
                table[row, : max(0, start + 1 - window) // BLOCK] = -1
    assert same_bits(attention(q, key_blocks, value_blocks, offsets, table=table, **options), dense)


@given(
    seed=st.integers(0, 2**31), dtype=st.sampled_from(DTYPES), kv_heads=st.sampled_from((1, 2, 3, 8)),
    group=st.sampled_from((1, 2, 7)), dim=st.sampled_from((17, 64, 128)), row_blocks=st.integers(1, 10),
    windowed=st.booleans(), with_sinks=st.booleans(), threads=st.integers(1, 4), data=st.data(),
)  # fmt: skip
@per_isa
def test_positions_of_a_text_as_separate_rows_equal_one_row(
    isa: str, seed: int, dtype: torch.dtype, kv_heads: int, group: int, dim: int, row_blocks: int, windowed: bool,
    with_sinks: bool, threads: int, data: st.DataObject,
) -> None:  # fmt: skip
    """Each text is cut into runs of positions; the runs of all come in any order, some longer ones reversed."""
    generator = torch.Generator().manual_seed(seed)
    positions, texts = BLOCK * row_blocks, data.draw(st.integers(1, 3), "texts")
    keys, values = (torch.randn(texts, kv_heads, positions, dim, generator=generator).to(dtype) for _ in range(2))
    (key_blocks, value_blocks), table = in_blocks(generator, keys, values)
    options = {
        "window": data.draw(st.integers(1, positions), "window") if windowed else 0,
        "sinks": torch.randn(kv_heads * group, generator=generator) if with_sinks else None,
    }
    native.set_num_threads(threads)
    rows: list[tuple[int, int]] = []  # (text, position)
    expected = []
    for _ in range(data.draw(st.integers(1, 5), "runs")):
        text = data.draw(st.integers(0, texts - 1), "text")
        start = data.draw(st.integers(0, positions - 1), "start")
        count = data.draw(st.integers(1, min(70, positions - start)), "count")
        order = [*range(count)] if data.draw(st.booleans(), "forwards") else [*reversed(range(count))]
        q = torch.randn(1, kv_heads * group, count, dim, generator=generator).to(dtype)
        offsets = torch.tensor([start], dtype=torch.int32)
        whole = attention(q, key_blocks, value_blocks, offsets, table=table[text : text + 1], **options)
        rows += [(text, start + at) for at in order]
        expected += [(q[:, :, at : at + 1], whole[:, :, at : at + 1]) for at in order]
    q, whole = (torch.cat(parts) for parts in zip(*expected, strict=True))
    of_rows = torch.stack([table[text] for text, _ in rows])
    offsets = torch.tensor([position for _, position in rows], dtype=torch.int32)
    assert same_bits(attention(q, key_blocks, value_blocks, offsets, table=of_rows, **options), whole)


@given(
    seed=st.integers(0, 2**31), dtype=st.sampled_from(DTYPES), batch=st.integers(1, 3),
    dim=st.sampled_from((2, 64, 80)), row_blocks=st.integers(1, 5),
    queries=st.sampled_from((1, 2, 63, 64, 200)),
    count=st.sampled_from((1, 3, 8)), rotate=st.booleans(), threads=st.integers(1, 4), data=st.data(),
)  # fmt: skip
@per_isa
def test_heads_are_written_only_to_the_blocks_of_the_table(
    isa: str, seed: int, dtype: torch.dtype, batch: int, count: int, dim: int, row_blocks: int, queries: int,
    rotate: bool, threads: int, data: st.DataObject,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    positions = BLOCK * row_blocks
    queries = min(queries, positions)
    x = torch.randn(batch, queries, count, dim, generator=generator).to(dtype).transpose(1, 2)
    dense = torch.randn(batch, count, positions, dim, generator=generator).to(dtype)
    starts = [data.draw(st.integers(0, positions - queries), "offset") for _ in range(batch)]
    (blocks,), table = in_blocks(generator, dense)
    native.set_num_threads(threads)
    write(x, dense, starts, rotate)
    write(x, blocks, starts, rotate, table)
    assert same_bits(blocks[table.long()].transpose(1, 2).flatten(2, 3), dense)
    assert blocks._base is not None
    assert blocks._base[:, 1].isnan().all()
    used = torch.zeros(len(blocks), dtype=torch.bool)
    used[table.long()] = True
    assert blocks[~used].isnan().all()


def write(
    x: Tensor, cache: Tensor, starts: list[int], rotate: bool, table: Tensor | None = None, to_cache: int = 1
) -> None:
    """x [B, H, T, D] to a cache [B, H, S, D], or to blocks [N, H, 64, D] through a table."""
    batch, count, queries, dim = x.shape
    part = HeadsArguments(
        heads=count, x=x.data_ptr(), x_strides=strides(x, 3), rotate=rotate, out=cache.data_ptr(),
        out_strides=strides(cache, 3), to_cache=to_cache, positions=cache.shape[2],
    )  # fmt: skip
    if table is not None:
        part.positions, part.table, part.table_stride = BLOCK * table.shape[1], table.data_ptr(), table.stride(0)
    angles = torch.linspace(-1, 1, batch * queries * (dim // 2)).view(batch, queries, dim // 2)
    cos, sin, offsets = angles.cos(), angles.sin(), torch.tensor(starts, dtype=torch.int32)
    call(
        "onward_heads", (HeadsArguments * 1)(part), 1, batch, queries, dim, CODES[x.dtype], cos.data_ptr(),
        sin.data_ptr(), strides(angles, 2), dim // 2, offsets.data_ptr(),
    )  # fmt: skip


@pytest.mark.parametrize(("offset", "first_block"), [(-1, 0), (126, 0), (64, 0), (2**31 - 1, 0), (10, -1)])
def test_positions_past_the_table_and_negative_blocks_are_refused(isa: str, offset: int, first_block: int) -> None:
    x, blocks = torch.ones(1, 1, 3, 8), torch.zeros(2, 1, BLOCK, 8)
    table = torch.tensor([[first_block, -1]], dtype=torch.int32)
    with pytest.raises(NativeError, match="onward_heads failed: bad argument"):
        write(x, blocks, [offset], False, table)
    assert not blocks.any()
    with pytest.raises(NativeError, match="onward_attention failed: bad argument"):
        attention(x, blocks, blocks, torch.tensor([offset], dtype=torch.int32), table=table)


@pytest.mark.parametrize("code", [2, -1, 2**31 - 1])
def test_unknown_row_formats_are_refused(isa: str, code: int) -> None:
    x, cache = torch.ones(1, 1, 1, 8), torch.zeros(1, 1, BLOCK, 8)
    with pytest.raises(NativeError, match="onward_heads failed: bad argument"):
        write(x, cache, [0], False, to_cache=3 if code == 2 else code)
    assert not cache.any()
    with pytest.raises(NativeError, match="onward_attention failed: bad argument"):
        attention(x, cache, cache, torch.zeros(1, dtype=torch.int32), cache_format=code)
