"""How ranks reach each other: numbers and tensors from one to another, in order."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from onward.errors import RankError, RequestError, one_line

# Numbers of a message that go in one piece; the first says how many there are.
_PIECE = 1024
_NUMBERS, _TENSORS = 0, 1
# Between two words of a rank there may be days. One that dies is noticed at once, for its connection closes.
_FOREVER = timedelta(days=3650)
# How long ranks may take to be there, in seconds.
_START = 300.0
# How long the last words of a rank that has died may take.
_LAST_WORDS = 1.0


class Links:
    """The connections of one rank to all others, over gloo.

    Sends do not wait for the receiver: two ranks may send to each other at once.

    rank: its number. world: how many there are. store: where they met.
    """

    def __init__(self, rank: int, world: int, store: Store, hostname: str | None) -> None:
        """hostname: of the interface to use; None lets gloo find one."""
        self.rank, self.world, self.store = rank, world, store
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _FOREVER
        if hostname is not None:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=hostname)]
        else:
            options._devices = [dist.ProcessGroupGloo.create_default_device()]
        with self._checked():
            self._group: Any = dist.ProcessGroupGloo(store, rank, world, options)
        self._unsettled: deque[Any] = deque()

    def send_ints(self, numbers: Sequence[int], to: Sequence[int]) -> None:
        """Send integers to some ranks."""
        first, rest = numbers[: _PIECE - 1], numbers[_PIECE - 1 :]
        piece = torch.zeros(_PIECE, dtype=torch.int64)
        piece[: 1 + len(first)] = torch.tensor([len(numbers), *first])
        pieces = [piece, torch.tensor(rest)] if rest else [piece]
        for rank in to:
            for each in pieces:
                self._send(each, rank, _NUMBERS)

    def recv_ints(self, by: int = 0) -> list[int]:
        """Wait for the integers that a rank tells next."""
        piece = self._receive(torch.empty(_PIECE, dtype=torch.int64), by, _NUMBERS).tolist()
        count, numbers = piece[0], piece[1:]
        if count > len(numbers):
            numbers += self._receive(torch.empty(count - len(numbers), dtype=torch.int64), by, _NUMBERS).tolist()
        return numbers[:count]

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor, of which nothing may be written until `settle`."""
        self._send(x.contiguous(), to, _TENSORS)

    def receive(self, out: Tensor, by: int) -> Tensor:
        """Wait for the tensor that a rank sends next, and put it into the contiguous `out`."""
        return self._receive(out, by, _TENSORS)

    def settle(self) -> None:
        """Wait until all that was sent has been received."""
        with self._checked():
            while self._unsettled:
                self._unsettled.popleft()[0].wait()

    def fail(self, error: BaseException) -> None:
        """Leave last words for rank 0, and hang up."""
        with suppress(Exception):
            self.store.set(f"error/{self.rank}", f"{type(error).__name__}: {one_line(error)}")
        self._unsettled.clear()
        self._group = None

    def abort(self) -> None:
        """End all waiting with an error, from another thread."""
        self._group.abort()

    def _send(self, x: Tensor, to: int, tag: int) -> None:
        with self._checked():
            raw = _bytes_of(x)
            self._unsettled.append((self._group.send([raw], to, tag), raw))

    def _receive(self, out: Tensor, by: int, tag: int) -> Tensor:
        with self._checked():
            self._group.recv([_bytes_of(out)], by, tag).wait()
        return out

    @contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankError(self._why(error)) from error

    def _why(self, error: RuntimeError) -> str:
        """What is known of a rank that cannot be reached: its last words, if it left any."""
        others = [rank for rank in range(1, self.world) if rank != self.rank]
        until = time.monotonic() + _LAST_WORDS
        while self.rank == 0 and time.monotonic() < until:
            with suppress(RuntimeError):
                for rank in others:
                    if self.store.check([f"error/{rank}"]):
                        return f"rank {rank} has failed: {self.store.get(f'error/{rank}').decode()}"
            time.sleep(0.05)
        return f"rank {self.rank} has lost another rank, which has ended or cannot be reached ({one_line(error)})"


def _bytes_of(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: gloo does not know every dtype."""
    return x.view(-1).view(torch.uint8)


def meet(rank: int, world: int, address: str | None) -> tuple[Store, str]:
    """The store where ranks find each other, and its address, "host:port".

    address: where rank 0 holds the store; None in rank 0 takes a free port of this host.
    """
    host, _, port = ("127.0.0.1:0" if address is None else address).rpartition(":")
    if not host or not port.isdigit():
        raise RequestError(f"an address of ranks is HOST:PORT, such as 10.0.0.1:29500; got {address!r}")
    try:
        store = TCPStore(host, int(port), world, rank == 0, timeout=timedelta(seconds=_START), wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise RankError(f"rank {rank} finds no rank 0 at {address}: {one_line(error)}") from error
    return store, f"{host}:{store.port}"


def await_all(store: Store, world: int, alive: Callable[[], None]) -> None:
    """In rank 0: wait until every rank has come to the store. alive: raises where that is in vain."""
    until = time.monotonic() + _START
    while not store.check([f"here/{rank}" for rank in range(1, world)]):
        alive()
        if time.monotonic() > until:
            missing = [rank for rank in range(1, world) if not store.check([f"here/{rank}"])]
            raise RankError(f"ranks {missing} did not come within {_START:.0f} s: start them with the same address")
        time.sleep(0.02)


class Kind(IntEnum):
    """END: there is no more. The others are of a memory of blocks: a new one of so many blocks, or one that nobody uses
    any more; a block's positions copied to another; blocks that hold nothing; a row's positions to be read or written;
    and a forward over rows of it."""

    END = 0
    NEW = 1
    FORGET = 2
    COPY = 3
    GIVE_BACK = 4
    READ = 5
    WRITE = 6
    FORWARD = 7


class Forward(NamedTuple):
    """What a rank needs for its part of a forward of [B, T] tokens.

    offsets: int32 [B]. table: int32 [B, m], the blocks up to each row's last position. at: int64 [R, N], the positions
    that are wanted at the end; None: all.
    """

    memory: int
    tokens: int
    offsets: Tensor
    table: Tensor
    at: Tensor | None

    @property
    def rows(self) -> int:
        return len(self.offsets)

    @property
    def has_result(self) -> bool:
        """Whether hidden states come back to rank 0."""
        return self.at is None or self.at.numel() > 0

    def numbers(self) -> list[int]:
        rows, each = (-1, 0) if self.at is None else self.at.shape
        head = [self.memory, self.tokens, self.rows, self.table.shape[1], rows, each]
        at = [] if self.at is None else self.at.flatten().tolist()
        return [*head, *self.offsets.tolist(), *self.table.flatten().tolist(), *at]

    @staticmethod
    def of(numbers: Sequence[int]) -> "Forward":
        memory, tokens, rows, width, wanted, each = numbers[:6]
        offsets, rest = numbers[6 : 6 + rows], numbers[6 + rows :]
        table, at = rest[: rows * width], rest[rows * width :]
        return Forward(
            memory,
            tokens,
            torch.tensor(offsets, dtype=torch.int32),
            torch.tensor(table, dtype=torch.int32).view(rows, width),
            None if wanted < 0 else torch.tensor(at, dtype=torch.int64).view(wanted, each),
        )
