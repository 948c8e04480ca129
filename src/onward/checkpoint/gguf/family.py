"""What a line of the table of GGUF's architectures says (`onward.checkpoint.gguf.families`).

Each part says a thing in both directions: how a file is read, and how it is written.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Makes fields of config.json out of (the metadata behind "{architecture}.", the fields that were read already).
Fields = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
# Makes keys behind "{architecture}." out of a config.json; None: the file does not have this key.
Exported = Callable[[Mapping[str, Any]], Mapping[str, Any]]


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
    stored; by default the rows of one lie below those of another. cut: (the weight, the fields of config.json) -> the
    tensors; by default equal numbers of rows."""

    tensors: tuple[str, ...]
    by: Callable[[list[Tensor]], Tensor] = torch.cat
    cut: Callable[[Tensor, Mapping[str, Any]], Sequence[Tensor]] = lambda whole, config: whole.chunk(2)


class Change(NamedTuple):
    """What the converter computes of some weights, in float32. of: whether it does of the one of this stock name.
    write: what it computes. read: undoes it. what: what the file has then, in an error. bound: how far what is read may
    be from the weight, each number of it; None: it is the same in the weight's own dtype."""

    of: Callable[[str], bool]
    write: Callable[[Tensor], Tensor]
    read: Callable[[Tensor], Tensor]
    what: str
    bound: Callable[[Tensor], Tensor] | None = None


class Said(NamedTuple):
    """What metadata say in a way of their family's own. read: see `Fields`. write: see `Exported`."""

    read: Fields = lambda metadata, config: {}
    write: Exported = lambda config: {}


class GgufFamily(NamedTuple):
    """architecture: the one of config.json. order: of weights that the converter reordered. shape: (a stock name, the
    fields of config.json, the stock shape) -> the tensor's, which a reader need not know. config: fields that files
    leave unsaid. fixed: keys that `numbers` and `said` do not read, and the one value that they may have. parts: fields
    that say whether there are biases or norms, and how the tensors end that are there then, or what says so of the
    names of all. names, numbers: lines of `WHOLE`, `LAYER` and `NUMBERS` of its own; None: a field that `said` has.
    changes: of weights of which the converter computed others. said: see `Said`."""

    architecture: str
    order: Orders = lambda name, config, rows: Order()
    shape: Callable[[str, Mapping[str, Any], tuple[int, ...]], tuple[int, ...]] = lambda name, config, shape: shape
    config: Mapping[str, object] = {}
    fixed: Mapping[str, object] = {}
    parts: Mapping[str, str | Callable[[Collection[str]], bool]] = {}
    names: Mapping[str, str | Joined] = {}
    numbers: Mapping[str, str | None] = {}
    changes: Sequence[Change] = ()
    said: Said = Said()

    def stock_values(self, name: str, values: Tensor) -> Tensor:
        """The stock checkpoint's floats of what the file has."""
        for change in self.changes:
            values = change.read(values.to(torch.float32)) if change.of(name) else values
        return values
