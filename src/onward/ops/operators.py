"""How an op is registered and which of its forms runs.

An op has a definition, in plain torch for every device, and usually a kernel in the native library. Both are
registered under `torch.ops.onward`, so that the op is one node in `torch.compile`, `make_fx` and programs. An eager
call on plain CPU tensors enters the kernel directly: the dispatcher takes as long as a small kernel. Where an argument
requires a gradient the definition runs, and torch differentiates it. Where the fastest plain torch is hard to read, a
function `reference` in the op's file is the same written out.
"""

import os
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import Parameter

from onward import native
from onward.errors import RequestError

DTYPES = {torch.float32: native.DType.F32, torch.bfloat16: native.DType.BF16, torch.float16: native.DType.F16}
_FORMS = ("native", "definition")
_PLAIN = (Tensor, Parameter)

# The shape and dtype of each op's result. A trace calls these: through the dispatcher they take five times as long.
FAKES: dict[OpOverload, Callable[..., Any]] = {}

R = TypeVar("R")  # what an op returns: a tensor, in nearly all cases


class Choice(NamedTuple):
    """Which form of the ops runs on the CPU: "native" (and the instruction set of its library) or "definition"."""

    form: str
    isa: str


_forced: str | None = None


def choice() -> Choice:
    """The form that runs now. At start ONWARD_OPS (native, definition) and ONWARD_ISA (an instruction set, or none)
    decide it."""
    return Choice("definition", "none") if usable_library() is None else Choice("native", native.isa())


def choose(form: str) -> Choice:
    """Use one form from now on: "definition", "native" (the best library), or the library of an instruction set.

    Raises:
        RequestError: an unknown form. NativeUnavailableError: no such library, or the processor cannot run it.
    """
    global _forced
    if form not in (*_FORMS, *native.ISAS):
        raise RequestError(f"a form of the ops is {', '.join((*_FORMS, *native.ISAS))}; got {form!r}")
    if form != "definition":
        native.select_isa("auto" if form == "native" else form)
        if native.library() is None:
            raise native.NativeUnavailableError("no native library was built: install onward where there is a compiler")
    _forced = "definition" if form == "definition" else "native"
    return choice()


def usable_library() -> native.Library | None:
    """The library whose kernels run, or None where definitions do."""
    global _forced
    if _forced is None:
        _forced = os.environ.get("ONWARD_OPS", "native")
        if _forced not in _FORMS:
            value, _forced = _forced, None
            raise RequestError(f"ONWARD_OPS must be one of {', '.join(_FORMS)}; got {value!r}")
    return None if _forced == "definition" else native.library()


class Operator(Generic[R]):
    """An op under `torch.ops.onward`; called with the arguments of its schema, all by position.

    definition: plain torch, which reads no tensor's value on the host: a GPU would wait for it, and a CUDA graph could
    not be captured. kernel: the native form, which takes the library, then the same arguments, and may assume plain
    tensors on the CPU. fake: gives the result's shape and dtype. without_kernels: what runs on the CPU where there is
    no library, and no gradient is wanted; it may read values, to do less than the definition.
    """

    def __init__(
        self,
        schema: str,
        definition: Callable[..., R],
        kernel: Callable[..., R],
        fake: Callable[..., R],
        without_kernels: Callable[..., R] | None = None,
    ) -> None:
        self.definition = definition
        self._kernel = kernel
        self._without_kernels = without_kernels or definition
        name = schema[: schema.index("(")]
        _library.define(schema)  # type: ignore[no-untyped-call]
        _library.impl(name, definition, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        _library.impl(name, self._on_cpu, "CPU")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"onward::{name}", fake, lib=_library)
        self._registered: Callable[..., R] = getattr(torch.ops.onward, name).default
        FAKES[getattr(torch.ops.onward, name).default] = fake

    def __call__(self, *arguments: Any) -> R:
        plain = not torch.compiler.is_compiling()
        grad = torch.is_grad_enabled()
        for argument in arguments:
            if isinstance(argument, Tensor):
                if grad and argument.requires_grad:
                    return self.definition(*arguments)
                plain = plain and type(argument) in _PLAIN and argument.device.type == "cpu"
        return self._on_cpu(*arguments) if plain else self._registered(*arguments)

    def _on_cpu(self, *arguments: Any) -> R:
        library = usable_library()
        return self._without_kernels(*arguments) if library is None else self._kernel(library, *arguments)


def define_in_place(schema: str, definition: Callable[..., None], on_cpu: Callable[..., None]) -> None:
    """Register an op that changes its arguments and returns nothing, with its form for the CPU."""
    name = schema[: schema.index("(")]
    _library.define(schema)  # type: ignore[no-untyped-call]
    _library.impl(name, definition, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _library.impl(name, on_cpu, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"onward::{name}", _returns_nothing, lib=_library)
    FAKES[getattr(torch.ops.onward, name).default] = _returns_nothing


def like_first(x: Tensor, *_: object) -> Tensor:
    """The fake of an op whose result has the shape and dtype of its first argument, and is contiguous."""
    return x.new_empty(x.shape)


def _returns_nothing(*_: Any) -> None:
    return None


_library = torch.library.Library("onward", "FRAGMENT")  # type: ignore[no-untyped-call]


def shapes(**tensors: Tensor | None) -> str:
    """Each tensor's name, dtype and shape, for messages."""
    return ", ".join(f"{name} {t.dtype} {list(t.shape)}" for name, t in tensors.items() if t is not None)
