"""The gated activations of feed-forward blocks (Shazeer, arXiv 2002.05202), a plain gate, and the residual sum."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.errors import RequestError
from onward.native import Library
from onward.ops.operator import DTYPES, Operator, autocast_dtype, like_first, shapes, to_widest_dtype


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise; both float [..., D] of one shape and dtype."""
    return _swiglu(*_checked("swiglu", gate, up))


def geglu(gate: Tensor, up: Tensor, *, approximate: bool = True) -> Tensor:
    """gelu(gate) * up, elementwise; both float [..., D] of one shape and dtype.

    approximate: use gelu's tanh form, as Gemma does; otherwise the exact one.
    """
    return _geglu(*_checked("geglu", gate, up), bool(approximate))


def sigmoid_gate(gate: Tensor, x: Tensor) -> Tensor:
    """sigmoid(gate) * x, elementwise; both float [..., D] of one shape and dtype."""
    return _sigmoid_gate(*_checked("sigmoid_gate", gate, x))


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, elementwise; both float [..., D] of one shape and dtype.

    The kernel keeps a forward pass out of torch's own thread pool, whose threads spin for a while after each op on the
    cores that the next kernel needs (benchmarks/LOG.md).
    """
    return _add(*_checked("add", a, b, "a", "b"))


def _checked(op: str, a: Tensor, b: Tensor, *names: str) -> list[Tensor] | tuple[Tensor, Tensor]:
    """The operands, under autocast in one dtype."""
    operands = to_widest_dtype(a, b) if a.dtype != b.dtype and autocast_dtype(a) is not None else (a, b)
    a, b = operands
    if a.shape != b.shape or a.dtype != b.dtype or a.dtype not in DTYPES or a.dim() == 0:
        first, second = names or ("gate", "up")
        got = shapes(**{first: a, second: b})
        raise RequestError(f"{op} expects float {first} and {second} of one shape and dtype; got {got}")
    return operands


def _kernel(name: str) -> Callable[..., Tensor]:
    def native(library: Library, a: Tensor, b: Tensor, *options: bool) -> Tensor:
        a, b = a.contiguous(), b.contiguous()
        out, width = torch.empty_like(a), a.shape[-1]
        status = getattr(library, name)(
            a.numel() // max(width, 1), width, DTYPES[a.dtype], *options,
            a.data_ptr(), width, b.data_ptr(), width, out.data_ptr(), width,
        )  # fmt: skip
        library.check(status, name)
        return out

    return native


def _geglu_definition(gate: Tensor, up: Tensor, approximate: bool) -> Tensor:
    return F.gelu(gate, approximate="tanh" if approximate else "none") * up


_swiglu: Operator[Tensor] = Operator(
    "swiglu(Tensor gate, Tensor up) -> Tensor", lambda gate, up: F.silu(gate) * up, _kernel("onward_swiglu"), like_first
)
_geglu = Operator(
    "geglu(Tensor gate, Tensor up, bool approximate) -> Tensor", _geglu_definition, _kernel("onward_geglu"), like_first
)
_sigmoid_gate: Operator[Tensor] = Operator(
    "sigmoid_gate(Tensor gate, Tensor x) -> Tensor",
    lambda gate, x: gate.sigmoid() * x,
    _kernel("onward_sigmoid_gate"),
    like_first,
)
_add: Operator[Tensor] = Operator(
    "add(Tensor a, Tensor b) -> Tensor", lambda a, b: a + b, _kernel("onward_add"), like_first
)
