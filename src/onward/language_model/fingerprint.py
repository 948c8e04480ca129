"""Fingerprints: all that outputs depend on besides the request, namely the model, the device and the build."""

import hashlib
import json
import platform
import re
import weakref
from typing import Any

import torch

from onward.cache import AdapterRef
from onward.errors import RequestError
from onward.language_model.build import build
from onward.language_model.session_fingerprint import computed_by, fingerprint
from onward.models import Model
from onward.models.model import computation

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
_known: dict[int, tuple[Any, dict[str, str]]] = {}


def bits_fingerprint(model: Model, adapter: AdapterRef | None = None) -> str:
    """A short text: equal fingerprints mean that the same requests give the same bits.

    8 hexadecimal digits for each of `PARTS`, joined by "-". All bytes of the weights count
    (`session_fingerprint.fingerprint`), which are read once until they change. So does the version of torch, which
    computes what no kernel does.
    """
    state, digest = computation(model), "" if adapter is None else adapter.digest
    cached = _known.get(id(model))  # several threads may ask at once, and find that the weights have changed
    if cached is None or cached[0] != state:
        if cached is None:
            weakref.finalize(model, _known.pop, id(model), None).atexit = False
        cached = _known[id(model)] = state, {}
    if digest not in cached[1]:
        cached[1][digest] = _bits_fingerprint(model, digest)
    return cached[1][digest]


def _bits_fingerprint(model: Model, adapter: str) -> str:
    parts = [
        json.dumps(fingerprint(model), sort_keys=True),
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
