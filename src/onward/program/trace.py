"""Run a forward once on tensors without memory, and record its operators, by a dispatch mode.

The forward runs on tensors with shapes, dtypes and strides but no values; torch's meta device computes these. So a
trace takes milliseconds, and any dependence of the forward on a value raises an error. Tensors that the forward makes
from numbers alone (an `arange`, a mask) are computed once and become constants.

Operators are recorded as the user wrote them (linear, softmax, scaled_dot_product_attention, …), not decomposed: that
is what a dispatch mode sees in torch's inference mode. Views need no operator: an `Array` locates their elements.
"""

import functools
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from onward.errors import OnwardError, ProgramError, one_line
from onward.ops.operator import FAKES, KERNELS
from onward.ops.tap import check_taps, reading
from onward.program.builder import INFER, RULES
from onward.program.graph import PLAIN, Array, Infer, Kind, Node, Storage, Trace, instances

_PACKAGE = Path(__file__).parent.parent
# Frames of these files are skipped; frames of the built-in model families, which are forwards too, are not.
_SKIPPED_FILES = (
    str(Path(torch.__file__).parent),
    *(str(_PACKAGE / part) for part in ("ops", "program", "cache")),
    "<",
)


class TraceError(ProgramError):
    """A forward that cannot be traced: it is not shape-stable, or not a function of its arguments."""


def run(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call the forward. `users_line` only looks at frames inside this call."""
    return forward(*arguments, **options)


def users_line() -> str:
    """The innermost line of the running forward that belongs neither to torch nor to this package's operators."""
    frame = sys._getframe(1)
    while frame.f_code is not run.__code__ and frame.f_back is not None:
        if file := _forward_file(frame.f_code.co_filename):
            return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown line"


def line_of(error: BaseException) -> str:
    """The innermost line of the forward in the traceback of an error."""
    innermost = "an unknown line"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if file := _forward_file(frame.f_code.co_filename):
            innermost = f"{file}:{line} in {frame.f_code.co_name}"
    return innermost


@functools.cache
def _forward_file(file: str) -> str:
    """A file's short name, or "" for a skipped file."""
    return "" if file.startswith(_SKIPPED_FILES) else str(Path(*Path(file).parts[-2:]))


aten = torch.ops.aten

# Operators whose results depend on values: their meta implementations raise, or return something wrong.
_READS_VALUES = {
    aten.item.default, aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default,
    aten.allclose.default, aten.nonzero.default, aten.nonzero_numpy.default, aten.masked_select.default,
    aten._unique2.default, aten.unique_dim.default,
}  # fmt: skip


class Traced(Tensor):
    """A CPU tensor without memory. `meta` is the same tensor on the meta device."""

    meta: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, meta: Tensor) -> "Traced":
        traced: Traced = Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=torch.device("cpu"),
        )
        traced.meta = meta
        return traced

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Traced({self.dtype}, {list(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TraceError(
            f"{func} was called on a tensor that a traced forward stored: a forward must not store its tensors"
        )


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, operators on `Traced` tensors are recorded instead of run. A composite operator is recorded
    as it is if there is a kernel or a rule for it; torch decomposes the others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._storages: dict[int, Storage] = {}  # by the address of torch's storage
        self._alive: list[Tensor] = []  # meta tensors, kept alive so that storage addresses are not reused
        self._constants: dict[int, Tensor] = {}  # real tensors that the forward made, by id
        self._stand_ins: dict[int, Tensor] = {}  # meta tensors of constants, by storage address

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler, which takes a second, to disable it in this mode. Nothing is compiled.
        return False

    # ── inputs ────────────────────────────────────────────────────────────────────────────────────────────

    def stand_in(self, tensor: Tensor, kind: Kind, name: str) -> Traced:
        """A stand-in for a param or a tensor of the cache, with the same shape and strides."""
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        storage = self._add_storage(meta, kind, name)
        if kind is Kind.PARAM:
            storage.refer_to(tensor)
        return Traced(meta)

    def input(self, shape: Sequence[int], dtype: torch.dtype, kind: Kind) -> Traced:
        meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._add_storage(meta, kind, kind.value)
        return Traced(meta)

    def array(self, tensor: Tensor) -> Array:
        """The array of a traced tensor or a constant."""
        meta = self._meta_of(tensor)
        storage = self._storages[meta.untyped_storage()._cdata]
        return Array(storage, meta.dtype, tuple(meta.shape), tuple(meta.stride()), int(meta.storage_offset()))

    # ── operators ─────────────────────────────────────────────────────────────────────────────────────────

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = instances(Tensor, (args, kwargs))
        if func is aten.lift_fresh.default:  # torch.tensor(…) makes a constant
            return self._constant(args[0])
        if not any(isinstance(t, Traced) or self._promoted(t) for t in tensors):
            return self._compute(func, args, kwargs, tensors)
        self._refuse_closed_over(func, tensors)
        if func in _READS_VALUES:
            raise TraceError(
                f"the forward reads the value of a tensor ({_plain_name(func)}) at {users_line()}: shapes and control "
                "flow must not depend on values; keep the value in tensors, or do not compile this forward"
            )
        return self._record(func, args, kwargs, tensors)

    def _compute(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        self._refuse_closed_over(func, tensors)
        result = func(*args, **kwargs)
        for tensor in instances(Tensor, result):
            self._constant(tensor)
        return result

    def _record(self, func: OpOverload, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        mutated = _mutated(func, args, kwargs)
        for tensor in mutated:
            self._promote(tensor)
        is_whole = func in KERNELS or func in RULES or func in _MAYBE_VIEWS or func.is_view
        if not mutated and not is_whole and func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        metas = {id(tensor): self._meta_of(tensor) for tensor in tensors}
        meta_args, meta_kwargs = _replaced((args, kwargs), lambda tensor: metas[id(tensor)])
        # Traced tensors claim to be on the CPU, so any device argument stands for the meta device.
        meta_args = tuple(torch.device("meta") if isinstance(arg, torch.device) else arg for arg in meta_args)
        if kwargs.get("device") is not None:
            meta_kwargs["device"] = torch.device("meta")
        infer: Infer = INFER.get(func) or FAKES.get(func, func)
        meta_results = infer(*meta_args, **meta_kwargs)
        # An in-place operator returns one of its operands.
        operands = {id(metas[id(tensor)]): tensor for tensor in tensors}
        known_storages = {meta.untyped_storage()._cdata for meta in metas.values()}
        results = _replaced(meta_results, lambda meta: operands[id(meta)] if id(meta) in operands else Traced(meta))
        new = [meta for meta in instances(Tensor, meta_results) if meta.untyped_storage()._cdata not in known_storages]
        for meta in new:
            if meta.untyped_storage()._cdata not in self._storages:
                self._add_storage(meta, Kind.TEMPORARY)
        if new or mutated:
            node_args, node_kwargs = _replaced((args, kwargs), self.array)
            outputs = tuple(map(self.array, instances(Tensor, results))) if new else ()
            writes = tuple(map(self.array, mutated))
            self.trace.nodes.append(Node(func, node_args, node_kwargs, outputs, writes, users_line()))
        return results

    # ── storages ──────────────────────────────────────────────────────────────────────────────────────────

    def _add_storage(self, meta: Tensor, kind: Kind, name: str = "", constant: Tensor | None = None) -> Storage:
        storage = self.trace.new_storage(kind, meta.untyped_storage().nbytes(), name, constant)
        self._storages[meta.untyped_storage()._cdata] = storage
        self._alive.append(meta)
        return storage

    def _constant(self, tensor: Tensor) -> Tensor:
        self._constants[id(tensor)] = tensor
        return tensor

    def _meta_of(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, Traced):
            return tensor.meta
        key = tensor.untyped_storage()._cdata
        if key not in self._stand_ins:
            elements = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
            whole = torch.empty(elements, dtype=tensor.dtype, device="meta")
            memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage(), 0, (elements,), (1,))
            self._stand_ins[key] = whole
            self._add_storage(whole, Kind.CONSTANT, constant=memory)
        whole = self._stand_ins[key]
        if whole.dtype != tensor.dtype:
            whole = whole.view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _promoted(self, tensor: Tensor) -> bool:
        """Whether a tensor is traced, or is a constant that traced values have been written to."""
        if isinstance(tensor, Traced):
            return True
        meta = self._stand_ins.get(tensor.untyped_storage()._cdata)
        return meta is not None and self._storages[meta.untyped_storage()._cdata].kind is Kind.TEMPORARY

    def _promote(self, tensor: Tensor) -> None:
        """Turn a constant into a temporary with the same value, before a traced value is written to it."""
        if self._promoted(tensor):
            return
        constant = self.array(tensor).storage
        assert constant.tensor is not None
        elements = (constant.tensor.numel(),)
        temporary = torch.empty(elements, dtype=constant.tensor.dtype, device="meta")
        storage = self._add_storage(temporary, Kind.TEMPORARY)
        self._stand_ins[tensor.untyped_storage()._cdata] = temporary
        to = Array(storage, constant.tensor.dtype, elements, (1,), 0)
        source = replace(to, storage=constant)
        self.trace.nodes.append(Node(aten.copy_.default, (to, source), {}, (), (to,), users_line()))

    def _refuse_closed_over(self, func: Any, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if not isinstance(tensor, Traced) and id(tensor) not in self._constants:
                raise TraceError(
                    f"the forward closes over a tensor ({tensor.dtype} {list(tensor.shape)}), used by "
                    f"{_plain_name(func)} at {users_line()}: weights are an argument; pass it in params"
                )


# Operators of which only a call shows whether the result is a view.
_MAYBE_VIEWS = {
    aten.reshape.default, aten.flatten.using_ints, aten.contiguous.default, aten.to.dtype, aten.to.device,
    aten.to.dtype_layout, aten.to.other, aten.expand_as.default, aten.view_as.default, aten.reshape_as.default,
    aten.type_as.default, aten.ravel.default, aten.narrow.default, aten.chunk.default, aten.tensor_split.sections,
    aten.unflatten.int, aten.movedim.int, aten.swapaxes.default, aten.swapdims.default, aten.squeeze_copy.default,
    aten.numpy_T.default, aten.mT.default, aten.matrix_H.default, aten.adjoint.default, aten.atleast_2d.default,
}  # fmt: skip


def _mutated(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an in-place operator changes."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    arguments = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [arguments[name] for name in names if isinstance(arguments.get(name), Tensor)]


def _replaced(value: Any, tensor: Callable[[Tensor], Any]) -> Any:
    """`value` with tensor(t) in place of each tensor t. (pytree's map takes three times as long.)"""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, list):
        return [_replaced(item, tensor) for item in value]
    if isinstance(value, tuple):
        return tuple([_replaced(item, tensor) for item in value])
    if isinstance(value, dict):
        return {name: _replaced(item, tensor) for name, item in value.items()}
    return value


def _plain_name(func: Any) -> str:
    return str(func).removesuffix(".default")


def trace(
    forward: Callable[..., Any],
    params: Any,
    cache: Any,
    batch: int,
    tokens: int,
    logits_at: tuple[int, int] | None = None,
    taps: tuple[str, ...] = (),
) -> Trace:
    """Run `forward` on tensors without memory.

    Args:
        forward: (tokens int32 [B, T], offsets int32 [B], cache, params) -> (logits [B, T, V], cache).
        params, cache: only their shapes, dtypes and strides matter.
        batch, tokens: B, T.
        logits_at: (R, N); the forward gets the keyword `logits_at`, int64 [R, N], and returns logits [R, N, V].
        taps: the taps to read (`onward.ops.tap`).

    Raises:
        TraceError: the forward reads values, closes over tensors, or breaks the contract of its return value.
    """
    recorder = Recorder()
    # Autocast is disabled because the program also serves calls outside of autocast.
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        inputs = {
            Kind.TOKENS: recorder.input((batch, tokens), torch.int32, Kind.TOKENS),
            Kind.OFFSETS: recorder.input((batch,), torch.int32, Kind.OFFSETS),
        }
        if logits_at is not None:
            inputs[Kind.LOGITS_AT] = recorder.input(logits_at, torch.int64, Kind.LOGITS_AT)
        options = {} if logits_at is None else {"logits_at": inputs[Kind.LOGITS_AT]}
        traced_params = _stand_ins(recorder, params, Kind.PARAM)
        traced_cache = _stand_ins(recorder, cache, Kind.CACHE)
        with recorder, reading(taps) as values:
            try:
                result = run(forward, inputs[Kind.TOKENS], inputs[Kind.OFFSETS], traced_cache, traced_params, **options)
            except TraceError:
                raise
            except ProgramError as error:
                raise TraceError(f"{error} ({line_of(error)})") from error
            except OnwardError:
                raise
            except Exception as error:
                raise TraceError(f"the forward cannot be traced: {one_line(error)} ({line_of(error)})") from error
        traced = recorder.trace
        traced.inputs = {kind: recorder.array(tensor) for kind, tensor in inputs.items()}
        traced.cache = _arrays(recorder, traced_cache)
        _check_result(result, traced_cache, (batch, tokens) if logits_at is None else logits_at)
        traced.logits = recorder.array(result[0])
        check_taps(values, taps, (batch, tokens))
        traced.taps = {name: recorder.array(values[name]) for name in taps}
        traced.returned_cache = _arrays(recorder, result[1])
    return traced


def _stand_ins(recorder: Recorder, tree: Any, kind: Kind) -> Any:
    return pytree.tree_map_with_path(
        lambda path, leaf: (
            recorder.stand_in(leaf, kind, f"{kind.value}{pytree.keystr(path)}") if isinstance(leaf, Tensor) else leaf
        ),
        tree,
    )


def _arrays(recorder: Recorder, tree: Any) -> list[Array]:
    return [recorder.array(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _check_result(result: Any, cache: Any, logits_shape: tuple[int, int]) -> None:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
        raise TraceError(f"a forward must return (logits, cache); got {_described(result)}")
    logits, returned = result
    if logits.dim() != 3 or tuple(logits.shape[:2]) != logits_shape or not logits.is_floating_point():
        raise TraceError(f"a forward must return float logits {[*logits_shape, 'V']}; got {_described(logits)}")
    before, spec_before = pytree.tree_flatten(cache)
    after, spec_after = pytree.tree_flatten(returned)
    if spec_before != spec_after:
        raise TraceError(
            f"a forward must return the cache with the structure of its input; it got {spec_before} and returned "
            f"{spec_after}"
        )
    for old, new in zip(before, after, strict=True):
        if _described(old) != _described(new):
            raise TraceError(
                f"a forward must return a cache with its input's shapes: {_described(old)} became {_described(new)}"
            )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype} {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return repr(value) if isinstance(value, int | float | str | bool | None) else f"a {type(value).__name__}"
