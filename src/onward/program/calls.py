"""Kernel calls over storages that have no address yet."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from onward.program.arrays import Array, Storage
from onward.program.nodes import Node


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


Call = KernelCall | TorchCall


def _collect_storages(args: Iterable[Any], found: list[Storage]) -> None:
    for argument in args:
        if isinstance(argument, Address):
            found.append(argument.storage)
        elif isinstance(argument, dict):
            _collect_storages(argument.values(), found)
        elif isinstance(argument, (list, tuple)):
            _collect_storages(argument, found)
