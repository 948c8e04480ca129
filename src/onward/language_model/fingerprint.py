"""Fingerprints: all that outputs depend on besides the request, namely the model, the device and the build.

**The model**: its config, and a digest of each weight, as saved sessions have them. Digests do not depend on the layout
of weights: a model packed for another machine's kernels has the same fingerprint. **The build**: Onward's modules that
compute, and the native library, as hashes of their bytes.
"""

import functools
import hashlib
import json
import platform
import re
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward import native, ops
from onward.cache import AdapterRef
from onward.errors import RequestError
from onward.models import Model, architecture_of
from onward.models.model import WeightsVersion, computation
from onward.native.machine import default_threads
from onward.ops import QuantizedWeight
from onward.ops.packed import NativeWeight
from onward.util.process import module_lock

WEIGHTS = (QuantizedWeight, NativeWeight)
# Bytes that one thread reads at a time: large enough to hide its overhead, small enough for unpacked copies.
_CHUNK = 8 << 20
_BLOCK = 16  # rows of a block of `NativeWeight`

_known: dict[int, tuple[WeightsVersion, dict[str, str]]] = {}  # by the id of a live model
_lock = module_lock(globals())


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
        return {name: _digest_of(weight, pool) for name, weight in weights.items()}


def _digest_of(weight: Any, pool: ThreadPoolExecutor) -> str:
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


def model_fingerprint(model: Model) -> dict[str, Any]:
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
    """The weights of `model_fingerprint`."""
    digests = digests_of(model)
    return {name: f"{_kind(weight)} {digests[name]}" for name, weight in weights_of(model).items()}


def _cache_dtypes(model: Model) -> str:
    leaves = pytree.tree_leaves(model.new_cache(1, 1))
    return " and ".join(sorted({str(leaf.dtype).removeprefix("torch.") for leaf in leaves if isinstance(leaf, Tensor)}))


def difference(saved: Mapping[str, Any], model: Model) -> str | None:
    """The first difference between a saved fingerprint and `model`, in words; None if they are equal."""
    now = model_fingerprint(model)
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
    """The device and kernels that run a model, such as "cpu native avx512": others may round differently.

    Instruction sets with the same bits have one name. Where a forward calls functions of torch, because it isn't a
    built-in family's or no kernels are used, those that torch uses are named too: its softmax depends on them.
    """
    if model.device.type != "cpu":
        return model.device.type
    form, isa = ops.choice()
    kernels = f"cpu {form} {native.bits_of(isa)}"
    if form == "native" and architecture_of(model) is not None:
        return kernels
    return f"{kernels} torch {torch.backends.cpu.get_cpu_capability()}"


def _kind(weight: Any) -> str:
    """The dtype, or the format of quantized weights, and the shape."""
    kind: object
    shape: tuple[int, ...]
    if isinstance(weight, NativeWeight):
        kind, shape = weight.data.dtype, (weight.rows, weight.inputs)
    else:
        kind, shape = weight.format if isinstance(weight, QuantizedWeight) else weight.dtype, weight.shape
    return f"{str(kind).removeprefix('torch.')} {'x'.join(map(str, shape))}"


# ── the build ──

# The folders and modules of Onward that compute the ids and logprobs of a request. `chat` renders prompts and makes
# grammars of tools, `schemas` makes grammars. Weights count by their digests, whichever code read or quantized them.
# The others (servers, commands, the engine, session files) change no bits.
COMPUTING = (
    "cache",
    "chat",
    "constraints",
    "decoding",
    "distributed/group.py",
    "distributed/pipeline.py",
    "language_model/chat.py",
    "language_model/embedding.py",
    "language_model/infill.py",
    "language_model/options.py",
    "language_model/reasoning.py",
    "language_model/request.py",
    "language_model/runner.py",
    "language_model/steering.py",
    "language_model/tapped.py",
    "models",
    "native",
    "ops",
    "program",
    "sampling",
    "schemas",
    "tokenizer",
)
# Those that read and quantize weights, besides.
READING = ("checkpoint", "language_model/weights_copy.py", "language_model/weights.py", "loading.py", "quantization")
_PACKAGE = Path(__file__).parents[1]
_STARTED = time.time()


def build() -> str:
    """A text that is equal for builds with equal bits."""
    libraries = native.libraries_of(native.bits_of(native.isa()))
    return f"{_sources()} {_hash_of(tuple(libraries)) if libraries else ''}"


def reading_build() -> str:
    """A text that is equal for builds that read equal weights from a checkpoint."""
    return f"{_sources(names=READING)} {build()}"


@functools.cache
def _sources(package: Path = _PACKAGE, names: tuple[str, ...] = COMPUTING) -> str:
    """A hash of Onward's own modules: an installed version may have been edited."""
    return _hash_of(tuple(sorted(file for name in names for file in _modules(package / name))))


def _modules(place: Path) -> list[Path]:
    return [place] if place.suffix else list(place.rglob("*.py"))


@functools.cache
def _hash_of(files: tuple[Path, ...]) -> str:
    """A hash of the files' bytes. Files changed after this process started may not be those it has loaded, so they get
    a unique hash."""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(file.read_bytes())
        if file.stat().st_ctime > _STARTED:  # unlike mtime it cannot be set
            digest.update(uuid.uuid4().bytes)
    return digest.hexdigest()


# ── the model, the device and the build ──

# The parts of a fingerprint, in order, as an error calls them.
PARTS = (
    "the model (its config, weights or quantization)",
    "the device or the instruction set",
    "the build (Onward or its kernels)",
    "the version of torch",
    "the adapter or the steering",
)
# The part that a replica adds, `onward.engine.engine.probe`.
PROBE = "what they compute of one text"
_DIGITS = 8  # of each part
_FINGERPRINT = re.compile("-".join([f"[0-9a-f]{{{_DIGITS}}}"] * len(PARTS)))
# By the id of a live model: its weights and kernels, and its fingerprints by the digest of the adapter.
_known_bits: dict[int, tuple[Any, dict[str, str]]] = {}


def bits_fingerprint(model: Model, adapter: AdapterRef | None = None) -> str:
    """A short text: equal fingerprints mean that the same requests give the same bits.

    8 hexadecimal digits for each of `PARTS`, joined by "-". All bytes of the weights count
    (`model_fingerprint`), which are read once until they change. So does the version of torch, which
    computes what no kernel does.
    """
    state, digest = computation(model), "" if adapter is None else adapter.digest
    cached = _known_bits.get(id(model))  # several threads may ask at once, and find that the weights have changed
    if cached is None or cached[0] != state:
        if cached is None:
            weakref.finalize(model, _known_bits.pop, id(model), None).atexit = False
        cached = _known_bits[id(model)] = state, {}
    if digest not in cached[1]:
        cached[1][digest] = _bits_fingerprint(model, digest)
    return cached[1][digest]


def _bits_fingerprint(model: Model, adapter: str) -> str:
    parts = [
        json.dumps(model_fingerprint(model), sort_keys=True),
        f"{computed_by(model)} {platform.machine()}",
        build(),
        torch.__version__,
        adapter,
    ]
    return "-".join(map(_digest, parts))


def with_changes(fingerprint: str, digest: str) -> str:
    """A fingerprint without an adapter as that of requests whose adapter and steering have this digest."""
    return "-".join([*fingerprint.split("-")[: len(PARTS) - 1], _digest(digest)])


def build_fingerprint() -> str:
    """The part of `bits_fingerprint` for the build: Onward's modules that compute, and the native library."""
    return _digest(build())


def _digest(part: str) -> str:
    return hashlib.blake2b(part.encode(), digest_size=_DIGITS // 2).hexdigest()


def check_same_bits(theirs: str, ours: str) -> None:
    """Raise `RequestError` unless two fingerprints are equal, and say what differs."""
    if theirs == ours:
        return
    check_fingerprint(theirs)
    raise RequestError(
        "the text was started by an engine with another fingerprint (different: "
        f"{parts_that_differ(theirs, ours)}): resume it where the fingerprints are equal, or submit it again"
    )


def check_fingerprint(text: object) -> None:
    """Raise `RequestError` unless a value has the form of a fingerprint."""
    if not isinstance(text, str) or not _FINGERPRINT.fullmatch(text):
        example = "-".join(["0123abcd"] * len(PARTS))
        raise RequestError(f"a fingerprint is a text such as {example!r} (Engine.fingerprint); got {text!r}")


def parts_that_differ(theirs: str, ours: str) -> str:
    """The names of the parts in which two fingerprints differ. They may have a probe as their last part."""
    pairs = zip((*PARTS, PROBE), theirs.split("-"), ours.split("-"), strict=False)
    return " and ".join(name for name, left, right in pairs if left != right)
