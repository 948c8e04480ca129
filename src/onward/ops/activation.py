"""The gated activations of feed-forward blocks (Shazeer, arXiv 2002.05202), a plain gate, and the residual sum."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.errors import RequestError
from onward.native.interface import Code, Int, Pointer, kernel
from onward.ops.kernel_calls import DTYPES, KernelCalls, Operand
from onward.ops.operator import Backward, Gradients, Operator, autocast_dtype, like_first, shapes, to_widest_dtype

_GRADIENT_BLOCK = 2**16  # elements


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


@kernel
def onward_swiglu(
    rows: Int, columns: Int, dtype: Code, gate: Pointer, gate_stride: Int, up: Pointer, up_stride: Int, out: Pointer,
    out_stride: Int,
) -> Code: ...  # fmt: skip
@kernel
def onward_geglu(
    rows: Int, columns: Int, dtype: Code, approximate: Code, gate: Pointer, gate_stride: Int, up: Pointer,
    up_stride: Int, out: Pointer, out_stride: Int,
) -> Code: ...  # fmt: skip
@kernel
def onward_sigmoid_gate(
    rows: Int, columns: Int, dtype: Code, gate: Pointer, gate_stride: Int, x: Pointer, x_stride: Int, out: Pointer,
    out_stride: Int,
) -> Code: ...  # fmt: skip
@kernel
def onward_add(
    rows: Int, columns: Int, dtype: Code, a: Pointer, a_stride: Int, b: Pointer, b_stride: Int, out: Pointer,
    out_stride: Int,
) -> Code: ...  # fmt: skip


def _calling(kernel: str) -> Callable[..., None]:
    def call(k: KernelCalls, out: Operand, a: Operand, b: Operand, *options: bool) -> None:
        a, rows, columns, a_stride = k.rows(a)
        b, _, _, b_stride = k.rows(b)
        k.call(
            kernel, rows, columns, k.code(a), *options, k.address(a), a_stride, k.address(b), b_stride, k.address(out),
            columns,
        )  # fmt: skip

    return call


def _geglu_definition(gate: Tensor, up: Tensor, approximate: bool) -> Tensor:
    return F.gelu(gate, approximate="tanh" if approximate else "none") * up


def _gated_gradient(
    backward: Backward, gate: Tensor, up: Tensor, function: Callable[..., Tensor], derivative: Callable[..., Tensor]
) -> Gradients:
    """The gradients of function(gate) * up, a block at a time, so that the terms of both stay in a cache. function and
    derivative: torch's, which write to a tensor."""
    to_gate, to_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    blocks = (torch.split(x.reshape(-1), _GRADIENT_BLOCK) for x in (backward.grad, gate, up, to_gate, to_up))
    for grad, gate_block, up_block, gate_out, up_out in zip(*blocks, strict=True):
        derivative(grad * up_block, gate_block, grad_input=gate_out)
        function(gate_block, out=up_out).mul_(grad)
    return to_gate, to_up


def _swiglu_gradient(backward: Backward, gate: Tensor, up: Tensor) -> Gradients:
    return _gated_gradient(backward, gate, up, torch.ops.aten.silu.out, torch.ops.aten.silu_backward.grad_input)


def _geglu_gradient(backward: Backward, gate: Tensor, up: Tensor, approximate: bool) -> Gradients:
    aten, form = torch.ops.aten, "tanh" if approximate else "none"
    function, derivative = (
        partial(aten.gelu.out, approximate=form),
        partial(aten.gelu_backward.grad_input, approximate=form),
    )
    return _gated_gradient(backward, gate, up, function, derivative)


def _sigmoid_gate_gradient(backward: Backward, gate: Tensor, x: Tensor) -> Gradients:
    grad, share = backward.grad, gate.sigmoid()
    return torch.ops.aten.sigmoid_backward(grad * x, share), grad * share


_swiglu: Operator[Tensor] = Operator(
    "swiglu(Tensor gate, Tensor up) -> Tensor", lambda gate, up: F.silu(gate) * up, _calling(onward_swiglu), like_first,
    gradient=_swiglu_gradient,
)  # fmt: skip
_geglu = Operator(
    "geglu(Tensor gate, Tensor up, bool approximate) -> Tensor", _geglu_definition, _calling(onward_geglu), like_first,
    gradient=_geglu_gradient,
)  # fmt: skip
_sigmoid_gate: Operator[Tensor] = Operator(
    "sigmoid_gate(Tensor gate, Tensor x) -> Tensor", lambda gate, x: gate.sigmoid() * x, _calling(onward_sigmoid_gate),
    like_first, gradient=_sigmoid_gate_gradient,
)  # fmt: skip
_add: Operator[Tensor] = Operator(
    "add(Tensor a, Tensor b) -> Tensor", lambda a, b: a + b, _calling(onward_add), like_first,
    gradient=lambda backward, a, b: (backward.grad, backward.grad),
)  # fmt: skip
