"""What the bits of a text depend on beside its request: the model, what computes it, and what that was built from."""

import functools
import hashlib
import json
import platform
import re
import time
import uuid
from pathlib import Path

import torch

from onward import native
from onward.cache import AdapterRef
from onward.errors import RequestError
from onward.language_model.session_fingerprint import computed_by, fingerprint
from onward.models import Model

# The parts of a fingerprint, in order, as an error calls them.
PARTS = (
    "the model (its config, weights or quantization)",
    "the device or the instruction set",
    "the build (Onward or its kernels)",
    "the version of torch",
    "the adapter",
)
# What a replica adds: `onward.engine.engine`.
PROBE = "what they compute of one text"
# The folders and modules of Onward on which the ids and logprobs of a request depend, from its options, its weights and
# its prompt to its text. The others (servers, commands, schedules of engines, files of sessions) change no bits.
COMPUTING = (
    "cache",
    "chat",  # renders prompts, and makes grammars of tools
    "checkpoint",
    "constraints",
    "decoding",
    "distributed",
    "language_model",
    "loading.py",
    "models",
    "native",
    "ops",
    "program",
    "quantization",
    "sampling",
    "schemas",
    "tokenizer",
)
_DIGITS = 8  # of each part
_BEGAN = time.time()
_FINGERPRINT = re.compile("-".join([f"[0-9a-f]{{{_DIGITS}}}"] * len(PARTS)))


def bits_fingerprint(model: Model, adapter: AdapterRef | None = None) -> str:
    """A short text that is the same where the same requests give the same bits.

    Of each of `PARTS` 8 hexadecimal digits, joined by "-". All bytes of the weights count (`sessions.fingerprint`).
    The version of torch counts, for torch computes what no kernel does.
    """
    parts = [
        json.dumps(fingerprint(model), sort_keys=True),
        f"{computed_by(model)} {platform.machine()}",
        f"{_sources()} {_kernels()}",
        torch.__version__,
        "" if adapter is None else adapter.digest,
    ]
    return "-".join(hashlib.blake2b(part.encode(), digest_size=_DIGITS // 2).hexdigest() for part in parts)


def check_same_bits(theirs: str, ours: str) -> None:
    """Raise `RequestError` unless two fingerprints are equal, and say what differs."""
    if theirs == ours:
        return
    if not isinstance(theirs, str) or not _FINGERPRINT.fullmatch(theirs):
        raise RequestError(f"a fingerprint is a text such as {ours!r} (Engine.fingerprint); got {theirs!r}")
    raise RequestError(
        "the text was begun by another engine than this, and would not go on with the same bits: "
        f"{parts_that_differ(theirs, ours)} differ: "
        "resume it where the fingerprints are equal, or submit it anew"
    )


def parts_that_differ(theirs: str, ours: str) -> str:
    """The names of what differs between two fingerprints, which may have a probe as their last part."""
    pairs = zip((*PARTS, PROBE), theirs.split("-"), ours.split("-"), strict=False)
    return " and ".join(name for name, left, right in pairs if left != right)


def _kernels() -> str:
    """A hash of the library whose kernels run; "" without one."""
    library = native.library()
    return "" if library is None else _hash_of((library.path,))


def _sources() -> str:
    """A hash of Onward's own modules that compute: a version may have been changed."""
    folder = Path(__file__).parents[1]
    return _hash_of(tuple(sorted(file for name in COMPUTING for file in _modules(folder / name))))


def _modules(place: Path) -> list[Path]:
    return [place] if place.is_file() else list(place.rglob("*.py"))


@functools.cache
def _hash_of(files: tuple[Path, ...]) -> str:
    """A hash of the files' bytes. One that was put there after this process began may not be what it has loaded: then
    the hash is like no other."""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(file.read_bytes())
        if file.stat().st_ctime > _BEGAN:  # when it came to this name, whatever date it bears
            digest.update(uuid.uuid4().bytes)
    return digest.hexdigest()
