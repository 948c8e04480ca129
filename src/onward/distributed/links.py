"""The connections between ranks: integers and tensors, sent in order."""

import socket
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

# The size of a message's first tensor, in numbers; the first number is their count.
_MESSAGE_SIZE = 1024
_INTS, _TENSORS = 0, 1  # tags
# A rank may be idle for days. A rank that dies is noticed at once, because its connection closes.
_NO_TIMEOUT = timedelta(days=3650)
# Seconds that ranks may take to connect.
_START_TIMEOUT = 300.0
# Seconds to wait for the error of a rank that has died.
_ERROR_TIMEOUT = 1.0


class Links:
    """The connections of one rank to all others, over gloo.

    Sends do not wait for the receiver: two ranks may send to each other at the same time.

    rank: its number. world: the number of ranks. store: the store where they meet.
    """

    def __init__(self, rank: int, world: int, store: Store, hostname: str | None) -> None:
        """hostname: the interface's host name; None lets gloo choose one."""
        self.rank, self.world, self.store = rank, world, store
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = _NO_TIMEOUT
        if hostname is not None:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=hostname)]
        else:
            options._devices = [dist.ProcessGroupGloo.create_default_device()]
        with self._checked():
            self._group: Any = dist.ProcessGroupGloo(store, rank, world, options)
        self._pending: deque[Any] = deque()

    def send_ints(self, numbers: Sequence[int], to: Sequence[int]) -> None:
        """Send integers to some ranks."""
        first, rest = numbers[: _MESSAGE_SIZE - 1], numbers[_MESSAGE_SIZE - 1 :]
        head = torch.zeros(_MESSAGE_SIZE, dtype=torch.int64)
        head[: 1 + len(first)] = torch.tensor([len(numbers), *first])
        for rank in to:
            for part in (head, torch.tensor(rest)) if rest else (head,):
                self._send(part, rank, _INTS)

    def recv_ints(self, by: int = 0) -> list[int]:
        """Wait for the next integers from a rank."""
        count, *numbers = self._receive(torch.empty(_MESSAGE_SIZE, dtype=torch.int64), by, _INTS).tolist()
        if count > len(numbers):
            numbers += self._receive(torch.empty(count - len(numbers), dtype=torch.int64), by, _INTS).tolist()
        return numbers[:count]

    def send(self, to: int, *tensors: Tensor) -> None:
        """Send tensors, which must not be written to until `settle`."""
        for tensor in tensors:
            self._send(tensor.contiguous(), to, _TENSORS)

    def receive(self, by: int, *outs: Tensor) -> None:
        """Wait for the next tensors from a rank, and store them in contiguous tensors."""
        for out in outs:
            self._receive(out, by, _TENSORS)

    def send_together(self, to: int, *tensors: Tensor) -> None:
        """Send small tensors as one message, for `receive_together`: a message takes longer than its bytes."""
        parts = [_raw(tensor.contiguous()) for tensor in tensors]
        if parts:
            self._send(parts[0] if len(parts) == 1 else torch.cat(parts), to, _TENSORS)

    def receive_together(self, by: int, *outs: Tensor) -> None:
        """Wait for tensors that a rank has sent as one message, and store them in contiguous tensors."""
        if len(outs) == 1:
            self._receive(outs[0], by, _TENSORS)
        elif outs:
            parts = list(map(_raw, outs))
            sizes = [len(part) for part in parts]
            message = self._receive(torch.empty(sum(sizes), dtype=torch.uint8), by, _TENSORS)
            for part, received in zip(parts, torch.split(message, sizes), strict=True):
                part.copy_(received)

    def settle(self) -> None:
        """Wait until all sends have completed."""
        with self._checked():
            while self._pending:
                self._pending.popleft()[0].wait()

    def fail(self, error: BaseException) -> None:
        """Send the error to rank 0, then close."""
        with suppress(Exception):
            self.store.set(f"error/{self.rank}", f"{type(error).__name__}: {one_line(error)}")
        self._pending.clear()
        self._group = None

    def abort(self) -> None:
        """Make all waits fail, from another thread."""
        self._group.abort()

    # gloo doesn't support every dtype, so tensors are sent as bytes.

    def _send(self, x: Tensor, to: int, tag: int) -> None:
        with self._checked():
            raw = _raw(x)
            self._pending.append((self._group.send([raw], to, tag), raw))

    def _receive(self, out: Tensor, by: int, tag: int) -> Tensor:
        with self._checked():
            self._group.recv([_raw(out)], by, tag).wait()
        return out

    @contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankError(self._reason(error)) from error

    def _reason(self, error: RuntimeError) -> str:
        """The error that a failed rank has reported, or a general message."""
        until = time.monotonic() + _ERROR_TIMEOUT
        while self.rank == 0 and time.monotonic() < until:
            with suppress(RuntimeError):
                for rank in range(1, self.world):
                    if self.store.check([f"error/{rank}"]):
                        return f"rank {rank} has failed: {self.store.get(f'error/{rank}').decode()}"
            time.sleep(0.05)
        return f"rank {self.rank} has lost another rank, which has ended or cannot be reached ({one_line(error)})"


def _raw(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, in its memory."""
    return x.view(-1).view(torch.uint8)


def meet(rank: int, world: int, address: str | None) -> tuple[Store, str]:
    """The store where ranks meet, and its address, "host:port".

    address: the address of rank 0's store; None in rank 0 uses a free port of this host.
    """
    host, _, port = ("127.0.0.1:0" if address is None else address).rpartition(":")
    if not host or not port.isdigit():
        raise RequestError(f"address must be HOST:PORT, such as 10.0.0.1:29500; got {address!r}")
    timeout = timedelta(seconds=_START_TIMEOUT)
    options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False}
    try:
        if rank == 0 and is_loopback(host):  # the store itself would listen on all interfaces
            with socket.create_server((host, int(port)), backlog=max(128, world)) as listener:
                port = str(listener.getsockname()[1])
                options["master_listen_fd"] = listener.detach()
        store = TCPStore(host, int(port), world, rank == 0, **options)
    except (RuntimeError, ValueError, OSError, OverflowError) as error:
        raise RankError(f"rank {rank} cannot reach rank 0 at {address}: {one_line(error)}") from error
    return store, f"{host}:{store.port}"


def is_loopback(host: str) -> bool:
    """Whether a host is reached from this machine alone."""
    return host in ("127.0.0.1", "localhost")


def await_all(store: Store, world: int, check: Callable[[], None]) -> None:
    """In rank 0: wait until every rank has connected to the store. check: raises if a rank has ended."""
    until = time.monotonic() + _START_TIMEOUT
    while not store.check([f"here/{rank}" for rank in range(1, world)]):
        check()
        if time.monotonic() > until:
            missing = [rank for rank in range(1, world) if not store.check([f"here/{rank}"])]
            raise RankError(
                f"ranks {missing} did not connect within {_START_TIMEOUT:.0f} s: start them with the same address"
            )
        time.sleep(0.02)


class Kind(IntEnum):
    """Kinds of messages from rank 0. All but END and FORWARD start with the number of a pool of blocks.

    NEW_POOL: the number of blocks. COPY: source, target, positions. GIVE_BACK: blocks whose contents are no longer
    needed. READ, WRITE: the positions and blocks of a row, whose keys and values follow.
    """

    END = 0
    NEW_POOL = 1
    FREE_POOL = 2
    COPY = 3
    GIVE_BACK = 4
    READ = 5
    WRITE = 6
    FORWARD = 7


class ForwardMessage(NamedTuple):
    """A forward of [B, T] tokens.

    offsets: int32 [B]. table: int32 [B, m], the blocks up to each row's last position. logits_at: int64 [R, N], the
    positions whose hidden states rank 0 needs; None for all. taps: the layers whose results rank 0 needs. steers: those
    whose results change; rank 0 sends the changes to the ranks of these layers.
    """

    pool: int
    tokens: int
    offsets: Tensor
    table: Tensor
    logits_at: Tensor | None
    taps: tuple[int, ...] = ()
    steers: tuple[int, ...] = ()

    @property
    def has_result(self) -> bool:
        """Whether the last rank sends hidden states to rank 0."""
        return self.logits_at is None or self.logits_at.numel() > 0

    def numbers(self) -> list[int]:
        counts = (-1, 0) if self.logits_at is None else self.logits_at.shape
        tensors = (self.offsets, self.table) if self.logits_at is None else (self.offsets, self.table, self.logits_at)
        values = [value for tensor in tensors for value in tensor.flatten().tolist()]
        layers = (len(self.taps), len(self.steers), *self.taps, *self.steers)
        return [self.pool, self.tokens, *self.table.shape, *counts, *layers, *values]

    @staticmethod
    def parse(numbers: Sequence[int]) -> "ForwardMessage":
        pool, tokens, rows, width, logits_rows, per_row, num_taps, num_steers, *values = numbers
        layers, values = values[: num_taps + num_steers], values[num_taps + num_steers :]
        offsets, table = values[:rows], values[rows : rows + rows * width]
        logits_at = torch.tensor(values[rows + rows * width :], dtype=torch.int64)
        return ForwardMessage(
            pool,
            tokens,
            torch.tensor(offsets, dtype=torch.int32),
            torch.tensor(table, dtype=torch.int32).view(rows, width),
            None if logits_rows < 0 else logits_at.view(logits_rows, per_row),
            tuple(layers[:num_taps]),
            tuple(layers[num_taps:]),
        )
