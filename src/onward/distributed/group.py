"""The messages of a split model: rank 0 sends them and mirrors the blocks of all KV caches; the others execute them."""

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from onward.cache import CachePlan, KVCache, KVPool, Slot
from onward.cache.plan import lazy_zeros
from onward.distributed.launchers import HeartbeatMonitor, RankHandles
from onward.distributed.links import ForwardMessage, Kind, Links
from onward.errors import RankError
from onward.models import Forward, Model, Run
from onward.models.adapters import RowSteers
from onward.ops.tap import updating
from onward.program import ForwardBatch, StepResult


def layer_tap(layer: int) -> str:
    """The name of the tap after a layer."""
    return f"layers.{layer}"


def rows_of_table(rows: int, tokens: int) -> Tensor:
    """int32 [B, T], the rows of a forward's hidden states in the table."""
    return torch.arange(rows * tokens, dtype=torch.int32).view(rows, tokens)


class RankGroup:
    """Rank 0's handle of all ranks, which end when it is garbage collected.

    plans: the caches of each rank's layers. pools: the number of each pool of blocks, by the address of its
    keys. processes: the other ranks, if this process started them. A rank that hangs while this one waits for it breaks
    the group.
    """

    def __init__(self, links: Links, plans: Sequence[CachePlan], processes: RankHandles | None) -> None:
        self.links, self.plans, self.processes = links, plans, processes
        self.lock = threading.RLock()
        self.pools: dict[int, int] = {}
        self.others = range(1, links.world)
        self.broken = ""
        self._count = 0
        self._freed: deque[int] = deque()
        self._pid = os.getpid()
        self._timeout = _RankTimeout(links, processes)
        self._monitor = HeartbeatMonitor(links.store, self.others, self._timeout)
        self.close = weakref.finalize(self, _close, links, self.others, processes, self._pid, self._monitor)

    def __reduce__(self) -> NoReturn:
        raise RankError("a model over several ranks belongs to its process: load it again instead of copying it")

    def broadcast(self, kind: Kind, *numbers: int) -> None:
        """Send a message to all other ranks, in order. Raises `RankError`: a rank has ended."""
        self.check()
        with self.lock:
            self.check()
            try:
                while self._freed:
                    self.links.send_ints([Kind.FREE_POOL, self._freed.popleft()], self.others)
                self.links.send_ints([kind, *numbers], self.others)
            except RankError as error:  # only some ranks have the message
                self.abort(str(error))
                raise

    def check(self) -> None:
        """Raise `RankError` if messages can't be sent."""
        if os.getpid() != self._pid:
            raise RankError("a forked child does not have its parent's ranks: load the model in the child")
        if self.broken:
            raise RankError(self.broken)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Hold the lock during an exchange between ranks. Raises `RankError`: a rank hangs, or has ended."""
        with self.lock, self._monitor.waiting():
            try:
                yield
            except RankError as error:
                self.abort(str(error))
                raise RankError(self.broken) from error
            except Exception as error:
                if not self._timeout.reason:
                    raise
                self.abort(self._timeout.reason)
                raise RankError(self.broken) from error

    def new_pool(self, count: int) -> int:
        """Create a pool of `count` blocks on all other ranks; return its number."""
        with self.lock:
            self._count += 1
            self.broadcast(Kind.NEW_POOL, self._count, count)
            return self._count

    def free_pool(self, key: int) -> None:
        """Free a pool with the next message: the garbage collector may call this at any time."""
        self._freed.append(self.pools.pop(key))

    def abort(self, reason: str) -> None:
        """End the other ranks and refuse further messages, because the ranks are out of sync."""
        self.broken = self.broken or self._timeout.reason or reason
        self.close()

    def read(self, pool: int, blocks: Sequence[int], positions: int, own: KVCache) -> KVCache:
        """A row of a pool with all ranks' layers. own: rank 0's layers."""
        rows = [own, *(KVCache.of(plan, 1, positions) for plan in self.plans[1:])]
        with self.exchanging():
            self.broadcast(Kind.READ, pool, positions, *blocks)
            for rank in self.others:
                self.links.receive(rank, *rows[rank].keys, *rows[rank].values)
        return KVCache(tuple(k for row in rows for k in row.keys), tuple(v for row in rows for v in row.values))

    def write(self, pool: int, blocks: Sequence[int], positions: int, row: KVCache) -> KVCache:
        """Send the other ranks their layers of a row; return rank 0's."""
        ends = list(itertools.accumulate((len(plan.shapes) for plan in self.plans), initial=0))
        layers = [slice(begin, end) for begin, end in itertools.pairwise(ends)]
        with self.exchanging():
            self.broadcast(Kind.WRITE, pool, positions, *blocks)
            for rank in self.others:
                tensors = (*row.keys[layers[rank]], *row.values[layers[rank]])
                self.links.send(rank, *(tensor[:, :, :positions] for tensor in tensors))
            self.links.settle()
        return KVCache(row.keys[layers[0]], row.values[layers[0]])


class _RankTimeout:
    """Closes the connections when a rank hangs. reason: set before they close; "" otherwise."""

    def __init__(self, links: Links, processes: RankHandles | None) -> None:
        self._links, self._processes, self.reason = links, processes, ""

    def __call__(self, reason: str) -> None:
        self.reason = reason
        if self._processes is not None:
            self._processes.kill()
        else:
            self._links.abort()


def _close(
    links: Links, others: Sequence[int], processes: RankHandles | None, pid: int, monitor: HeartbeatMonitor
) -> None:
    if os.getpid() != pid:  # a forked child must not close its parent's connections
        return
    monitor.close()
    with suppress(RankError):  # if one has ended, all end
        links.send_ints([Kind.END], others)
    if processes is not None:
        processes.end()


class ShardedKVPool(KVPool):
    """Rank 0's pool of blocks, which mirrors its operations on all ranks. Blocks have the same numbers on all ranks."""

    def __init__(self, group: RankGroup, count: int) -> None:
        super().__init__(group.plans[0], count)
        self._group = group
        self.number = group.new_pool(self.count)
        # Every view of the pool references this tensor.
        key = self._keys[0].data_ptr()
        group.pools[key] = self.number
        weakref.finalize(self._keys[0], group.free_pool, key).atexit = False
        self.block_nbytes = sum(plan.block_nbytes for plan in group.plans)

    def copy(self, source: int, to: int, positions: int) -> None:
        super().copy(source, to, positions)
        self._group.broadcast(Kind.COPY, self.number, source, to, positions)

    def give_back(self, blocks: Sequence[int]) -> None:
        super().give_back(blocks)
        self._group.broadcast(Kind.GIVE_BACK, self.number, *blocks)

    def read(self, place: Slot, positions: int) -> KVCache:
        return self._group.read(self.number, place.blocks, positions, super().read(place, positions))

    def write(self, place: Slot, cache: KVCache, positions: int) -> None:
        super().write(place, self._group.write(self.number, place.blocks, positions, cache), positions)


def new_cache(group: RankGroup, batch: int, max_len: int) -> KVCache:
    """A dense cache of all ranks' layers, for rows that are saved or restored; forwards don't support it."""
    shapes = tuple(shape for plan in group.plans for shape in plan.shapes)
    return KVCache.of(replace(group.plans[0], shapes=shapes), batch, max_len)


class Tables:
    """A rank's own block tables, filled from rank 0's. Programs stay bound to them, because the tensors are reused."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, int, int], Tensor] = {}

    def filled(self, rows: Tensor, width: int, index: int = 0) -> Tensor:
        """int32 [B, width], whose rows start with `rows` int32 [B, m]; later columns are never read.

        index: the index among tables of this size that are in use at once.
        """
        key = len(rows), width, index
        if key not in self._tables:
            self._tables[key] = torch.zeros(len(rows), width, dtype=torch.int32)
        table = self._tables[key]
        table[:, : rows.shape[1]] = rows
        return table


# The maximum number of tokens of one forward.
MAX_TOKENS = 2**15


def token_table(width: int, dtype: torch.dtype) -> Tensor:
    """A row for each token of a forward, whose memory is allocated when it is written."""
    return lazy_zeros((MAX_TOKENS, width), dtype, torch.device("cpu"))


class RankRun:
    """A rank's part of a model, whose values at taps can be changed.

    forward, params: of the part. hidden: a table of hidden states. width: the last dimension of its result.
    """

    def __init__(self, forward: Forward, params: Any, hidden: Tensor, width: int, compile: str) -> None:
        self._forward, self._params, self._width, self._compile = forward, params, width, compile
        self.hidden = hidden
        self.plain = self._steered = Run(Model(forward, params, _no_cache, width), compile)
        self._tables: dict[str, RowSteers] = {}

    def step(self, batch: ForwardBatch, steers: Mapping[str, RowSteers]) -> StepResult:
        """As `Run.step`. steers: the changes of the batch's tokens, by tap."""
        if not steers:
            return self.plain.step(batch)
        if new := [name for name in steers if name not in self._tables]:
            columns = (self.hidden.shape[1], self.hidden.dtype), (1, torch.bool), (1, torch.bool)
            self._tables |= {name: RowSteers(*(token_table(*each) for each in columns)) for name in new}
            params = dict(sorted(self._tables.items())), self._params
            model = Model(partial(_steered_forward, self._forward), params, _no_cache, self._width)
            self._steered = Run(model, self._compile)
        count = batch.tokens.numel()
        for name, table in self._tables.items():
            table.adds[:count] = table.replaces[:count] = False
            if name in steers:
                for rows, values in zip(table, steers[name], strict=True):
                    rows[:count] = values.flatten(0, 1)
        return self._steered.step(batch)


def _steered_forward(
    forward: Forward, tokens: Tensor, offsets: Tensor, cache: Any, params: Any, *, logits_at: Tensor | None = None
) -> tuple[Tensor, Any]:
    """A forward over tables of changes, with a row for each token, and its params."""
    tables, own = params
    rows, count = tokens.shape, tokens.numel()
    of_rows = {
        name: RowSteers(*(each[:count].view(*rows, each.shape[1]) for each in table)) for name, table in tables.items()
    }
    with updating({name: each.applied for name, each in of_rows.items()}):
        return forward(tokens, offsets, cache, own, logits_at=logits_at)


def _no_cache(batch: int, max_len: int) -> Any:
    raise AssertionError("a rank's caches are views of its blocks")


class RankWorker:
    """The message loop of a rank.

    run: its part of the model. layers: their numbers. plan: their caches. width: the maximum number of blocks of a
    sequence. to: the rank that receives its hidden states.
    """

    def __init__(self, links: Links, run: RankRun, layers: range, plan: CachePlan, width: int, to: int) -> None:
        self._links, self._run, self._layers = links, run, layers
        self._plan, self._width, self._to = plan, width, to
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
                self._pools[pool] = KVPool(self._plan, count)
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
            slot = Slot(positions, blocks=blocks)
            if kind is Kind.READ:
                row = pool.read(slot, positions)
                self._links.send(0, *row.keys, *row.values)
                self._links.settle()
            else:
                row = KVCache.of(self._plan, 1, positions)
                self._links.receive(0, *row.keys, *row.values)
                pool.write(slot, row, positions)

    def _forward(self, message: ForwardMessage) -> None:
        rows = rows_of_table(len(message.offsets), message.tokens)
        steers = {name: RowSteers.empty(rows.shape, self._run.hidden) for name in self._own(message.steers)}
        self._links.receive_together(0, *itertools.chain(*steers.values()))
        self._links.receive(self._links.rank - 1, self._run.hidden[: rows.numel()])
        self._links.settle()  # the last sends completed long ago
        view = self._pools[message.pool].view(self._tables.filled(message.table, self._width))
        is_last = self._to == 0
        logits_at = message.logits_at if is_last and message.has_result else None
        taps = self._own(message.taps)
        result = self._run.step(ForwardBatch(rows, message.offsets, view, logits_at, taps), steers)
        to_rank_0 = [result.taps[name] for name in taps]
        if not is_last:
            self._links.send(self._to, result.logits)
        elif message.has_result:
            to_rank_0.append(result.logits)
        self._links.send_together(0, *to_rank_0)

    def _own(self, layers: Sequence[int]) -> tuple[str, ...]:
        """The taps of this rank's layers among these."""
        return tuple(layer_tap(layer) for layer in layers if layer in self._layers)
