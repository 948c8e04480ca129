"""The likeliest id of each row."""

import torch
from torch import Tensor

from onward.native import Library
from onward.ops.operators import DTYPES, Operator


def argmax(x: Tensor) -> Tensor:
    """float [..., V] -> int64 [...]. Of equal values the lowest index counts. A NaN counts as the largest value."""
    return _argmax(x) if x.dtype in DTYPES and x.numel() else x.argmax(-1)


def _definition(x: Tensor) -> Tensor:
    return x.argmax(-1)


def _native(library: Library, x: Tensor) -> Tensor:
    x, width = x.contiguous(), x.shape[-1]
    out = torch.empty(x.shape[:-1], dtype=torch.int64)
    status = library.onward_argmax(
        x.numel() // width, width, x.data_ptr(), DTYPES[x.dtype], width, out.data_ptr()
    )  # fmt: skip
    library.check(status, "onward_argmax")
    return out


_argmax = Operator(
    "argmax(Tensor x) -> Tensor",
    _definition,
    _native,
    lambda x: x.new_empty(x.shape[:-1], dtype=torch.int64),
)
