"""`torch.autocast`: an op here does under it what torch's own of the kind does.

Products (linear, attention) are computed in the autocast dtype. Norms are computed in float32 and returned in it, on
the CPU in x's dtype. Elementwise ops take the wider of two dtypes. float64 and what is no float stays as it is.
(https://docs.pytorch.org/docs/stable/amp.html, "Autocast Op Reference")
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_any_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks of products on x's device; None where it is off."""
    if not _any_is_on():
        return None
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def lowered(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    """The tensors in the autocast dtype."""
    return [t if t is None or not _eligible(t) else t.to(dtype) for t in tensors]


def widened(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the widest of their dtypes."""
    widest = tensors[0].dtype
    for tensor in tensors[1:]:
        widest = torch.promote_types(widest, tensor.dtype)
    return [tensor.to(widest) for tensor in tensors]


def normed(op: Callable[..., Tensor], x: Tensor, *learned: Tensor) -> Tensor:
    """A norm of x with its weight and bias, of whatever dtypes."""
    on_cpu = x.device.type == "cpu"
    if not all(map(_eligible, (x, *learned))) or (on_cpu and all(tensor.dtype == x.dtype for tensor in learned)):
        return op(x, *learned)
    out = op(*(tensor.to(torch.float32) for tensor in (x, *learned)))
    return out.to(x.dtype) if on_cpu else out


def off(x: Tensor) -> torch.autocast:
    """Without autocast on x's device: what has been cast is not cast again."""
    return torch.autocast(x.device.type, enabled=False)


def _eligible(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64
