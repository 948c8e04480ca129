"""onward_linear_many: a matrix has the bits that it has alone, whatever matrices share the pass."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_calls import CODES, DTYPES, call, poisoned
from packed import Packed
from torch import Tensor

from onward import native
from onward.errors import NativeError
from onward.native.interface import Format
from onward.ops.packed import LinearArguments

per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
rows = st.sampled_from((0, 1, 15, 16, 17, 100, 700))


def linear_many(
    x: Tensor, weights: list[Packed], biases: list[Tensor | None], dtypes: list[torch.dtype]
) -> list[Tensor]:
    """x [T, K] -> [T, rows] of each weight, in rows one element longer than they need to be."""
    outs = [
        poisoned((x.shape[0], weight.rows + 1), dtype)[:, : weight.rows]
        for weight, dtype in zip(weights, dtypes, strict=True)
    ]
    products = (LinearArguments * len(weights))(
        *(weight.product(bias, out) for weight, bias, out in zip(weights, biases, outs, strict=True))
    )
    fmt = weights[0].format if weights else Format.F32
    call("onward_linear_many", products, len(weights), fmt, *x.shape, x.data_ptr(), CODES[x.dtype], x.stride(0))
    return outs


@pytest.mark.parametrize("fmt", Format)
@given(
    t=st.sampled_from((1, 2, 5, 16, 17, 70)), k=st.sampled_from((1, 31, 64, 300)), sizes=st.lists(rows, max_size=5),
    threads=st.integers(1, 4), seed=st.integers(0, 2**31), data=st.data(),
)  # fmt: skip
@per_isa
def test_fused_linears_equal_separate_ones(
    isa: str, fmt: Format, t: int, k: int, sizes: list[int], threads: int, seed: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = [Packed.random(fmt, n, k, generator) for n in sizes]
    x = torch.randn(t, k, generator=generator).to(data.draw(st.sampled_from(DTYPES), "x"))
    of_each = [data.draw(st.tuples(st.sampled_from((*DTYPES, None)), st.sampled_from(DTYPES))) for _ in sizes]
    biases = [
        None if bias is None else torch.randn(n, generator=generator).to(bias)
        for n, (bias, _) in zip(sizes, of_each, strict=True)
    ]
    native.set_num_threads(threads)
    together = linear_many(x, weights, biases, [out for _, out in of_each])
    native.set_num_threads(1)
    for weight, bias, out in zip(weights, biases, together, strict=True):
        assert torch.equal(out, weight.linear(x, bias, out.dtype))


@pytest.mark.parametrize(
    ("wrong", "value"),
    [("n", -1), ("bias_dtype", 3), ("out_dtype", -1)],
)
def test_an_invalid_matrix_is_refused_before_any_write(isa: str, wrong: str, value: int) -> None:
    weight = Packed.random(Format.F32, 16, 4, torch.Generator().manual_seed(0))
    x, outs = torch.ones(1, 4), poisoned((2, 16), torch.float32)
    products = (LinearArguments * 2)(
        *(
            LinearArguments(n=16, packed=weight.data.data_ptr(), out=outs[i].data_ptr(), out_stride=16, out_dtype=0)
            for i in range(2)
        )
    )
    setattr(products[1], wrong, value)
    with pytest.raises(NativeError, match="onward_linear_many failed: bad argument"):
        call("onward_linear_many", products, 2, Format.F32, 1, 4, x.data_ptr(), 0, 4)
    assert outs.isnan().all()


@pytest.mark.parametrize("shape", [(-1, 4), (1, -1), (1, 70_000)])
def test_invalid_shapes_are_refused(isa: str, shape: tuple[int, int]) -> None:
    with pytest.raises(NativeError, match="bad argument"):
        call("onward_linear_many", None, 0, Format.INT8, *shape, None, 0, 0)
