"""A rank other than 0: it owns a part of the weights and caches, and executes the messages of rank 0."""

from collections.abc import Sequence

import torch
from torch import Tensor

from onward.cache import KVPool, LayerShape, Slot
from onward.distributed.group import Tables, empty_row
from onward.distributed.links import ForwardMessage, Kind, Links
from onward.distributed.stage import rows_of_table
from onward.models import Run
from onward.program import ForwardBatch


class RankWorker:
    """The message loop of a rank.

    run: its part of the model, over a table of hidden states. shapes: the cache shapes of its layers. width: the
    maximum number of blocks of a sequence. to: the rank that receives its hidden states.
    """

    def __init__(
        self, links: Links, run: Run, hidden: Tensor, shapes: Sequence[LayerShape], width: int, to: int
    ) -> None:
        self._links, self._run, self._hidden = links, run, hidden
        self._shapes, self._width, self._to = tuple(shapes), width, to
        self._tables = Tables()
        self._pools: dict[int, KVPool] = {}

    @torch.no_grad()
    def serve(self) -> None:
        """Execute messages until `Kind.END`."""
        while True:
            kind, *numbers = self._links.recv_ints()
            if kind == Kind.END:
                return
            if kind == Kind.FORWARD:
                self._forward(ForwardMessage.parse(numbers))
            elif kind == Kind.NEW_POOL:
                pool, count = numbers
                self._pools[pool] = KVPool.of(self._shapes, count=count, dtype=self._hidden.dtype, device="cpu")
            elif kind == Kind.FREE_POOL:
                del self._pools[numbers[0]]
            else:
                self._execute(Kind(kind), self._pools[numbers[0]], numbers[1:])

    def _execute(self, kind: Kind, pool: KVPool, numbers: list[int]) -> None:
        if kind is Kind.COPY:
            pool.copy(*numbers)
        elif kind is Kind.GIVE_BACK:
            pool.give_back(numbers)
        elif kind in (Kind.READ, Kind.WRITE):
            positions, *blocks = numbers
            slot = Slot(blocks, positions, 0)
            if kind is Kind.READ:
                row = pool.read(slot, positions)
                self._links.send(0, *row.keys, *row.values)
                self._links.settle()
            else:
                row = empty_row(self._shapes, positions, self._hidden.dtype)
                self._links.receive(0, *row.keys, *row.values)
                pool.write(slot, row, positions)

    def _forward(self, message: ForwardMessage) -> None:
        rows = rows_of_table(len(message.offsets), message.tokens)
        self._links.receive(self._links.rank - 1, self._hidden[: rows.numel()])
        self._links.settle()  # the last sends completed long ago
        view = self._pools[message.pool].view(self._tables.filled(message.table, self._width))
        is_last = self._to == 0
        logits_at = message.logits_at if is_last and message.has_result else None
        out = self._run.step(ForwardBatch(rows, message.offsets, view, logits_at)).logits
        if not is_last or message.has_result:
            self._links.send(self._to, out)
