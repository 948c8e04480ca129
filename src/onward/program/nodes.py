"""What a trace consists of: operators in order, on arrays."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch._ops import OpOverload

from onward.program.arrays import Array, Kind, Storage

T = TypeVar("T")


def found(kind: type[T], value: Any) -> Iterator[T]:
    """The instances of `kind` in what operators take and return: lists, tuples, and a dict of keywords."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from found(kind, item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from found(kind, item)


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
        yield from found(Array, (self.args, self.kwargs))


@dataclass(eq=False)
class Trace:
    """nodes in order; every storage; the result, and where each leaf of the returned cache lies."""

    nodes: list[Node] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    inputs: dict[Kind, Array] = field(default_factory=dict)
    logits: Array | None = None
    cache: list[Array] = field(default_factory=list)
    returned_cache: list[Array] = field(default_factory=list)
