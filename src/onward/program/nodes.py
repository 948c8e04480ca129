"""Traces: operators in order, on arrays."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from onward.program.arrays import Array, Kind, Storage

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
