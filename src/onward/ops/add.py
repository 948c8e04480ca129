"""The residual sum."""

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.native import Library
from onward.ops.autocast import autocast_dtype, widened
from onward.ops.operators import DTYPES, Operator, like_first, shapes


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, elementwise; both float [..., D] of one shape and dtype.

    The kernel keeps a forward out of torch's own thread pool, whose threads spin for a while after each op on the
    cores that the next kernel wants (benchmarks/LOG.md).
    """
    if a.dtype != b.dtype and autocast_dtype(a) is not None:
        a, b = widened(a, b)
    if a.shape != b.shape or a.dtype != b.dtype or a.dtype not in DTYPES or a.dim() == 0:
        raise RequestError(f"add wants float a and b of one shape and dtype; got {shapes(a=a, b=b)}")
    return _add(a, b)


def _definition(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def _native(library: Library, a: Tensor, b: Tensor) -> Tensor:
    a, b = a.contiguous(), b.contiguous()
    out, width = torch.empty_like(a), a.shape[-1]
    status = library.onward_add(
        a.numel() // max(width, 1), width, DTYPES[a.dtype],
        a.data_ptr(), width, b.data_ptr(), width, out.data_ptr(), width,
    )  # fmt: skip
    library.check(status, "onward_add")
    return out


_add = Operator(
    "add(Tensor a, Tensor b) -> Tensor",
    _definition,
    _native,
    like_first,
)
