"""How ops are registered, and which form of an op runs.

An op has a definition, in plain torch for every device, and usually a kernel in the native library. Both are
registered under `torch.ops.onward`, so that the op is one node in `torch.compile`, `make_fx` and programs. An eager
call on plain CPU tensors enters the kernel directly: the dispatcher takes as long as a small kernel. If the fastest
plain torch is hard to read, a function `reference` in the op's file is the same, written out.

Kernels record no autograd graph. So under autograd an op's kernel runs in a node of its own, whose backward is the op's
`gradient`, or else runs the definition and differentiates it. A forward has the same bits with autograd as without. On
other devices than the CPU, in `torch.compile`, within `torch.func` and in forward mode, torch differentiates the
definition. An op without a gradient raises. All of this holds for the functions in `onward.ops` and for direct calls of
`torch.ops.onward`.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from onward import native
from onward.errors import NativeUnavailableError, RequestError
from onward.ops.kernel_calls import LibraryCalls, Unsupported

_FORMS = ("native", "definition")
_PLAIN = (Tensor, Parameter)
is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
# Advice for ops that write to a cache.
TRAIN_WITHOUT_CACHE = (
    "train with a forward over whole sequences that writes to no cache (ops.scaled_dot_product_attention with "
    "causal=True)"
)

# The shape and dtype of each op's result. Traces call these directly: the dispatcher takes five times as long.
FAKES: dict[OpOverload, Callable[..., Any]] = {}
# Each op's kernel function, for programs.
KERNELS: dict[OpOverload, Callable[..., None]] = {}

R = TypeVar("R")  # an op's result, mostly a tensor


class OpsBackend(NamedTuple):
    """Which form of the ops runs on the CPU: "native" (and the instruction set of its library) or "definition"."""

    form: str
    isa: str


_forced: str | None = None


def choice() -> OpsBackend:
    """The form that runs now; initially set by ONWARD_OPS (native, definition) and ONWARD_ISA (an instruction set, or
    none)."""
    return OpsBackend("definition", "none") if usable_library() is None else OpsBackend("native", native.isa())


def choose(form: str) -> OpsBackend:
    """Use one form from now on: "definition", "native" (the best library), or the library of an instruction set.

    Raises:
        RequestError: an unknown form. NativeUnavailableError: no such library, or the processor cannot run it.
    """
    global _forced
    forms = (*_FORMS, *native.built_isas())
    if form not in forms:
        raise RequestError(f"a form of the ops is {', '.join(forms)}; got {form!r}")
    if form != "definition":
        native.select_isa("auto" if form == "native" else form)
        if native.library() is None:
            raise NativeUnavailableError("no native library was built: install onward on a machine with a compiler")
    _forced = "definition" if form == "definition" else "native"
    return choice()


def usable_library() -> native.Library | None:
    """The library whose kernels run, or None if definitions run."""
    global _forced
    if _forced is None:
        _forced = os.environ.get("ONWARD_OPS", "native")
        if _forced not in _FORMS:
            value, _forced = _forced, None
            raise RequestError(f"ONWARD_OPS must be one of {', '.join(_FORMS)}; got {value!r}")
    return None if _forced == "definition" else native.library()


class Operator(Generic[R]):
    """An op under `torch.ops.onward`; called with the arguments of its schema, all by position.

    definition: plain torch, which reads no tensor's value on the host: a GPU would have to synchronise, and CUDA graphs
    couldn't capture it. kernel: calls the kernel through `KernelCalls`, its first argument; then it takes the result to
    fill in (None for an op that only writes to arguments), then the op's arguments, on the CPU. fake: returns a result
    of the right shape, dtype and strides. without_kernels: the form for the CPU without a kernel and without a
    gradient; it may read values, to do less than the definition. check: reads values on the host and raises if they are
    wrong; called before an eager call on the CPU.

    gradient: called with `Backward` and the arguments; returns the gradient of each, None where it is not needed, or
    fewer of them. By default the definition runs again in the backward pass, and torch differentiates it. lean: use
    `gradient` without kernels and on other devices too, where the definition would store much for the backward pass.
    instead: for an op without a gradient, the advice at the end of its error ("call it under torch.no_grad(), or …").
    Required of an op that writes to an argument.
    """

    def __init__(
        self,
        schema: str,
        definition: Callable[..., R],
        kernel: Callable[..., None],
        fake: Callable[..., R],
        without_kernels: Callable[..., R] | None = None,
        *,
        check: Callable[..., object] | None = None,
        gradient: "Gradient | None" = None,
        lean: bool = False,
        instead: str | None = None,
    ) -> None:
        self.name = name = schema[: schema.index("(")]
        self.definition = definition
        self._kernel, self._fake, self._check = kernel, fake, check
        self._without_kernels = without_kernels or definition
        _library.define(schema)  # type: ignore[no-untyped-call]
        _library.impl(name, definition, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        _library.impl(name, self._on_cpu, "CPU")  # type: ignore[no-untyped-call]
        _library.impl(name, self._under_autograd, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"onward::{name}", fake, lib=_library)
        self._registered: OpOverload = getattr(torch.ops.onward, name).default
        FAKES[self._registered], KERNELS[self._registered] = fake, kernel
        parameters = self._registered._schema.arguments
        self._names = [parameter.name for parameter in parameters]
        self._mutated = [i for i, each in enumerate(parameters) if each.alias_info and each.alias_info.is_write]
        assert instead or not self._mutated, f"{name} writes to an argument: it has no gradient"
        self._instead = instead
        self._gradient, self._lean = gradient, lean

    def __call__(self, *arguments: Any) -> R:
        plain = not torch.compiler.is_compiling()
        grad = torch.is_grad_enabled()
        for argument in arguments:
            if isinstance(argument, Tensor):
                if grad and argument.requires_grad:
                    return self._differentiable(*arguments)
                plain = plain and type(argument) in _PLAIN and argument.device.type == "cpu"
        if not plain:
            result: R = self._registered(*arguments)
            return result
        if forward_ad._current_level >= 0 or is_transformed():
            return self._transformed(*arguments)
        return self._on_cpu(*arguments)

    def _on_cpu(self, *arguments: Any) -> R:
        if self._check is not None:
            self._check(*arguments)
        library = usable_library()
        if library is None:
            return self._without_kernels(*arguments)
        result = self._fake(*arguments)
        try:
            self._kernel(LibraryCalls(library), result, *arguments)
        except Unsupported:
            return self._without_kernels(*arguments)
        if self._mutated:
            increment_version([arguments[index] for index in self._mutated])
        return result

    def _under_autograd(self, keyset: torch._C.DispatchKeySet, *arguments: Any) -> R:
        """The dispatcher's entry if a tensor may require a gradient; without this the result would have none."""
        if torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in arguments):
            return self._differentiable(*arguments)
        if forward_ad._current_level >= 0:
            return self._transformed(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            below: R = self._registered.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)
            return below

    def _differentiable(self, *arguments: Any) -> R:
        """The result, in the graph of reverse mode."""
        if self._instead is not None:
            self._refuse(*arguments)
        if torch.compiler.is_compiling() or forward_ad._current_level >= 0 or is_transformed():
            return self.definition(*arguments)
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        has_kernel = usable_library() is not None and all(each.device.type == "cpu" for each in tensors)
        if not (has_kernel or self._lean) or any(type(each) not in _PLAIN for each in tensors):
            return self.definition(*arguments)
        result: R = _Differentiable.apply(self, *arguments)  # type: ignore[no-untyped-call]
        return result

    def without_graph(self, *arguments: Any) -> R:
        """The result of plain tensors in a mode that records no graph."""
        if all(each.device.type == "cpu" for each in arguments if isinstance(each, Tensor)):
            return self._on_cpu(*arguments)
        return self.definition(*arguments)

    def gradients(self, backward: "Backward", *arguments: Any) -> "Gradients":
        """The gradient of each argument, by `gradient` or by the definition. A backward pass that is itself
        differentiated uses the definition."""
        if self._gradient is None or torch.is_grad_enabled():
            return backward.of(self.definition, *arguments)
        return self._gradient(backward, *arguments)

    def _transformed(self, *arguments: Any) -> R:
        """Within `torch.func` and forward-mode AD, where a tensor may have no memory that a kernel could read."""
        if self._instead is not None and is_followed(*arguments):
            self._refuse(*arguments)
        return self.definition(*arguments)

    def _refuse(self, *arguments: Any) -> R:
        followed = [name for name, each in zip(self._names, arguments, strict=True) if is_followed(each)]
        raise RequestError(
            f"{self.name} has no gradient, but autograd follows {' and '.join(followed)}: call it under "
            f"torch.no_grad(), or {self._instead}"
        )


Gradients = Sequence[Tensor | None]


class Backward(NamedTuple):
    """A backward pass through one call of an op.

    grads: the gradient of each result; None for one that has none. needs: whether each argument needs one.
    """

    grads: Gradients
    needs: Sequence[bool]

    @property
    def grad(self) -> Tensor:
        """The gradient of the only result."""
        (grad,) = self.grads
        assert grad is not None, "autograd passes no node whose result has no gradient"
        return grad

    def of(self, function: Callable[..., Any], *arguments: Any) -> Gradients:
        """The gradients of a function's arguments by torch, which runs it again."""
        again = torch.is_grad_enabled()  # the backward pass is differentiated too
        with torch.enable_grad():
            inputs = [
                each if not need else each.view_as(each) if again else each.detach().requires_grad_()
                for each, need in zip(arguments, self.needs, strict=True)
            ]
            results = function(*inputs)
            pairs = zip((results,) if isinstance(results, Tensor) else results, self.grads, strict=True)
            outputs, grads = zip(*((result, grad) for result, grad in pairs if grad is not None), strict=True)
            differentiated = [each for each, need in zip(inputs, self.needs, strict=True) if need]
            found = iter(torch.autograd.grad(outputs, differentiated, grads, create_graph=again, allow_unused=True))
        return [next(found) if need else None for need in self.needs]


Gradient = Callable[..., Gradients]


class _Differentiable(torch.autograd.Function):
    """A call of an op in the graph of reverse mode."""

    @staticmethod
    def forward(ctx: Any, op: Operator[Any], *arguments: Any) -> Any:
        result = op.without_graph(*arguments)
        ctx.op = op
        ctx.constants = [None if isinstance(each, Tensor) else each for each in arguments]
        ctx.is_tensor = [isinstance(each, Tensor) for each in arguments]
        ctx.save_for_backward(*(each for each in arguments if isinstance(each, Tensor)))
        ctx.set_materialize_grads(False)
        results = (result,) if isinstance(result, Tensor) else result
        ctx.mark_non_differentiable(*(each for each in results if not each.is_floating_point()))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved = iter(ctx.saved_tensors)
        arguments = [
            next(saved) if is_tensor else constant
            for is_tensor, constant in zip(ctx.is_tensor, ctx.constants, strict=True)
        ]
        needs = ctx.needs_input_grad[1:]
        if all(grad is None for grad in grads):
            return (None,) * (1 + len(needs))
        device = next(each for each in arguments if isinstance(each, Tensor))
        with no_autocast(device) if _any_is_on() else nullcontext():
            found = ctx.op.gradients(Backward(grads, needs), *arguments)
        return (None, *found, *(None,) * (len(needs) - len(found)))


def is_followed(*arguments: Any) -> bool:
    """Whether autograd follows one of the arguments, in reverse or in forward mode, also through `torch.func`."""
    return any(isinstance(each, Tensor) and _is_tensor_followed(each) for each in arguments)


def _is_tensor_followed(tensor: Tensor) -> bool:
    """Whether autograd follows a tensor, or one that the transforms of `torch.func` have wrapped in it: within
    `grad(vmap(f))`, f sees a batched tensor, which itself never requires a gradient."""
    reverse, forward = torch.is_grad_enabled(), forward_ad._current_level >= 0
    while not (reverse and tensor.requires_grad):
        if torch.compiler.is_compiling():
            return forward and _has_tangent(tensor)
        if forward and not _functorch.is_batchedtensor(tensor) and _has_tangent(tensor):
            return True
        if not _functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = _functorch.get_unwrapped(tensor)
    return True


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def may_be_followed(*arguments: Any) -> bool:
    """`is_followed`, or a transform of `torch.func` runs, which may hide that an outer one follows an argument."""
    return is_followed(*arguments) or (not torch.compiler.is_compiling() and is_transformed())


def check_no_gradient(action: str, instead: str, *arguments: Any) -> None:
    """Raise if autograd follows an argument of an action, no op, without a gradient. instead: as in `Operator`."""
    if is_followed(*arguments):
        raise RequestError(
            f"{action} has no gradient, but autograd follows its input: call it under torch.no_grad(), or {instead}"
        )


def like_first(x: Tensor, *_: object) -> Tensor:
    """The fake of an op whose result has the shape and dtype of its first argument, and is contiguous."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def returns_nothing(*_: object) -> None:
    """The fake of an op that writes to its arguments only."""


_library = torch.library.Library("onward", "FRAGMENT")  # type: ignore[no-untyped-call]


def shapes(**tensors: Tensor | None) -> str:
    """Each tensor's name, dtype and shape, for messages."""
    return ", ".join(f"{name} {t.dtype} {list(t.shape)}" for name, t in tensors.items() if t is not None)


_any_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast computes products on x's device; None if autocast is off."""
    return autocast_dtype_on(x.device.type) if _any_is_on() else None


def autocast_dtype_on(device: str) -> torch.dtype | None:
    """The dtype in which autocast computes products on this type of device; None if autocast is off."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def autocast_to(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    """The tensors in the autocast dtype, except None, float64 and integers."""
    return [t if t is None or not _is_cast(t) else t.to(dtype) for t in tensors]


def to_widest_dtype(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the widest of their dtypes."""
    widest = tensors[0].dtype
    for tensor in tensors[1:]:
        widest = torch.promote_types(widest, tensor.dtype)
    return [tensor.to(widest) for tensor in tensors]


def autocast_norm(op: Callable[..., Tensor], x: Tensor, *weights: Tensor) -> Tensor:
    """op(x, weight, …), a norm, as autocast computes it; the tensors may differ in dtype."""
    on_cpu = x.device.type == "cpu"
    if not all(map(_is_cast, (x, *weights))) or (on_cpu and all(tensor.dtype == x.dtype for tensor in weights)):
        return op(x, *weights)
    out = op(*(tensor.to(torch.float32) for tensor in (x, *weights)))
    return out.to(x.dtype) if on_cpu else out


def no_autocast(x: Tensor) -> torch.autocast:
    """A context without autocast on x's device, so that cast tensors are not cast again."""
    return torch.autocast(x.device.type, enabled=False)


def _is_cast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64
