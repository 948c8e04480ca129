"""The graph of a traced forward: nodes over arrays, arrays over storages, and the kernel calls they become.

An `Array` is a view of a `Storage`, which has no address yet. `Uses` tells which nodes write and read each storage;
`PackedParams` keeps packed copies of params that will not change, made once for all programs of a forward.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from onward.ops import NativeWeight
from onward.ops.packed import pack_native


class Kind(Enum):
    """Where a storage's memory comes from."""

    TOKENS = "tokens"
    OFFSETS = "offsets"
    LOGITS_AT = "logits_at"
    CACHE = "cache"
    PARAM = "param"
    CONSTANT = "constant"  # tensors that the forward makes of numbers alone
    LOGITS = "logits"
    TEMPORARY = "temporary"  # results of operators


@dataclass(eq=False)
class Storage:
    """A run of memory.

    index: its place among the trace's storages. nbytes: its size for the traced shapes. constant: the tensor, for a
    constant. param: the tensor among params; the program's caller holds it. layout: its shape, strides and dtype.
    """

    index: int
    kind: Kind
    nbytes: int
    name: str = ""
    constant: Tensor | None = None
    param: "weakref.ref[Tensor] | None" = None
    layout: tuple[object, ...] = ()

    def refer_to(self, param: Tensor) -> None:
        """Make it the memory of a param, without keeping the param alive."""
        self.param = weakref.ref(param)
        self.layout = param.shape, param.stride(), param.dtype

    @property
    def tensor(self) -> Tensor | None:
        """The tensor that holds the memory, for params and constants: they are the same in every run."""
        return self.constant if self.param is None else self.param()


@dataclass(frozen=True)
class Array:
    """A strided view of a storage, in elements of its dtype."""

    storage: Storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def byte_offset(self) -> int:
        return self.offset * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie one after another in order. The stride of a dimension of size 1 does not count."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


T = TypeVar("T")
Infer = Callable[..., Tensor]  # an operator on meta tensors: gives the shape, dtype and strides of its result


# Arguments of these types hold no others. A trace looks at tens of thousands, most of them such.
PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))


def instances(kind: type[T], value: Any) -> list[T]:
    """The instances of `kind` in an operator's arguments or results: in lists, tuples and the dict of keywords."""
    found: list[T] = []
    _collect(kind, value, found)
    return found


def _collect(kind: type[T], value: Any, found: list[T]) -> None:
    if isinstance(value, kind):
        found.append(value)
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            if type(item) not in PLAIN:
                _collect(kind, item, found)


@dataclass(eq=False)
class Node:
    """One operator call. Tensors among args and kwargs are `Array`s.

    outputs: arrays that it makes. writes: inputs that it changes in place. where: "file:line in function" of the
    user's code.
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

    @cached_property
    def reads(self) -> list[Array]:
        return instances(Array, (self.args, self.kwargs))


@dataclass(eq=False)
class Trace:
    """A forward's nodes in order, all storages, and the arrays that it takes and returns.

    cache, returned_cache: an array for each tensor of the cache that was given and of the one that was returned.
    """

    nodes: list[Node] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    inputs: dict[Kind, Array] = field(default_factory=dict)
    logits: Array | None = None
    cache: list[Array] = field(default_factory=list)
    returned_cache: list[Array] = field(default_factory=list)


class Address(NamedTuple):
    """A byte of a storage."""

    storage: Storage
    offset: int = 0


def address(array: Array) -> Address:
    """Where an array's first element lies."""
    return Address(array.storage, array.byte_offset)


# An argument of a kernel: a number, an address, a list of integers, or a list of structures (each a mapping of field to
# argument). Lists lie in the program's own memory, and the kernel gets their address.
Argument = int | float | Address | None | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(eq=False)
class KernelCall:
    """A call of the native library. node: the operator it was made from, for messages and `explain`."""

    kernel: str
    args: tuple[Argument, ...]
    node: Node

    def storages(self) -> list[Storage]:
        found: list[Storage] = []
        _collect_storages(self.args, found)
        return found


@dataclass(eq=False)
class TorchCall:
    """An operator that has no kernel: torch runs it, on tensors over the program's memory. why: what is missing."""

    node: Node
    why: str

    def storages(self) -> list[Storage]:
        return [array.storage for array in (*self.node.reads, *self.node.outputs)]


ProgramCall = KernelCall | TorchCall


def _collect_storages(args: Iterable[Any], found: list[Storage]) -> None:
    for argument in args:
        if isinstance(argument, Address):
            found.append(argument.storage)
        elif isinstance(argument, dict):
            _collect_storages(argument.values(), found)
        elif isinstance(argument, (list, tuple)):
            _collect_storages(argument, found)


class PackedParams:
    """Packed copies by the memory of the stock matrices. They live as long as this does."""

    def __init__(self) -> None:
        self._packed: dict[tuple[object, ...], NativeWeight] = {}

    def of(self, weight: Array) -> NativeWeight | None:
        """The packed copy of a matrix [N, K] among the params; None where there is no layout for it."""
        tensor = weight.storage.tensor
        if tensor is None or tensor.device.type != "cpu":
            return None
        key = (tensor.data_ptr(), weight.dtype, weight.shape, weight.strides, weight.offset)
        if key not in self._packed:
            packed = pack_native(_matrix(tensor.detach(), weight))
            if packed is None:
                return None
            self._packed[key] = packed
        return self._packed[key]


def _matrix(tensor: Tensor, weight: Array) -> Tensor:
    return tensor.as_strided(weight.shape, weight.strides, tensor.storage_offset() + weight.offset)


class Uses:
    """The nodes that write and that read each storage."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._writers: dict[Storage, list[Node]] = defaultdict(list)
        self._readers: dict[Storage, list[Node]] = defaultdict(list)
        for node in nodes:
            for array in (*node.outputs, *node.writes):
                self._writers[array.storage].append(node)
            for storage in {array.storage for array in node.reads}:
                self._readers[storage].append(node)

    def constant(self, array: Array) -> bool:
        """Whether no node changes the array's storage after it was made."""
        return len(self._writers[array.storage]) <= (array.storage.kind is Kind.TEMPORARY)

    def only_for(self, array: Array, reader: Node) -> Node | None:
        """The node that made a temporary, if only `reader` reads it."""
        writers, readers = self._writers[array.storage], self._readers[array.storage]
        return writers[0] if len(writers) == 1 and readers == [reader] and writers[0].outputs else None
