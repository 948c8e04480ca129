"""Packing loses nothing, and has the layout of native/README.md."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_calls import DTYPES
from packed import FLOAT_FORMATS, GROUP, Packed

from onward.errors import NativeError
from onward.native.interface import Format

SIZES = (1, 3, 16, 17, 31, 33, 64, 127, 1000)
per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
matrices = st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES), st.integers(0, 2**31))


def random(fmt: Format, matrix: tuple[int, int, int]) -> Packed:
    rows, inputs, seed = matrix
    return Packed.random(fmt, rows, inputs, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fmt", Format)
@given(matrix=matrices, dtype=st.sampled_from(DTYPES))
@per_isa
def test_packed_rows_unpack_unchanged(isa: str, fmt: Format, matrix: tuple[int, int, int], dtype: torch.dtype) -> None:
    weight = random(fmt, matrix)
    # The scale times the integer is rounded to float32, then to the dtype.
    want = weight.values.float().to(dtype)
    assert torch.equal(weight.take(None, weight.rows, dtype), want)
    ids = torch.randint(weight.rows, (7,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(weight.take(ids, 7, dtype), want[ids])


@pytest.mark.parametrize("fmt", FLOAT_FORMATS)
@given(matrix=matrices, source=st.sampled_from(DTYPES))
@per_isa
def test_packing_rounds_like_torch(isa: str, fmt: Format, matrix: tuple[int, int, int], source: torch.dtype) -> None:
    rows, inputs, seed = matrix
    # A row stride, as a slice of a larger checkpoint tensor has.
    weight = torch.randn(rows, inputs + 3, generator=torch.Generator().manual_seed(seed)).to(source)[:, :inputs]
    packed = Packed.of_floats(fmt, weight)
    assert torch.equal(packed.take(None, rows, torch.float32), weight.to(FLOAT_FORMATS[fmt]).float())


def test_the_layout_is_the_documented_one(isa: str) -> None:
    rows, inputs = 20, 70
    for fmt, dtype in FLOAT_FORMATS.items():
        weight = random(fmt, (rows, inputs, 1))
        per_line = 2 if fmt == Format.BF16 else 1
        lines = weight.data.view(dtype).view(2, -1, 16, per_line).double()
        for row, k in [(0, 0), (3, 1), (15, 69), (16, 5), (19, 68)]:
            assert lines[row // 16, k // per_line, row % 16, k % per_line] == weight.values[row, k]
    weight = random(Format.INT8, (rows, inputs, 2))
    assert weight.integers is not None
    assert weight.scales is not None
    blocks = weight.data.view(2, -1)
    assert torch.equal(blocks[:, :64].reshape(-1).view(torch.float32)[:rows], weight.scales)
    bytes_ = blocks[:, 64:].reshape(2, -1, 16, 4)
    for row, k in [(0, 0), (3, 1), (15, 69), (16, 5), (19, 68)]:
        assert bytes_[row // 16, k // 4, row % 16, k % 4] == int(weight.integers[row, k]) + 128
    weight = random(Format.INT4, (rows, inputs, 3))
    assert weight.integers is not None
    assert weight.scales is not None
    pairs = weight.data.view(2, -1, 576)
    for row, k in [(0, 0), (3, 1), (7, 6), (15, 69), (16, 37), (19, 68)]:
        pair, group = pairs[row // 16, k // 64], k // GROUP
        scales = pair[:64].reshape(-1).view(torch.float16).view(2, 16)
        assert scales[group % 2, row % 16] == weight.scales[row, group]
        byte = int(pair[64:].view(2, 4, 16, 4)[group % 2, k % 32 // 8, row % 16, k % 4])
        assert (byte >> 4 if k % 8 >= 4 else byte & 15) == int(weight.integers[row, k]) + 8


@pytest.mark.parametrize("fmt", Format)
def test_an_id_outside_the_matrix_is_refused(isa: str, fmt: Format) -> None:
    weight = random(fmt, (20, 33, 4))
    for bad in (-1, 20):
        with pytest.raises(NativeError, match="bad argument"):
            weight.take(torch.tensor([0, bad]), 2, torch.float32)
