"""`torch.autocast`: under it, the ops do what torch's own ops of the same kind do.

Products (linear, attention) are computed in the autocast dtype. Norms are computed in float32 and return float32; on
the CPU they return x's dtype. Elementwise ops take the wider of two dtypes. float64 tensors and tensors of integers
stay as they are.
(https://docs.pytorch.org/docs/stable/amp.html, "Autocast Op Reference")
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_any_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast computes products on x's device; None where autocast is off."""
    return autocast_dtype_on(x.device.type) if _any_is_on() else None


def autocast_dtype_on(device: str) -> torch.dtype | None:
    """The dtype in which autocast computes products on this type of device; None where autocast is off."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def lowered(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    """Cast the tensors to the autocast dtype, all but None, float64 and integers."""
    return [t if t is None or not _is_cast(t) else t.to(dtype) for t in tensors]


def widened(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the widest of their dtypes."""
    widest = tensors[0].dtype
    for tensor in tensors[1:]:
        widest = torch.promote_types(widest, tensor.dtype)
    return [tensor.to(widest) for tensor in tensors]


def normed(op: Callable[..., Tensor], x: Tensor, *learned: Tensor) -> Tensor:
    """op(x, weight, …), a norm, as autocast computes it; the tensors may differ in dtype."""
    on_cpu = x.device.type == "cpu"
    if not all(map(_is_cast, (x, *learned))) or (on_cpu and all(tensor.dtype == x.dtype for tensor in learned)):
        return op(x, *learned)
    out = op(*(tensor.to(torch.float32) for tensor in (x, *learned)))
    return out.to(x.dtype) if on_cpu else out


def off(x: Tensor) -> torch.autocast:
    """A context without autocast on x's device, where tensors that have been cast are not cast again."""
    return torch.autocast(x.device.type, enabled=False)


def _is_cast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64
