"""A forward run once on tensors without memory: the list of what it does.

The tensors it is given know their shapes, dtypes and strides and nothing else (`torch`'s meta device computes
those), so a trace costs milliseconds, no arithmetic, and shows every place where a forward would depend on a
value. What the forward makes of numbers alone (an `arange`, a mask) is computed for real, once, and kept.

Operators come as the user wrote them (linear, softmax, scaled_dot_product_attention, …), not decomposed: that is
what a dispatch mode sees in torch's inference mode. Views need no operator: an `Array` says where its elements lie.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from onward.errors import OnwardError, ProgramError, one_line
from onward.program.arrays import Array, Kind, Storage

aten = torch.ops.aten

Infer = Callable[..., Tensor]


@dataclass(eq=False)
class Node:
    """One operator call. Tensors among args and kwargs are `Array`s.

    outputs: what it makes. writes: the inputs it changes in place. where: "file:line in function" of the user's code.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Array, ...]
    writes: tuple[Array, ...]
    where: str

    @property
    def name(self) -> str:
        return str(self.op).removesuffix(".default")

    def reads(self) -> Iterator[Array]:
        yield from (leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Array))


@dataclass(eq=False)
class Trace:
    """nodes in order; every storage; the result, and where each leaf of the returned cache lies."""

    nodes: list[Node] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    inputs: dict[Kind, Array] = field(default_factory=dict)
    logits: Array | None = None
    cache: list[Array] = field(default_factory=list)
    returned_cache: list[Array] = field(default_factory=list)


# Operators whose result depends on values: their meta forms raise, or would lie.
_READS_VALUES = {
    aten.item.default,
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.allclose.default,
    aten.nonzero.default,
    aten.nonzero_numpy.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
}
_PACKAGE = Path(__file__).parent.parent
# Frames that are never the line a message is about. The built-in families' lines are.
_NOT_THE_FORWARD = (
    str(Path(torch.__file__).parent),
    *(str(_PACKAGE / part) for part in ("ops", "program", "cache")),
    "<",
)


class TraceError(ProgramError):
    """A forward that cannot be traced: it is not shape-stable, or not a function of its arguments."""


class Traced(Tensor):
    """A tensor without memory that says it is on the CPU; `meta` is the same on the meta device."""

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
            f"{func} was called on a tensor of a forward that has been traced: a forward must not keep its tensors"
        )


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, operators on `Traced` tensors are listed instead of run.

    whole: says which composite operators to list as they are; others are taken apart by torch.
    infer: what gives the result of an operator on meta tensors faster than torch does.
    """

    def __init__(self, whole: Callable[[OpOverload], bool], infer: Mapping[OpOverload, Infer]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._whole = whole
        self._infer = infer
        self._storages: dict[int, Storage] = {}  # by the address of torch's own storage
        self._kept: list[Tensor] = []  # while they live, no other storage takes their address
        self._constants: dict[int, Tensor] = {}  # real tensors that the forward made, by id
        self._stand_ins: dict[int, Tensor] = {}  # their meta tensors, by the address of their storage

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import its compiler (a second) to keep it away from this mode, and nothing here is compiled.
        return False

    # ── inputs ────────────────────────────────────────────────────────────────────────────────────────────

    def stand_for(self, tensor: Tensor, kind: Kind, name: str) -> Traced:
        """An input of the forward, with the shape and strides of `tensor`."""
        return self.declare(tensor.shape, tensor.stride(), tensor.dtype, kind, name, tensor)

    def declare(
        self,
        shape: Sequence[int],
        strides: Sequence[int] | None,
        dtype: torch.dtype,
        kind: Kind,
        name: str,
        tensor: Tensor | None = None,
    ) -> Traced:
        if strides is None:
            meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
        else:
            meta = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")
        self._add_storage(meta, kind, tensor, name)
        return Traced(meta)

    def array(self, tensor: Tensor) -> Array:
        """Where a traced tensor, or a constant, lies."""
        meta = self._meta_of(tensor)
        storage = self._storages[meta.untyped_storage()._cdata]
        return Array(storage, meta.dtype, tuple(meta.shape), tuple(meta.stride()), int(meta.storage_offset()))

    # ── operators ─────────────────────────────────────────────────────────────────────────────────────────

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func is aten.lift_fresh.default:  # torch.tensor(…): a constant is born
            return self._constant(args[0])
        if not any(isinstance(t, Traced) or self._promoted(t) for t in tensors):
            return self._compute(func, args, kwargs, tensors)
        self._refuse_strangers(func, tensors)
        if func in _READS_VALUES:
            raise TraceError(
                f"the forward reads the value of a tensor ({_plain_name(func)}) at {_users_line()}: shapes and control "
                "flow must not depend on values; keep the value in tensors, or do not compile this forward"
            )
        metas = [self._meta_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return self._record(func, leaves, metas, spec)

    def _compute(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        self._refuse_strangers(func, tensors)
        made = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._constant(tensor)
        return made

    def _record(self, func: OpOverload, leaves: list[Any], metas: list[Any], spec: pytree.TreeSpec) -> Any:
        written = _written(func, leaves, spec)
        if written:
            for leaf in written:
                self._promote(leaf)
            metas = [self._meta_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        elif func._can_decompose() and not self._whole(func) and not _is_view(func):
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            with self:
                return func.decompose(*args, **kwargs)
        args, kwargs = pytree.tree_unflatten(metas, spec)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        infer: Infer = self._infer.get(func, func)
        made, out_spec = pytree.tree_flatten(infer(*args, **kwargs))
        before = {id(meta): leaf for meta, leaf in zip(metas, leaves, strict=True) if isinstance(leaf, Tensor)}
        known = {meta.untyped_storage()._cdata for meta in metas if isinstance(meta, Tensor)}
        results = [
            before.get(id(meta)) if id(meta) in before else Traced(meta) if isinstance(meta, Tensor) else meta
            for meta in made
        ]
        new = [m for m in made if isinstance(m, Tensor) and m.untyped_storage()._cdata not in known]
        for meta in new:
            if meta.untyped_storage()._cdata not in self._storages:
                self._add_storage(meta, Kind.TEMPORARY, None, "")
        if new or written:
            arrays = [self.array(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            node_args, node_kwargs = pytree.tree_unflatten(arrays, spec)
            self.trace.nodes.append(
                Node(
                    func,
                    tuple(node_args),
                    node_kwargs,
                    tuple(self.array(r) for r in results if isinstance(r, Tensor)) if new else (),
                    tuple(self.array(leaf) for leaf in written),
                    _users_line(),
                )
            )
        return pytree.tree_unflatten(results, out_spec)

    # ── storages ──────────────────────────────────────────────────────────────────────────────────────────

    def _add_storage(self, meta: Tensor, kind: Kind, tensor: Tensor | None, name: str) -> None:
        storage = Storage(len(self.trace.storages), kind, meta.untyped_storage().nbytes(), tensor, name)
        self.trace.storages.append(storage)
        self._storages[meta.untyped_storage()._cdata] = storage
        self._kept.append(meta)

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
            self._add_storage(whole, Kind.CONSTANT, memory, "")
        whole = self._stand_ins[key]
        if whole.dtype != tensor.dtype:
            whole = whole.view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _promoted(self, tensor: Tensor) -> bool:
        """Whether it is a constant that traced values have been written into."""
        if isinstance(tensor, Traced):
            return True
        meta = self._stand_ins.get(tensor.untyped_storage()._cdata)
        return meta is not None and self._storages[meta.untyped_storage()._cdata].kind is Kind.TEMPORARY

    def _promote(self, tensor: Tensor) -> None:
        """Before a traced value is written into a constant it becomes memory of the program, with a copy's value."""
        if self._promoted(tensor):
            return
        now = self.array(tensor).storage
        assert now.tensor is not None
        elements = (now.tensor.numel(),)
        temporary = torch.empty(elements, dtype=now.tensor.dtype, device="meta")
        self._add_storage(temporary, Kind.TEMPORARY, None, "")
        self._stand_ins[tensor.untyped_storage()._cdata] = temporary
        to = Array(self.trace.storages[-1], now.tensor.dtype, elements, (1,), 0)
        source = replace(to, storage=now)
        self.trace.nodes.append(Node(aten.copy_.default, (to, source), {}, (), (to,), _users_line()))

    def _refuse_strangers(self, func: Any, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if not isinstance(tensor, Traced) and id(tensor) not in self._constants:
                raise TraceError(
                    f"the forward closes over a tensor ({tensor.dtype} {list(tensor.shape)}), used by "
                    f"{_plain_name(func)} at {_users_line()}: weights are an argument; pass it in params"
                )


def _is_view(func: OpOverload) -> bool:
    """reshape, flatten, … : they share memory where they can, which only trying shows."""
    return func in _MAYBE_VIEWS or func.is_view


_MAYBE_VIEWS = {
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.contiguous.default,
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    aten.expand_as.default,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.type_as.default,
    aten.ravel.default,
    aten.narrow.default,
    aten.chunk.default,
    aten.tensor_split.sections,
    aten.unflatten.int,
    aten.movedim.int,
    aten.swapaxes.default,
    aten.swapdims.default,
    aten.squeeze_copy.default,
    aten.numpy_T.default,
    aten.mT.default,
    aten.matrix_H.default,
    aten.adjoint.default,
    aten.atleast_2d.default,
}


def _written(func: OpOverload, leaves: list[Any], spec: pytree.TreeSpec) -> list[Tensor]:
    """The tensors that an in-place operator changes."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [given[name] for name in names if isinstance(given.get(name), Tensor)]


def _plain_name(func: Any) -> str:
    return str(func).removesuffix(".default")


def _users_line() -> str:
    """The innermost line of the traced forward that is neither torch's nor this package's operators'."""
    frame = sys._getframe(1)
    while frame.f_code is not _run.__code__ and frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_FORWARD):
            return f"{_short(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown line"


def _line_of(error: BaseException) -> str:
    """The innermost line of the forward in the traceback of an error."""
    found = "an unknown line"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith(_NOT_THE_FORWARD):
            found = f"{_short(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"
    return found


def _short(file: str) -> str:
    path = Path(file)
    return str(Path(*path.parts[-2:]))


# ── the whole forward ─────────────────────────────────────────────────────────────────────────────────────────


def trace(
    forward: Callable[..., Any],
    params: Any,
    cache: Any,
    batch: int,
    tokens: int,
    logits_at: int | None = None,
    *,
    whole: Callable[[OpOverload], bool],
    infer: Mapping[OpOverload, Infer],
) -> Trace:
    """Run `forward` on tensors without memory.

    Args:
        forward: (tokens int32 [B, T], offsets int32 [B], cache, params) -> (logits [B, T, V], cache).
        params, cache: as they will be given; only their shapes, dtypes and strides matter.
        batch, tokens: B, T.
        logits_at: with N, the keyword `logits_at`, int64 [B, N], is given, and logits are [B, N, V].
        whole, infer: as of `Recorder`.

    Raises:
        TraceError: the forward reads values, closes over tensors, or returns something else than the contract says.
    """
    recorder = Recorder(whole, infer)
    with torch.inference_mode():
        given = {
            Kind.TOKENS: recorder.declare((batch, tokens), None, torch.int32, Kind.TOKENS, "tokens"),
            Kind.OFFSETS: recorder.declare((batch,), None, torch.int32, Kind.OFFSETS, "offsets"),
        }
        if logits_at is not None:
            given[Kind.LOGITS_AT] = recorder.declare((batch, logits_at), None, torch.int64, Kind.LOGITS_AT, "logits_at")
        traced_params = _stand_ins(recorder, params, Kind.PARAM)
        traced_cache = _stand_ins(recorder, cache, Kind.CACHE)
        with recorder:
            try:
                result = _run(forward, given, traced_cache, traced_params)
            except OnwardError:
                raise
            except Exception as error:
                raise TraceError(f"the forward cannot be traced: {one_line(error)} ({_line_of(error)})") from error
        made = recorder.trace
        made.inputs = {kind: recorder.array(tensor) for kind, tensor in given.items()}
        made.cache = [recorder.array(leaf) for leaf in pytree.tree_leaves(traced_cache) if isinstance(leaf, Tensor)]
        _check_result(result, traced_cache, (batch, tokens if logits_at is None else logits_at))
        made.logits = recorder.array(result[0])
        made.returned_cache = [
            recorder.array(leaf) for leaf in pytree.tree_leaves(result[1]) if isinstance(leaf, Tensor)
        ]
    return made


def _run(forward: Callable[..., Any], given: dict[Kind, Traced], cache: Any, params: Any) -> Any:
    options = {"logits_at": given[Kind.LOGITS_AT]} if Kind.LOGITS_AT in given else {}
    return forward(given[Kind.TOKENS], given[Kind.OFFSETS], cache, params, **options)


def _stand_ins(recorder: Recorder, tree: Any, kind: Kind) -> Any:
    paths, spec = pytree.tree_flatten_with_path(tree)
    leaves = [
        recorder.stand_for(leaf, kind, f"{kind.value}{pytree.keystr(path)}") if isinstance(leaf, Tensor) else leaf
        for path, leaf in paths
    ]
    return pytree.tree_unflatten(leaves, spec)


def _check_result(result: Any, cache: Any, wanted: tuple[int, int]) -> None:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
        raise TraceError(f"a forward must return (logits, cache); got {_described(result)}")
    logits, returned = result
    if logits.dim() != 3 or tuple(logits.shape[:2]) != wanted or not logits.is_floating_point():
        raise TraceError(f"a forward must return float logits {[*wanted, 'V']}; got {_described(logits)}")
    before, spec_before = pytree.tree_flatten(cache)
    after, spec_after = pytree.tree_flatten(returned)
    if spec_before != spec_after:
        raise TraceError(
            f"a forward must return the cache in the structure it was given; it was given {spec_before} and returned "
            f"{spec_after}"
        )
    for old, new in zip(before, after, strict=True):
        if _described(old) != _described(new):
            raise TraceError(
                f"a forward must return a cache of the shapes it was given: {_described(old)} became {_described(new)}"
            )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype} {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return repr(value) if isinstance(value, int | float | str | bool | None) else f"a {type(value).__name__}"
