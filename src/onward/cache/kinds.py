"""The cache contents of a layer: keys and values per position, or one recurrent state per sequence.

Each state slot has two places, for the states of two blocks of 16 positions, and `block_numbers` names the blocks
(`onward.ops.recurrent_state`). So at least the states of the last 16 positions are available, and removing tokens only
lowers an offset, as in a KV cache.
"""

import math
import mmap
import platform
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onward.errors import RequestError, one_line
from onward.native import advise_huge_pages
from onward.native.machine import memory_limit
from onward.ops.heads import BLOCK
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

    @property
    def features(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


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


def without_windows(shapes: Sequence[LayerShape]) -> tuple[LayerShape, ...]:
    """The shapes of the same layers with full-attention caches."""
    return tuple(shape._replace(window=None) for shape in shapes)


def without_useless_windows(shapes: Sequence[LayerShape], max_len: int | None) -> tuple[LayerShape, ...]:
    """The shapes, without windows if these would keep all of `max_len` positions anyway."""
    window = widest_window(shapes)
    if window is not None and max_len is not None and window_blocks(window) * BLOCK >= max_len:
        return without_windows(shapes)
    return tuple(shapes)


def kept_positions(shape: LayerShape, window: int | None, positions: int) -> int:
    """The number of a sequence's positions that a layer keeps in blocks. window: the widest of all layers."""
    return positions if shape.window is None or window is None else min(positions, window_blocks(window) * BLOCK)


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


# The most state slots of a pool, if they take memory only as they are written, and otherwise.
_MAX_LAZY_SLOTS, _MAX_SLOTS = 1024, 32


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


class RecurrentStatePool:
    """Recurrent states of N slots. On the CPU they take memory when first written.

    count: N. tensors: from `new_states`. nbytes: of one slot. block_nbytes: of the keys and values of a block.
    """

    def __init__(
        self,
        shapes: Sequence[StateShape],
        count: int,
        dtype: torch.dtype,
        device: torch.device | str,
        block_nbytes: int,
    ) -> None:
        self.block_nbytes = block_nbytes
        self.shapes = tuple(shapes)
        self.count = min(count, _MAX_LAZY_SLOTS if torch.device(device).type == "cpu" else _MAX_SLOTS)
        self.tensors = new_states(shapes, self.count, dtype, device)
        self.nbytes = sum(tensor[:1].nbytes for tensor in self.tensors)

    def clear(self, slot: int) -> None:
        self.tensors[-1][slot] = 0

    def copy(self, source: int, to: int) -> None:
        for tensor in self.tensors:
            tensor[to] = tensor[source]

    def holds(self, slot: int, positions: int) -> bool:
        return holds(self.tensors, slot, positions)

    def read(self, slot: int) -> tuple[Tensor, ...]:
        return tuple(tensor[slot : slot + 1].clone() for tensor in self.tensors)

    def write(self, slot: int, states: Sequence[Tensor]) -> None:
        for tensor, new in zip(self.tensors, states, strict=True):
            tensor[slot] = new[0]
