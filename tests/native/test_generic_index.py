"""Advanced indexing and assignment, compared with torch."""

import pytest
import torch
from generic_calls import ELEMENTS, index, laid_out, layouts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from onward import native
from onward.errors import NativeError

per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
seeds = st.integers(0, 2**31)
SHAPE = (3, 5, 7, 6)
# Which dimensions are indexed, and the shapes of the indices.
CASES = (
    {0: (4,)}, {1: (2, 3)}, {3: (2,)}, {0: (4,), 1: (4,)}, {1: (2, 1), 2: (3,)}, {2: (), 3: (5,)},
    {0: (2, 1), 1: (1, 3), 2: (1,)}, {0: (2,), 1: (2,), 2: (2,), 3: (2,)}, {2: (0,)},
)  # fmt: skip


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 2 == 0 if dtype == torch.bool else torch.arange(count).to(dtype)).view(shape)


def indices_of(seed: int, case: dict[int, tuple[int, ...]], dtype: torch.dtype) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-SHAPE[d], SHAPE[d], case[d], generator=generator).to(dtype) if d in case else None
        for d in range(max(case) + 1)
    ]


def as_torch_takes_them(indices: list[Tensor | None]) -> tuple[Tensor | slice, ...]:
    return tuple(slice(None) if i is None else i.long() for i in indices)


@given(
    seed=seeds, case=st.sampled_from(CASES), layout=layouts, index_layout=layouts,
    dtype=st.sampled_from(tuple(ELEMENTS)),
    index_dtype=st.sampled_from((torch.int32, torch.int64)), threads=st.integers(1, 3),
)  # fmt: skip
@per_isa
def test_indexing_equals_torch(
    isa: str, seed: int, case: dict[int, tuple[int, ...]], layout: str, index_layout: str, dtype: torch.dtype,
    index_dtype: torch.dtype, threads: int,
) -> None:  # fmt: skip
    native.set_num_threads(threads)
    x = numbers(SHAPE, dtype)
    indices = indices_of(seed, case, index_dtype)
    laid = [i if i is None or i.numel() == 0 else laid_out(i, index_layout) for i in indices]
    want = x[as_torch_takes_them(indices)]
    assert torch.equal(index(laid_out(x, layout), laid), want)


@given(seed=seeds, case=st.sampled_from(CASES), layout=layouts, values_layout=layouts)
@per_isa
def test_index_put_equals_torch(
    isa: str, seed: int, case: dict[int, tuple[int, ...]], layout: str, values_layout: str
) -> None:
    x, indices = numbers(SHAPE, torch.float32), indices_of(seed, case, torch.int64)
    where = as_torch_takes_them(indices)
    values = -1 - numbers(tuple(x[where].shape), torch.float32)
    if values.numel():
        values = laid_out(values, values_layout)
    # Of several values for one element the last stays.
    want = x.clone().flatten()
    places = torch.arange(x.numel()).view(SHAPE)[where].flatten().tolist()
    for place, value in zip(places, values.flatten().tolist(), strict=True):
        want[place] = value
    got = laid_out(x, layout)
    index(got, indices, values)
    assert torch.equal(got, want.view(SHAPE))


@pytest.mark.parametrize("bad", [-4, 3, 2**31, -(2**40)])
@pytest.mark.parametrize("put", [False, True])
def test_indices_out_of_range_are_refused_before_any_write(isa: str, bad: int, put: bool) -> None:
    x, values = torch.zeros(3, 4), torch.ones(3, 4)
    with pytest.raises(NativeError, match="bad argument"):
        index(x, [torch.tensor([0, 1, bad])], values if put else None)
    assert (x == 0).all()


def test_large_gathers_are_split_over_threads(isa: str) -> None:
    native.set_num_threads(2)
    x = torch.randn(500, 300, generator=torch.Generator().manual_seed(0))
    rows = torch.randint(0, 500, (2000,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(index(x, [rows]), x[rows])
    # gather along the last dimension: one index per position, with the row's own coordinate.
    columns = torch.randint(0, 300, (500, 60), generator=torch.Generator().manual_seed(2))
    assert torch.equal(index(x, [torch.arange(500)[:, None], columns]), x.gather(1, columns))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_selected_columns_of_long_rows_equal_torch(isa: str, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    """More rows and columns than a thread takes at once, so that a share begins in the middle of a row."""
    native.set_num_threads(3)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 11, 700, generator=generator).mul(100).to(dtype)
    columns = torch.randint(-700, 700, (1001,), generator=generator).to(index_dtype)
    want = x[..., columns.long()]
    for layout in ("plain", "reversed", "spread"):
        assert torch.equal(index(laid_out(x, layout), [None, None, columns]), want)
