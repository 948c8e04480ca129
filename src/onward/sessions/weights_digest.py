"""Digests of a model's weights: all bytes of each, read once for each state of the weights.

A digest is of the stock numbers, whatever layout the kernels of a machine have them in, so equal checkpoints of one
dtype have equal digests on every machine. Weights in few bits are digested as they lie in memory.
"""

import hashlib
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.forks import call_in_forks
from onward.models import Model
from onward.models.weights_version import WeightsVersion
from onward.native.cores import default_threads
from onward.ops import QuantizedWeight
from onward.ops.packed import NativeWeight

WEIGHTS = (QuantizedWeight, NativeWeight)
# Bytes that one thread reads at a time: enough that threads cost nothing, few enough that unpacked copies stay small.
_CHUNK = 8 << 20
_BLOCK = 16  # rows of a block of `NativeWeight`

_known: dict[int, tuple[WeightsVersion, dict[str, str]]] = {}  # by the id of a model that lives
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


call_in_forks(_renew_lock)


def weights_of(model: Model) -> dict[str, Any]:
    """The weights of a model by their place in its params."""
    leaves, _ = pytree.tree_flatten_with_path(model.params, is_leaf=lambda node: isinstance(node, WEIGHTS))
    return {pytree.keystr(path).lstrip("."): leaf for path, leaf in leaves if isinstance(leaf, (Tensor, *WEIGHTS))}


def digests_of(model: Model) -> dict[str, str]:
    """The digest of each weight, by its place; "?" for a layout that hides its bytes.

    They are computed when they are first asked for, and again when the weights have changed. Threads that ask at once
    wait for the first.
    """
    with _lock:
        version = WeightsVersion(model)
        known = _known.get(id(model))
        if known is None or known[0] != version:
            if known is None or not known[0].is_of(model):
                weakref.finalize(model, _known.pop, id(model), None).atexit = False
            known = _known[id(model)] = version, _computed(weights_of(model))
        return known[1]


def _computed(weights: dict[str, Any]) -> dict[str, str]:
    with ThreadPoolExecutor(default_threads()[0]) as pool:
        return {name: _digest(weight, pool) for name, weight in weights.items()}


def _digest(weight: Any, pool: ThreadPoolExecutor) -> str:
    parts = _parts(weight)
    if parts is None:
        return "?"
    digest = hashlib.blake2b(digest_size=16)
    for of_part in pool.map(_of_part, parts):  # hashlib and torch let other threads run meanwhile
        digest.update(of_part)
    return digest.hexdigest()


def _of_part(part: Tensor | NativeWeight) -> bytes:
    numbers = part.unpack() if isinstance(part, NativeWeight) else part
    return hashlib.sha256(as_bytes(numbers)).digest()  # processors have instructions for it: twice as fast as BLAKE2


def _parts(weight: Any) -> Iterator[Tensor | NativeWeight] | None:
    """A weight in parts that follow one another in its stock layout. They depend on its shape and dtype alone."""
    if isinstance(weight, NativeWeight):
        return _rows_of_packed(weight)
    if isinstance(weight, QuantizedWeight):
        return _both(_rows_of(weight.data), iter(() if weight.order is None else (weight.order,)))
    if weight.layout == torch.strided and type(weight) in (Tensor, torch.nn.Parameter):
        return _rows_of(weight.detach())
    return None


def _both(first: Iterator[Tensor], second: Iterator[Tensor]) -> Iterator[Tensor]:
    yield from first
    yield from second


def _rows_at_once(row_bytes: int) -> int:
    """How many rows a part has: a whole number of blocks, so that packed and stock weights have equal parts."""
    return max(_BLOCK, _CHUNK // max(1, row_bytes) // _BLOCK * _BLOCK)


def _rows_of(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.dim() == 0 or not tensor.numel():
        yield tensor
        return
    rows = _rows_at_once(tensor.nbytes // len(tensor))
    for first in range(0, len(tensor), rows):
        yield tensor[first : first + rows]


def _rows_of_packed(weight: NativeWeight) -> Iterator[NativeWeight]:
    rows = _rows_at_once(weight.inputs * weight.data.element_size())
    for first in range(0, weight.rows, rows):
        blocks = weight.data[first // _BLOCK : -(-(first + rows) // _BLOCK)]
        yield NativeWeight(blocks, min(rows, weight.rows - first), weight.inputs)


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, in order."""
    flat = tensor.cpu().contiguous().reshape(-1)
    # A single element may have any stride and counts as contiguous, but is not viewed as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data
