"""What a line of the table of GGUF's architectures says (`onward.checkpoint.gguf.families`)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Makes fields of config.json out of (the metadata behind "{architecture}.", the fields that were read already).
Fields = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]


class Order(NamedTuple):
    """Where the stock rows and columns of a weight lie among the stored ones: int64 [N], int64 [K]; None: as stored.
    stored_rows: how many there are where the weight is only some of them."""

    rows: Tensor | None = None
    columns: Tensor | None = None
    stored_rows: int | None = None


# (a stock name, the fields of config.json, how many rows the weight has) -> its order.
Orders = Callable[[str, Mapping[str, Any], int], Order]


class Joined(NamedTuple):
    """A stock weight that the converter cuts into several tensors. by: puts their floats together, shaped as they are
    stored; by default the rows of one lie below those of another."""

    tensors: tuple[str, ...]
    by: Callable[[list[Tensor]], Tensor] = torch.cat


class Change(NamedTuple):
    """What the converter computes of some weights, in float32. of: whether it does of the one of this stock name.
    read: undoes it."""

    of: Callable[[str], bool]
    read: Callable[[Tensor], Tensor]


class GgufFamily(NamedTuple):
    """architecture: the one of config.json. order: of weights that the converter reordered. config: fields that files
    leave unsaid. fixed: keys that `numbers` and `said` do not read, and the one value that they may have. parts: fields
    that say whether there are biases or norms, and how the tensors end that are there then, or what says so of the
    names of all. names, numbers: lines of `WHOLE`, `LAYER` and `NUMBERS` of its own; None: a field that `said` has.
    changes: of weights of which the converter computed others. said: what metadata say in a way of the family's own."""

    architecture: str
    order: Orders = lambda name, config, rows: Order()
    config: Mapping[str, object] = {}
    fixed: Mapping[str, object] = {}
    parts: Mapping[str, str | Callable[[Collection[str]], bool]] = {}
    names: Mapping[str, str | Joined] = {}
    numbers: Mapping[str, str | None] = {}
    changes: Sequence[Change] = ()
    said: Fields = lambda metadata, config: {}

    def stock_values(self, name: str, values: Tensor) -> Tensor:
        """The stock checkpoint's floats of what the file has."""
        for change in self.changes:
            values = change.read(values.to(torch.float32)) if change.of(name) else values
        return values
