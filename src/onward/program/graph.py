"""The graph of a traced forward: nodes over arrays, arrays over storages, and the resulting kernel calls.

An `Array` is a view of a `Storage`, which has no address yet. `Uses` lists the nodes that write and read each storage;
`PackedParams` caches packed copies of frozen params, shared by all programs of a forward.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from onward.ops import NativeWeight
from onward.ops.packed import pack_native


class Kind(Enum):
    """The owner of a storage's memory."""

    TOKENS = "tokens"
    OFFSETS = "offsets"
    LOGITS_AT = "logits_at"
    CACHE = "cache"
    PARAM = "param"
    CONSTANT = "constant"  # tensors that the forward makes from numbers alone
    LOGITS = "logits"
    TAP = "tap"
    TEMPORARY = "temporary"  # operator results


@dataclass(eq=False)
class Storage:
    """A contiguous region of memory.

    index: its index among the trace's storages. nbytes: its size for the traced shapes. constant: the tensor of a
    constant. param: the tensor of a param, owned by the program's caller. layout: the param's shape, strides and dtype.
    """

    index: int
    kind: Kind
    nbytes: int
    name: str = ""
    constant: Tensor | None = None
    param: "weakref.ref[Tensor] | None" = None
    layout: tuple[object, ...] = ()

    def refer_to(self, param: Tensor) -> None:
        """Use the memory of a param, without keeping the param alive."""
        self.param = weakref.ref(param)
        self.layout = param.shape, param.stride(), param.dtype

    @property
    def tensor(self) -> Tensor | None:
        """The tensor that owns the memory of a param or constant, which is the same in every run."""
        return self.constant if self.param is None else self.param()


@dataclass(frozen=True)
class Array:
    """A strided view of a storage, in elements of its dtype."""

    storage: Storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def stride(self) -> tuple[int, ...]:
        return self.strides

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def is_contiguous(self) -> bool:
        """Whether its elements are contiguous in order. Strides of dimensions of size 1 are ignored."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def reshaped(self, shape: Sequence[int]) -> "Array":
        """A contiguous array of another shape at the same place."""
        return replace(self, shape=tuple(shape), strides=contiguous_strides(shape))

    def narrowed(self, start: int, length: int) -> "Array":
        """The view [..., start : start + length]."""
        shape = (*self.shape[:-1], length)
        return replace(self, shape=shape, offset=self.offset + start * self.strides[-1])

    def permuted(self, order: Sequence[int]) -> "Array":
        return replace(self, shape=tuple(self.shape[i] for i in order), strides=tuple(self.strides[i] for i in order))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


T = TypeVar("T")
Forward = Callable[..., tuple[Tensor, Any]]
Infer = Callable[..., Tensor]  # an operator on meta tensors: computes the shape, dtype and strides of its result


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


# Leaf types, checked first: a trace walks tens of thousands of arguments, most of them of these types.
PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))


def instances(kind: type[T], value: Any) -> list[T]:
    """The instances of `kind` in an operator's arguments or results, nested in lists, tuples and dicts."""
    items: list[T] = []
    _collect(kind, value, items)
    return items


def _collect(kind: type[T], value: Any, items: list[T]) -> None:
    if isinstance(value, kind):
        items.append(value)
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            if type(item) not in PLAIN:
                _collect(kind, item, items)


@dataclass(eq=False)
class Node:
    """One operator call. Tensors among args and kwargs are `Array`s.

    outputs: its results. writes: inputs that it changes in place. where: "file:line in function" of the user's code.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Array, ...]
    writes: tuple[Array, ...]
    where: str

    def replaced_by(self, op: OpOverload, *args: Any, outputs: tuple[Array, ...] | None = None) -> "Node":
        """The call of another functional operator with the same outputs, in place of this node."""
        return Node(op, args, {}, self.outputs if outputs is None else outputs, (), self.where)

    @property
    def name(self) -> str:
        return str(self.op).removesuffix(".default")

    @cached_property
    def reads(self) -> list[Array]:
        return instances(Array, (self.args, self.kwargs))


@dataclass(eq=False)
class Trace:
    """A forward's nodes in order, all storages, and the forward's input and output arrays.

    taps: the values at the taps that are read, by name.
    cache, returned_cache: an array for each tensor of the input cache and of the returned cache.
    """

    nodes: list[Node] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    inputs: dict[Kind, Array] = field(default_factory=dict)
    logits: Array | None = None
    taps: dict[str, Array] = field(default_factory=dict)
    cache: list[Array] = field(default_factory=list)
    returned_cache: list[Array] = field(default_factory=list)

    def new_storage(self, kind: Kind, nbytes: int, name: str = "", constant: Tensor | None = None) -> Storage:
        storage = Storage(len(self.storages), kind, nbytes, name, constant)
        self.storages.append(storage)
        return storage

    def temporary(self, shape: Sequence[int], dtype: torch.dtype) -> Array:
        """A new contiguous array in the program's own memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        return Array(self.new_storage(Kind.TEMPORARY, nbytes), dtype, tuple(shape), contiguous_strides(shape), 0)


class Address(NamedTuple):
    """A byte of a storage."""

    storage: Storage
    offset: int = 0


def address(array: Array) -> Address:
    """The address of an array's first element."""
    return Address(array.storage, array.offset * array.dtype.itemsize)


# An argument of a kernel: a number, an address, a list of integers, or a list of structures (each a mapping of field to
# argument). Lists are stored in the program's image; the kernel receives their address.
Argument = int | float | Address | None | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(eq=False)
class KernelCall:
    """A call of the native library. node: its operator, for error messages and `explain`."""

    kernel: str
    args: tuple[Argument, ...]
    node: Node

    def storages(self) -> list[Storage]:
        return [address.storage for address in instances(Address, self.args)]


@dataclass(eq=False)
class TorchCall:
    """An operator without a kernel, run by torch on tensors over the program's memory. why: the missing feature."""

    node: Node
    why: str

    def storages(self) -> list[Storage]:
        return [array.storage for array in (*self.node.reads, *self.node.outputs)]


ProgramCall = KernelCall | TorchCall


class PackedParams:
    """Packed copies of params, by the memory of the original matrices. They live as long as this object."""

    def __init__(self) -> None:
        self._packed: dict[tuple[object, ...], NativeWeight] = {}

    def of(self, weight: Array) -> NativeWeight | None:
        """The packed copy of a matrix [N, K] among the params; None if no packed layout supports it."""
        tensor = weight.storage.tensor
        if tensor is None or tensor.device.type != "cpu":
            return None
        key = (tensor.data_ptr(), weight.dtype, weight.shape, weight.strides, weight.offset)
        if key not in self._packed:
            offset = tensor.storage_offset() + weight.offset
            packed = pack_native(tensor.detach().as_strided(weight.shape, weight.strides, offset))
            if packed is None:
                return None
            self._packed[key] = packed
        return self._packed[key]


class Uses:
    """The nodes that write and read each storage."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._writers: dict[Storage, list[Node]] = defaultdict(list)
        self._readers: dict[Storage, list[Node]] = defaultdict(list)
        for node in nodes:
            for array in (*node.outputs, *node.writes):
                self._writers[array.storage].append(node)
            for storage in {array.storage for array in node.reads}:
                self._readers[storage].append(node)

    def constant(self, array: Array) -> bool:
        """Whether no node changes the array's storage after its creation."""
        return len(self._writers[array.storage]) <= (array.storage.kind is Kind.TEMPORARY)

    def only_for(self, array: Array, reader: Node) -> Node | None:
        """The node that produced a temporary, if `reader` is its only reader."""
        writers, readers = self._writers[array.storage], self._readers[array.storage]
        return writers[0] if len(writers) == 1 and readers == [reader] and writers[0].outputs else None
