"""The fingerprint of a model in saved sessions: its config, and a digest of each weight.

Digests do not depend on the layout of weights: a model packed for another machine's kernels has the same fingerprint.
"""

import hashlib
import json
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward import ops
from onward.models import Model, architecture_of
from onward.models.model import WeightsVersion
from onward.native.machine import default_threads
from onward.ops import QuantizedWeight
from onward.ops.packed import NativeWeight
from onward.util.process import call_in_forks

WEIGHTS = (QuantizedWeight, NativeWeight)
# Bytes that one thread reads at a time: large enough to hide its overhead, small enough for unpacked copies.
_CHUNK = 8 << 20
_BLOCK = 16  # rows of a block of `NativeWeight`

_known: dict[int, tuple[WeightsVersion, dict[str, str]]] = {}  # by the id of a live model
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


call_in_forks(_renew_lock)


def weights_of(model: Model) -> dict[str, Any]:
    leaves, _ = pytree.tree_flatten_with_path(model.params, is_leaf=lambda node: isinstance(node, WEIGHTS))
    return {pytree.keystr(path).lstrip("."): leaf for path, leaf in leaves if isinstance(leaf, (Tensor, *WEIGHTS))}


def digests_of(model: Model) -> dict[str, str]:
    """The digest of each weight, by its path; "?" for an opaque layout.

    Computed on first use, and again after a change of the weights. Concurrent callers wait for the first.
    """
    with _lock:
        version = WeightsVersion(model)
        known = _known.get(id(model))
        if known is None or known[0] != version:
            if known is None or not known[0].is_of(model):
                weakref.finalize(model, _known.pop, id(model), None).atexit = False
            known = _known[id(model)] = version, _compute_digests(weights_of(model))
        return known[1]


def _compute_digests(weights: dict[str, Any]) -> dict[str, str]:
    with ThreadPoolExecutor(default_threads()[0]) as pool:
        return {name: _digest(weight, pool) for name, weight in weights.items()}


def _digest(weight: Any, pool: ThreadPoolExecutor) -> str:
    parts = _parts(weight)
    if parts is None:
        return "?"
    digest = hashlib.blake2b(digest_size=16)
    for part_digest in pool.map(_part_digest, parts):  # hashlib and torch release the GIL
        digest.update(part_digest)
    return digest.hexdigest()


def _part_digest(part: Tensor | NativeWeight) -> bytes:
    numbers = part.unpack() if isinstance(part, NativeWeight) else part
    return hashlib.sha256(as_bytes(numbers)).digest()  # with instructions of the CPU twice as fast as BLAKE2


def _parts(weight: Any) -> Iterator[Tensor | NativeWeight] | None:
    """The consecutive parts of a weight in its stock layout. They depend only on its shape and dtype."""
    if isinstance(weight, NativeWeight):
        return _rows_of_packed(weight)
    if isinstance(weight, QuantizedWeight):
        return chain(_rows_of(weight.data), () if weight.order is None else (weight.order,))
    if weight.layout == torch.strided and type(weight) in (Tensor, torch.nn.Parameter):
        return _rows_of(weight.detach())
    return None


def _rows_at_once(row_bytes: int) -> int:
    """The number of rows of a part: whole blocks, so that packed and stock weights have equal parts."""
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
    flat = tensor.cpu().contiguous().reshape(-1)
    # A single element may have any stride and still count as contiguous, but cannot be viewed as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data


# The fields of a config that change no bits.
_OF_DRAFTS = "cached_taps", "mtp"


def fingerprint(model: Model) -> dict[str, Any]:
    """The fingerprint as JSON values.

    vocab_size. cache: the dtypes of its caches. config: a built-in family's; {} for a custom forward.
    weights: "dtype shape digest" by path in the params; the digest is "?" for an opaque layout. Reads all bytes of the
    weights, once until they change.
    """
    architecture = architecture_of(model)
    config: dict[str, Any] = asdict(architecture) if is_dataclass(architecture) else {}
    for name in _OF_DRAFTS:
        config.pop(name, None)
    return {
        "vocab_size": model.vocab_size,
        "cache": _cache_dtypes(model),
        "config": json.loads(json.dumps(config)),  # a tuple is a list in JSON
        "weights": weights_fingerprint(model),
    }


def weights_fingerprint(model: Model) -> dict[str, str]:
    """The weights of `fingerprint`."""
    digests = digests_of(model)
    return {name: f"{_kind(weight)} {digests[name]}" for name, weight in weights_of(model).items()}


def _cache_dtypes(model: Model) -> str:
    leaves = pytree.tree_leaves(model.new_cache(1, 1))
    return " and ".join(sorted({str(leaf.dtype).removeprefix("torch.") for leaf in leaves if isinstance(leaf, Tensor)}))


def difference(saved: Mapping[str, Any], model: Model) -> str | None:
    """The first difference between a saved fingerprint and `model`, in words; None if they are equal."""
    now = fingerprint(model)
    if saved["vocab_size"] != now["vocab_size"]:
        return f"its vocabulary has {saved['vocab_size']} ids, this model's {now['vocab_size']}"
    if (differs := _first_difference("", saved["config"], now["config"])) is not None:
        return "its {} is {}, this model's {}".format(*differs)
    changed: str | None = None
    for name in {**saved["weights"], **now["weights"]}:
        was, here = saved["weights"].get(name), now["weights"].get(name)
        if was is None or here is None:
            return f"{'this model' if was is None else 'it'} alone has a weight {name}"
        (*kind, digest), (*kind_here, digest_here) = was.split(), here.split()
        if kind != kind_here:
            return f"its {name} is {' '.join(kind)}, this model's {' '.join(kind_here)}"
        if digest != digest_here and "?" not in (digest, digest_here):
            changed = changed or f"its {name} has other numbers than this model's"
    if saved["cache"] != now["cache"]:  # which may have changed norms of keys
        return f"its KV cache has {saved['cache']}, this model's {now['cache']}"
    return changed


def _first_difference(name: str, was: Any, here: Any) -> tuple[str, Any, Any] | None:
    if isinstance(was, dict) and isinstance(here, dict):
        pairs = [(f"{name}.{key}".lstrip("."), was.get(key), here.get(key)) for key in {**was, **here}]
    elif isinstance(was, list) and isinstance(here, list):
        if len(was) != len(here):
            return f"number of {name}", len(was), len(here)
        pairs = [(f"{name}[{index}]", *both) for index, both in enumerate(zip(was, here, strict=True))]
    else:
        return None if was == here else (name, was, here)
    return next((found for pair in pairs if (found := _first_difference(*pair)) is not None), None)


def computed_by(model: Model) -> str:
    """The device and kernels that run a model, such as "cpu native avx512": others may round differently."""
    return " ".join((model.device.type, *(ops.choice() if model.device.type == "cpu" else ())))


def _kind(weight: Any) -> str:
    """The dtype, or the format of quantized weights, and the shape."""
    kind: object
    shape: tuple[int, ...]
    if isinstance(weight, NativeWeight):
        kind, shape = weight.data.dtype, (weight.rows, weight.inputs)
    else:
        kind, shape = weight.format if isinstance(weight, QuantizedWeight) else weight.dtype, weight.shape
    return f"{str(kind).removeprefix('torch.')} {'x'.join(map(str, shape))}"
