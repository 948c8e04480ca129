"""Traces: operators in order, on arrays."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor
from torch._ops import OpOverload

from onward.program.arrays import Array, Kind, Storage

T = TypeVar("T")
Infer = Callable[..., Tensor]  # an operator on meta tensors: gives the shape, dtype and strides of its result


def instances(kind: type[T], value: Any) -> Iterator[T]:
    """The instances of `kind` in an operator's arguments or results: in lists, tuples and the dict of keywords."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from instances(kind, item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from instances(kind, item)


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

    def reads(self) -> Iterator[Array]:
        yield from instances(Array, (self.args, self.kwargs))


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
