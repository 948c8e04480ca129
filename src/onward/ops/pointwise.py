"""Functions of each element whose last bit depends on who computes them: torch, or the kernel that a program calls for
torch's operator. A forward that calls these has the same bits eagerly, in a program and under autograd."""

from collections.abc import Callable

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.native.generic import Unary, onward_unary
from onward.ops.kernel_calls import DTYPES, KernelCalls, Operand
from onward.ops.operator import Backward, Operator, like_first, shapes


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent of float x [...]."""
    return _tanh(_checked("tanh", x))


def log(x: Tensor) -> Tensor:
    """The natural logarithm of float x [...]."""
    return _log(_checked("log", x))


def _checked(op: str, x: Tensor) -> Tensor:
    if x.dtype not in DTYPES:
        raise RequestError(f"{op} expects a float tensor; got {shapes(x=x)}")
    return x


def _calling(function: Unary) -> Callable[[KernelCalls, Operand, Operand], None]:
    def call(k: KernelCalls, out: Operand, x: Operand) -> None:
        code, shape = k.code(x), x.shape  # the codes of `Element` extend those of `DType`
        k.call(
            onward_unary, function, len(shape), k.int64s(shape), k.address(x), code, k.int64s(x.stride()),
            k.address(out), code, k.int64s(out.stride()), 0.0,
        )  # fmt: skip

    return call


def _tanh_gradient(backward: Backward, x: Tensor) -> tuple[Tensor]:
    return (torch.ops.aten.tanh_backward(backward.grad, torch.tanh(x)),)


_tanh: Operator[Tensor] = Operator(
    "tanh(Tensor x) -> Tensor", torch.tanh, _calling(Unary.TANH), like_first, gradient=_tanh_gradient
)
_log: Operator[Tensor] = Operator("log(Tensor x) -> Tensor", torch.log, _calling(Unary.LOG), like_first)
