"""Convert a checkpoint's tensor to the dtype and the device of a model."""

import torch
from torch import Tensor

from onward.errors import CheckpointError

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_float(where: object, name: str, dtype: torch.dtype) -> None:
    """Raise `CheckpointError` for a dtype that no kernel computes in; `where` is the file or folder."""
    if dtype not in _FLOATS:
        raise CheckpointError(f"{where}: tensor {name!r} is {dtype}; convert it to bf16, f16 or f32")


def placed(where: object, name: str, tensor: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """The tensor in `dtype` (None: its own) on `device`; no copy where it is there already.

    Raises:
        CheckpointError: its values are too large for float16.
    """
    if tensor.data_ptr() % tensor.element_size():
        tensor = tensor.clone()  # a file may hold it at an address that is no multiple of its element
    moved = tensor.to(device=device, dtype=dtype or tensor.dtype)
    narrowed = moved.dtype == torch.float16 and tensor.dtype != torch.float16
    if narrowed and moved.isinf().any() and not tensor.isinf().any():
        raise CheckpointError(
            f"{where}: tensor {name!r} has values up to {tensor.abs().max().item():.3g}, and float16 ends "
            "at 65504: load it as bfloat16 or float32"
        )
    return moved
