"""The build: Onward's modules that compute, and the native library, as hashes of their bytes."""

import functools
import hashlib
import time
import uuid
from pathlib import Path

from onward import native

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
READING = ("checkpoint", "language_model/quantized_copy.py", "language_model/weights.py", "loading.py", "quantization")
_PACKAGE = Path(__file__).parents[1]
_STARTED = time.time()


def build() -> str:
    """A text that is equal for builds with equal bits."""
    library = native.library()
    return f"{_sources()} {'' if library is None else _hash_of((library.path,))}"


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
