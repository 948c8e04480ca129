"""A rank other than 0: it holds its part of the weights and of the caches, and does what rank 0 tells it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from onward.cache import KVPool, LayerShape, Slot
from onward.distributed.group import Tables, empty_like_row
from onward.distributed.links import Forward, Kind, Links
from onward.distributed.stage import rows_of_table
from onward.models import ModelRun


class RankWorker:
    """The loop of a rank.

    run: its part of the model, over a table of hidden states. shapes: what its layers cache. width: the most blocks of
    a text. to: the rank that its hidden states go to.
    """

    def __init__(
        self, links: Links, run: ModelRun, hidden: Tensor, shapes: Sequence[LayerShape], width: int, to: int
    ) -> None:
        self._links, self._run, self._hidden = links, run, hidden
        self._shapes, self._width, self._to = tuple(shapes), width, to
        self._tables = Tables()
        self._memories: dict[int, KVPool] = {}

    @torch.no_grad()
    def serve(self) -> None:
        """Do what is told until the end."""
        while True:
            kind, *numbers = self._links.recv_ints()
            if kind == Kind.END:
                return
            self._do(Kind(kind), numbers)

    def _do(self, kind: Kind, numbers: list[int]) -> None:
        if kind is Kind.FORWARD:
            self._forward(Forward.of(numbers))
            return
        number, *rest = numbers
        if kind is Kind.NEW:
            self._memories[number] = KVPool.of(self._shapes, count=rest[0], dtype=self._hidden.dtype, device="cpu")
        elif kind is Kind.FORGET:
            del self._memories[number]
        elif kind is Kind.COPY:
            self._memories[number].copy(rest[0], rest[1], rest[2])
        elif kind is Kind.GIVE_BACK:
            self._memories[number].give_back(rest)
        elif kind is Kind.READ:
            row = self._memories[number].read(Slot(rest[1:], rest[0], 0), rest[0])
            for tensor in (*row.keys, *row.values):
                self._links.send(tensor, 0)
            self._links.settle()
        elif kind is Kind.WRITE:
            row = empty_like_row(self._shapes, rest[0], self._hidden.dtype)
            for tensor in (*row.keys, *row.values):
                self._links.receive(tensor, 0)
            self._memories[number].write(Slot(rest[1:], rest[0], 0), row, rest[0])

    def _forward(self, given: Forward) -> None:
        count = given.rows * given.tokens
        self._links.receive(self._hidden[:count], self._links.rank - 1)
        self._links.settle()  # what was sent last has arrived long since
        view = self._memories[given.memory].view(self._tables.filled(given.table, self._width))
        picks = self._to == 0 and given.has_result  # the last rank alone
        at = given.at if picks else None
        out, _ = self._run(rows_of_table(given.rows, given.tokens), given.offsets, view, at)
        if self._to != 0 or given.has_result:
            self._links.send(out, self._to)
