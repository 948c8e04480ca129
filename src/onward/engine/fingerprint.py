"""Fingerprints: all that outputs depend on besides the request, namely the model, the device and the build."""

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
# The part that a replica adds, `onward.engine.engine.probe`.
PROBE = "what they compute of one text"
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
    "language_model/infill.py",
    "language_model/options.py",
    "language_model/reasoning.py",
    "language_model/request.py",
    "language_model/runner.py",
    "models",
    "native",
    "ops",
    "program",
    "sampling",
    "schemas",
    "tokenizer",
)
_DIGITS = 8  # of each part
_STARTED = time.time()
_FINGERPRINT = re.compile("-".join([f"[0-9a-f]{{{_DIGITS}}}"] * len(PARTS)))


def bits_fingerprint(model: Model, adapter: AdapterRef | None = None) -> str:
    """A short text: equal fingerprints mean that the same requests give the same bits.

    8 hexadecimal digits for each of `PARTS`, joined by "-". All bytes of the weights count
    (`session_fingerprint.fingerprint`). So does the version of torch, which computes what no kernel does.
    """
    parts = [
        json.dumps(fingerprint(model), sort_keys=True),
        f"{computed_by(model)} {platform.machine()}",
        _build(),
        torch.__version__,
        "" if adapter is None else adapter.digest,
    ]
    return "-".join(map(_digest, parts))


def build_fingerprint() -> str:
    """The part of `bits_fingerprint` for the build: Onward's modules that compute, and the native library."""
    return _digest(_build())


def _build() -> str:
    library = native.library()
    return f"{_sources()} {'' if library is None else _hash_of((library.path,))}"


def _digest(part: str) -> str:
    return hashlib.blake2b(part.encode(), digest_size=_DIGITS // 2).hexdigest()


def check_same_bits(theirs: str, ours: str) -> None:
    """Raise `RequestError` unless two fingerprints are equal, and say what differs."""
    if theirs == ours:
        return
    if not isinstance(theirs, str) or not _FINGERPRINT.fullmatch(theirs):
        raise RequestError(f"a fingerprint is a text such as {ours!r} (Engine.fingerprint); got {theirs!r}")
    raise RequestError(
        "the text was started by an engine with another fingerprint (different: "
        f"{parts_that_differ(theirs, ours)}): resume it where the fingerprints are equal, or submit it again"
    )


def parts_that_differ(theirs: str, ours: str) -> str:
    """The names of the parts in which two fingerprints differ. They may have a probe as their last part."""
    pairs = zip((*PARTS, PROBE), theirs.split("-"), ours.split("-"), strict=False)
    return " and ".join(name for name, left, right in pairs if left != right)


def _sources(package: Path = Path(__file__).parents[1]) -> str:
    """A hash of Onward's own modules that compute, since an installed version may have been edited."""
    return _hash_of(tuple(sorted(file for name in COMPUTING for file in _modules(package / name))))


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
