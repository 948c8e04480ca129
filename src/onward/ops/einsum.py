"""Einstein summation over any number of operands."""

import torch
from torch import Tensor

from onward.errors import RequestError


def einsum(subscripts: str, *operands: Tensor) -> Tensor:
    """Products summed over the indices that the result of `subscripts` leaves out, such as j of "bij,bjk->bik".

    Three operands or more are contracted pair by pair: in an optimised order where opt_einsum is installed (torch
    takes it by itself), else from left to right. The results differ in rounding only.

    Args:
        subscripts: as in `torch.einsum`: letters, "...", repeated indices for diagonals.
        operands: at least one, of one dtype.

    Raises:
        RequestError: subscripts that do not fit the operands.
    """
    if not operands:
        raise RequestError(f"einsum {subscripts!r} wants at least one operand; got none")
    try:
        return torch.einsum(subscripts, *operands)
    except (RuntimeError, ValueError) as error:
        operand_shapes = ", ".join(str(list(t.shape)) for t in operands)
        raise RequestError(f"einsum {subscripts!r} does not fit operands {operand_shapes}: {error}") from error
