"""The gated activations of feed-forward blocks (Shazeer, arXiv 2002.05202), a plain gate, and the residual sum."""

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.errors import RequestError
from onward.native import Library
from onward.ops.operator import DTYPES, Operator, autocast_dtype, like_first, shapes, widened


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise; both float [..., D] of one shape and dtype."""
    gate, up = _autocast_to_one_dtype(gate, up)
    _check("swiglu", gate, up)
    return _swiglu(gate, up)


def geglu(gate: Tensor, up: Tensor, *, approximate: bool = True) -> Tensor:
    """gelu(gate) * up, elementwise; both float [..., D] of one shape and dtype.

    approximate: take gelu's tanh form, as Gemma does; otherwise the exact one.
    """
    gate, up = _autocast_to_one_dtype(gate, up)
    _check("geglu", gate, up)
    return _geglu(gate, up, bool(approximate))


def sigmoid_gate(gate: Tensor, x: Tensor) -> Tensor:
    """sigmoid(gate) * x, elementwise; both float [..., D] of one shape and dtype."""
    gate, x = _autocast_to_one_dtype(gate, x)
    _check("sigmoid_gate", gate, x)
    return _sigmoid_gate(gate, x)


def _autocast_to_one_dtype(gate: Tensor, up: Tensor) -> list[Tensor] | tuple[Tensor, Tensor]:
    return widened(gate, up) if gate.dtype != up.dtype and autocast_dtype(gate) is not None else (gate, up)


def _swiglu_definition(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _geglu_definition(gate: Tensor, up: Tensor, approximate: bool) -> Tensor:
    return F.gelu(gate, approximate="tanh" if approximate else "none") * up


def _sigmoid_gate_definition(gate: Tensor, x: Tensor) -> Tensor:
    return gate.sigmoid() * x


def _swiglu_native(library: Library, gate: Tensor, up: Tensor) -> Tensor:
    return _call(library, "onward_swiglu", gate, up)


def _sigmoid_gate_native(library: Library, gate: Tensor, x: Tensor) -> Tensor:
    return _call(library, "onward_sigmoid_gate", gate, x)


def _call(library: Library, kernel: str, gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out, width = torch.empty_like(gate), gate.shape[-1]
    status = getattr(library, kernel)(
        gate.numel() // max(width, 1), width, DTYPES[gate.dtype],
        gate.data_ptr(), width, up.data_ptr(), width, out.data_ptr(), width,
    )  # fmt: skip
    library.check(status, kernel)
    return out


def _geglu_native(library: Library, gate: Tensor, up: Tensor, approximate: bool) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out, width = torch.empty_like(gate), gate.shape[-1]
    status = library.onward_geglu(
        gate.numel() // max(width, 1), width, DTYPES[gate.dtype], approximate,
        gate.data_ptr(), width, up.data_ptr(), width, out.data_ptr(), width,
    )  # fmt: skip
    library.check(status, "onward_geglu")
    return out


def _check(name: str, gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.dtype not in DTYPES or gate.dim() == 0:
        raise RequestError(f"{name} wants float gate and up of one shape and dtype; got {shapes(gate=gate, up=up)}")


_swiglu = Operator("swiglu(Tensor gate, Tensor up) -> Tensor", _swiglu_definition, _swiglu_native, like_first)
_geglu = Operator(
    "geglu(Tensor gate, Tensor up, bool approximate) -> Tensor", _geglu_definition, _geglu_native, like_first
)
_sigmoid_gate = Operator(
    "sigmoid_gate(Tensor gate, Tensor x) -> Tensor", _sigmoid_gate_definition, _sigmoid_gate_native, like_first
)


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
