"""What a model caches for each layer (keys and values of each position, or one recurrent state of each sequence), the
memory for it, and its size.

Each state slot has two places, for the states of two blocks of 16 positions, and `block_numbers` names the blocks
(`onward.ops.recurrent_state`). So at least the states of the last 16 positions are available, and removing tokens only
lowers an offset, as in a KV cache.
"""

import math
import mmap
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from onward.errors import RequestError, one_line
from onward.native import advise_huge_pages
from onward.native.machine import memory_limit
from onward.ops.heads import BLOCK
from onward.ops.kv_format import KVFormat, format_of
from onward.ops.recurrent_state import STATE_BLOCK
from onward.util.text import in_bytes


class LayerShape(NamedTuple):
    """Keys [num_kv_heads, key_dim] and values [num_kv_heads, value_dim] of a position.

    value_dim: 0 if values are part of the keys and only keys are stored (multi-head latent attention).
    window: how many positions a token of a sliding layer sees, itself included; None for full attention.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None


def widest_window(shapes: Sequence[LayerShape]) -> int | None:
    """The longest window of the sliding layers, which all keep that many positions; None without sliding layers."""
    return max((shape.window for shape in shapes if shape.window is not None), default=None)


def window_blocks(window: int, block: int = BLOCK) -> int:
    """The most sliding-window blocks of a sequence while forwards process up to `block` positions at once, wherever
    blocks begin."""
    return -(-(window - 1) // block) + 2


def first_seen(window: int, positions: int, block: int = BLOCK) -> int:
    """The first position of the first block that a token at `positions` sees."""
    return max(0, positions - window + 1) // block * block


# Bytes. Filling a smaller buffer is cheaper than mapping it and faulting its pages in.
_MIN_MAP = 4 << 20
# Bytes. A buffer up to this size may use pages of 2 MB, which halves the time to fill half of it. A larger one uses
# pages of 4 KB, so that a long context takes no more memory than is written.
_MAX_HUGE_PAGES = 128 << 20


# Allows maps larger than the free memory (named by Python from 3.13 on; the value for these processors).
_NO_RESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64", "riscv64") else 0


def lazy_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, huge_pages: bool | None = None
) -> Tensor:
    """Zeros of `shape`. On the CPU, the system provides each page when it is first written (see `is_lazy`).

    `torch.zeros` writes all pages: a cache for a long context would take all its memory, even for a short sequence.

    Args:
        huge_pages: whether to use pages of 2 MB; by default for small buffers only.

    Raises:
        RequestError: the system refuses the allocation.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        if not is_lazy(nbytes, device):
            return torch.zeros(shape, dtype=dtype, device=device)
        # Private: after a fork each process has its own copy. The map lives as long as the tensor.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (OSError, OverflowError, ValueError, torch.OutOfMemoryError) as error:
        reason = one_line(error).partition(". ")[0]  # torch adds advice and statistics
        raise RequestError(
            f"cannot allocate {in_bytes(nbytes)} for a cache ({reason}): ask for fewer rows or positions"
        ) from error
    buffer = torch.frombuffer(memory, dtype=dtype)
    if nbytes <= _MAX_HUGE_PAGES if huge_pages is None else huge_pages:
        advise_huge_pages(buffer.data_ptr(), nbytes)
    return buffer.view(shape)


def total_memory(device: torch.device) -> int:
    """The total memory of a device in bytes, as a basis for cache sizes; on the CPU that of this process."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else memory_limit()


def is_lazy(nbytes: int, device: torch.device) -> bool:
    """Whether `lazy_zeros` of this size is a memory map, whose pages can be returned to the system."""
    return device.type == "cpu" and nbytes >= _MIN_MAP and hasattr(mmap, "MAP_PRIVATE")


class StateShape(NamedTuple):
    """A layer's recurrent state: the inputs of a convolution of `taps` weights over `channels`, in the model's dtype,
    and `width` numbers for each of `heads` heads in float32."""

    channels: int
    taps: int
    heads: int
    width: int


class RecurrentState(NamedTuple):
    """The states of one layer, as the ops take them: inputs [N, 2, K - 1 + 16, C], state float32 [N, 2, H, width],
    block_numbers int32 [N, 2], rows int32 [B] or None."""

    inputs: Tensor
    state: Tensor
    block_numbers: Tensor
    rows: Tensor | None


def new_states(
    shapes: Sequence[StateShape], slots: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, ...]:
    """Empty states of `slots` slots: inputs and state of each layer, then `block_numbers`; () without layers."""
    if not shapes:
        return ()
    device = torch.device(device)
    inputs = [(shape.taps - 1 + STATE_BLOCK, shape.channels) for shape in shapes]
    states = [(shape.heads, shape.width) for shape in shapes]
    parts = zip(_parts(inputs, slots, dtype, device), _parts(states, slots, torch.float32, device), strict=True)
    block_numbers = torch.zeros(slots, 2, dtype=torch.int32, device=device)
    return *(part for layer in parts for part in layer), block_numbers


def _parts(sizes: Sequence[tuple[int, int]], slots: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """[N, 2, *size] for each size, over one buffer in which a slot is contiguous."""
    widths = [rows * columns for rows, columns in sizes]
    buffer = lazy_zeros((slots, 2, sum(widths)), dtype, device)
    return [part.view(slots, 2, *size) for part, size in zip(torch.split(buffer, widths, -1), sizes, strict=True)]


def of_layer(states: Sequence[Tensor], layer: int, rows: Tensor | None) -> RecurrentState:
    """The states of one layer, out of those of `new_states`."""
    return RecurrentState(states[2 * layer], states[2 * layer + 1], states[-1], rows)


def holds(states: Sequence[Tensor], slot: int, positions: int) -> bool:
    """Whether a slot has the states after this many positions."""
    return not states or positions == 0 or -(-positions // STATE_BLOCK) in states[-1][slot].tolist()


@dataclass(frozen=True)
class CachePlan:
    """What a cache has for each layer, from which `KVCache.of` and `KVPool` make caches.

    shapes: of the attention layers. states: of the recurrent layers. dtype: of the model. format: of the rows of keys
    and values; floats of `dtype` by default.
    """

    shapes: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device | str = "cpu"
    states: tuple[StateShape, ...] = ()
    format: KVFormat | None = None

    @property
    def rows(self) -> KVFormat:
        return self.format or format_of(self.dtype)

    @property
    def block_nbytes(self) -> int:
        """Bytes of the keys and values of a block, all layers."""
        return BLOCK * sum(map(self.position_nbytes, self.shapes))

    def position_nbytes(self, shape: LayerShape) -> int:
        """Bytes of a layer's keys and values of one position."""
        width = self._width(shape.key_dim) + self._width(shape.value_dim)
        return shape.num_kv_heads * width * self.rows.dtype.itemsize

    def bytes_of(self, positions: int) -> int:
        """Bytes of a sequence of this many positions: keys and values, of sliding layers those of the blocks that a
        window needs, and recurrent states."""
        window = widest_window(self.shapes)
        most = positions if window is None else min(positions, BLOCK * window_blocks(window))
        stored = (self.position_nbytes(x) * (positions if x.window is None else most) for x in self.shapes)
        return sum(stored) + sum(x.nbytes for x in new_states(self.states, 1, self.dtype, "meta"))

    def up_to(self, max_len: int | None) -> "CachePlan":
        """The plan without windows if these would keep all of `max_len` positions anyway."""
        window = widest_window(self.shapes)
        keeps_all = window is not None and max_len is not None and window_blocks(window) * BLOCK >= max_len
        return self.without_windows() if keeps_all else self

    def without_windows(self) -> "CachePlan":
        """The plan of the same layers with full-attention caches."""
        return replace(self, shapes=tuple(shape._replace(window=None) for shape in self.shapes))

    def new_layers(
        self, count: int, positions: int, *, by_row: bool
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """A buffer of zeros, and over it the keys and the values of each layer [count, G, positions, width].

        by_row: each of the `count` rows is contiguous, all layers' keys, then all values; otherwise each layer is.

        Raises:
            RequestError: the system refuses the allocation.
        """
        widths = [(shape.num_kv_heads, self._width(shape.key_dim)) for shape in self.shapes]
        widths += [(shape.num_kv_heads, self._width(shape.value_dim)) for shape in self.shapes]
        sizes = [heads * positions * width * (1 if by_row else count) for heads, width in widths]
        shape = (count, sum(sizes)) if by_row else (sum(sizes),)
        # A row's parts are no further apart than its size: the first position of a block touches all of its huge pages,
        # and the last one needs no more.
        buffer = lazy_zeros(shape, self.rows.dtype, torch.device(self.device), huge_pages=by_row or None)
        parts = torch.split(buffer, sizes, -1) if sizes else ()
        layers = [part.view(count, heads, positions, width) for part, (heads, width) in zip(parts, widths, strict=True)]
        return buffer, tuple(layers[: len(self.shapes)]), tuple(layers[len(self.shapes) :])

    def _width(self, dim: int) -> int:
        return self.rows.width(dim) if dim else 0


# The most state slots of a pool, if they take memory only as they are written, and otherwise.
_MAX_LAZY_SLOTS, _MAX_SLOTS = 1024, 32


class RecurrentStatePool:
    """Recurrent states of N slots. On the CPU they take memory when first written.

    count: N. tensors: from `new_states`. nbytes: of one slot. block_nbytes: of the keys and values of a block.
    """

    def __init__(self, plan: CachePlan, count: int) -> None:
        """count: of sequences; there are fewer slots if it is large."""
        self.block_nbytes = plan.block_nbytes
        self.count = min(count, _MAX_LAZY_SLOTS if torch.device(plan.device).type == "cpu" else _MAX_SLOTS)
        self.tensors = new_states(plan.states, self.count, plan.dtype, plan.device)
        self.nbytes = sum(tensor[:1].nbytes for tensor in self.tensors)
        # The bytes of all inputs, of all states and of all numbers, in each of which a slot is contiguous.
        memories = [self.tensors[at].untyped_storage() for at in (0, 1, -1)]
        flat = [torch.empty(0, dtype=torch.uint8, device=plan.device).set_(memory) for memory in memories]
        self._bytes = [memory.view(self.count, -1) for memory in flat if memory.numel()]

    def clear(self, slot: int) -> None:
        self.tensors[-1][slot] = 0

    def copy(self, source: int, to: int) -> None:
        for tensor in self.tensors:
            tensor[to] = tensor[source]

    def holds(self, slot: int, positions: int) -> bool:
        return holds(self.tensors, slot, positions)

    def dump(self, slot: int) -> memoryview:
        """A copy of a slot's bytes."""
        return copied_bytes([tensor[slot] for tensor in self._bytes])

    def writable(self, slot: int) -> memoryview | None:
        """None, since they are not in one place."""

    def load(self, slot: int, content: memoryview) -> None:
        """Overwrite a slot with the bytes of `dump`."""
        load_bytes([tensor[slot] for tensor in self._bytes], content)

    def read(self, slot: int) -> tuple[Tensor, ...]:
        return tuple(tensor[slot : slot + 1].clone() for tensor in self.tensors)

    def write(self, slot: int, states: Sequence[Tensor]) -> None:
        for tensor, new in zip(self.tensors, states, strict=True):
            tensor[slot] = new[0]


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def copied_bytes(tensors: Sequence[Tensor]) -> memoryview:
    """A copy of the bytes of contiguous tensors, one after another."""
    copies = [np.asarray(as_bytes(tensor.cpu())) for tensor in tensors]
    return (copies[0].copy() if len(copies) == 1 else np.concatenate(copies)).data


def load_bytes(tensors: Sequence[Tensor], content: memoryview) -> None:
    """Overwrite contiguous tensors with bytes, one after another."""
    start = 0
    for tensor in tensors:
        own = np.frombuffer(content[start : start + tensor.nbytes], np.uint8)
        start += tensor.nbytes
        if tensor.device.type == "cpu":
            np.copyto(np.asarray(as_bytes(tensor)), own)
        else:
            tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(own.copy()))
