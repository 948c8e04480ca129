"""Sessions: a text that grows from call to call and reuses its KV cache.

A saved session is an exported prefix (`onward.prefix_store.segment`) with one block, which has all ids. Its key is the
model's fingerprint with the device and kernels, and its root the digest of the adapter, if any. Each tensor of the
cache is a kind: part `<kind>.0` has its first N positions, [1, G, N, D] of a `KVCache`; for sliding layers only the
last of these, from the first block that the next token sees. The metadata has the notes, the capacity of the cache, and
the name, dtype and shape of each tensor.
"""

import json
import os
import re
from collections.abc import Generator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Self, Unpack

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.cache import KVCache
from onward.cache.dense import position_dims
from onward.cache.plan import first_seen
from onward.cache.slot import digest_of
from onward.decoding.shared_cache import PinnedPrefix
from onward.errors import RequestError, SessionError, one_line, warn
from onward.language_model.completion import Completion, Piece
from onward.language_model.fingerprint import as_bytes, computed_by, difference, model_fingerprint
from onward.language_model.language_model import LanguageModel, Messages
from onward.language_model.options import ChatOptionsDict
from onward.language_model.options_dict import GenerateOptionsDict
from onward.language_model.request import Prompt, one_prompt
from onward.models import Cache, Model, padded_length
from onward.prefix_store import Part
from onward.prefix_store.exported import load_prefix, read_prefix, save_prefix
from onward.prefix_store.segment import Segment
from onward.util.text import described

# The canonical form of a whole number; `int` would accept others too.
_WHOLE = re.compile("0|[1-9][0-9]{0,9}")
_PROBE_LENGTHS = (16, 32)


class Session:
    """A language model with the cache of one text, so that the common prefix of successive prompts is processed once.

    Each call takes the whole prompt, as `LanguageModel` does, and returns exactly the tokens of a fresh call. The
    cache is reused up to the first id that differs. So the next turn of a chat costs only its new tokens, and another
    question about the same document only the question. `Completion.cached_tokens` counts the reused positions.

        session = onward.Session(lm)
        first = session.chat(messages)
        messages += [first.message, {"role": "user", "content": "And then?"}]
        second = session.chat(messages)              # processes the new message only
        session.save("talk.safetensors")             # … onward.Session.load("talk.safetensors", lm)

    After an interrupted or abandoned stream the session contains what was processed. A session decodes one text at a
    time, and must not be used by two threads at once. A change of the model's weights clears it.

    lm: the model. notes: your own strings by name, which are saved with the session.
    """

    def __init__(self, lm: LanguageModel) -> None:
        if not isinstance(lm, LanguageModel):
            raise RequestError(f"a session needs a LanguageModel; got {type(lm).__name__}: see onward.load")
        self.lm = lm
        self.notes: dict[str, str] = {}
        self._text = PinnedPrefix(lambda: lm._prefix_cache)

    def __repr__(self) -> str:
        return described(self, f"{len(self.tokens):,} ids cached", repr(self.lm))

    def __reduce__(self) -> NoReturn:
        raise SessionError(
            "a session cannot be copied or pickled with its cache: save it to a file, and load it elsewhere"
        )

    @property
    def tokens(self) -> list[int]:
        """The ids in the KV cache: the last prompt and the generated ids, except for the last one, which is not
        processed yet."""
        return self._text.tokens

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptionsDict]) -> Completion:
        """`LanguageModel.generate` for one prompt. Invalid requests do not change the session."""
        return self.lm.generate(one_prompt(prompt, "a session holds one text and"), cache=self._text, **options)

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptionsDict]) -> Generator[Piece, None, Completion]:
        """`LanguageModel.stream`. Continuing it after another call has started raises `RequestError`."""
        return self.lm.stream(one_prompt(prompt, "a session holds one text and"), cache=self._text, **options)

    def chat(self, messages: Messages, **options: Unpack[ChatOptionsDict]) -> Completion:
        """`LanguageModel.chat` with the whole conversation so far."""
        with_cache: Any = {**options, "cache": self._text}
        return self.lm.chat(messages, **with_cache)

    def stream_chat(self, messages: Messages, **options: Unpack[ChatOptionsDict]) -> Generator[Piece, None, Completion]:
        """`LanguageModel.stream_chat` with the whole conversation so far."""
        with_cache: Any = {**options, "cache": self._text}
        return self.lm.stream_chat(messages, **with_cache)

    def truncate(self, length: int = 0) -> None:
        """Drop the ids from position `length` on. They may stay in the prefix cache, like those of other texts."""
        self._text.truncate(length)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the ids, their keys and values, and the notes to a safetensors file, atomically and readable only by
        its owner. The file is as large as the cache for these positions (see `onward info`). Raises `SessionError` if
        it cannot be written or is not a session, and if the model's cache is not a pytree of tensors."""
        file, model = Path(file), self.lm.model
        if not _are_strings(self.notes):
            raise SessionError(f"the notes of a session are strings by name; got {self.notes!r}")
        if file.exists():
            _read_header(file, f"{str(file)!r} exists and is not a saved session, choose another name")
        if not self._text.is_of(model):  # the cache was filled with other weights
            self.truncate(0)
        tokens, tensors, capacity = self.tokens, dict[str, Tensor](), 0
        if (snapshot := self._text.snapshot()) is not None:
            cache, capacity = snapshot
            tensors, _ = _stored(model, cache, capacity, len(tokens))
        parts = [Part(0, kind, [as_bytes(tensor.detach())]) for kind, tensor in enumerate(tensors.values())]
        metadata = {"capacity": str(capacity), "notes": json.dumps(self.notes), "cache": _shapes(tensors)}
        key = json.dumps({**model_fingerprint(model), "computed_by": computed_by(model)})
        root, block = digest_of(self._text.adapter) if tokens else "", max(1, len(tokens))
        try:
            save_prefix(file, key=key, root=root, ids=tokens, parts=parts, metadata=metadata, block=block)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
            raise SessionError(f"{str(file)!r} cannot be written: {reason}") from error

    @classmethod
    def load(cls, file: str | os.PathLike[str], lm: LanguageModel) -> Self:
        """Load a session for the same model: the same weights in the same dtype or quantization. If it was computed
        with an adapter, one with the same content must be loaded, under any name. One that was computed with a steer
        continues where a request has an equal one.

        Raises:
            SessionError: the file cannot be read, is damaged, is not a session, or is of a newer Onward, another model
                or an adapter that is not loaded.
            ContextOverflowError: there is no room for it in the cache.
        """
        file, model, session = Path(file), lm.model, cls(lm)
        saved = _read_header(file, f"{str(file)!r} is not a saved session or is damaged")
        try:
            saved_model, session.notes = json.loads(saved.key), json.loads(saved.metadata["notes"])
            digest, tokens = saved.root, saved.tokens
            if not _are_strings(session.notes):
                raise ValueError("its notes are not strings by name")
            if [(entry.block, entry.kind) for entry in saved.entries] != [(0, at) for at in range(len(saved.entries))]:
                raise ValueError("its parts are not the tensors of a cache")
            _check_ids(tokens, model.vocab_size)
            capacity = _checked_capacity(saved.metadata["capacity"], len(tokens) if saved.entries else 0)
            saved_by, reason = saved_model["computed_by"], difference(saved_model, model)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise SessionError(f"{str(file)!r} is not a session saved by Onward: {one_line(error)}") from error
        if reason is not None:
            raise SessionError(f"{str(file)!r} is the session of another model: {reason}")
        if model.max_seq_len is not None and len(tokens) > model.max_seq_len:
            raise SessionError(
                f"{str(file)!r} holds {len(tokens)} tokens, but the context is {model.max_seq_len}: load the model "
                "with a larger max_seq_len"
            )
        if digest and lm.adapters.by_digest(digest) is None:
            raise SessionError(
                f"{str(file)!r} was computed with an adapter of digest {digest}, which this model does not have "
                "loaded: use load_adapter"
            )
        if (loaded_by := computed_by(model)) != saved_by:
            warn(
                f"{str(file)!r} was computed by {saved_by!r} and continues on {loaded_by!r}, which may round "
                "differently: its tokens can differ from those of a fresh call"
            )
        if saved.entries:
            cache, length = _restored(file, model, saved, capacity)
            session._text.adopt(model, cache, length, tokens, lm.adapters.by_digest(digest))
        return session


def _are_strings(notes: dict[Any, Any]) -> bool:
    return all(isinstance(text, str) for note in notes.items() for text in note)


def _check_ids(ids: list[int], vocab_size: int | None) -> None:
    if ids and (min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size)):
        raise ValueError(f"its tokens range from {min(ids)} to {max(ids)}, and the vocabulary has {vocab_size}")


def _checked_capacity(text: str, count: int) -> int:
    if not _WHOLE.fullmatch(text) or not count <= int(text) < 2**31:
        raise ValueError(f"its capacity is {text!r}, and its cache holds {count} positions")
    return int(text)


def _stored(model: Model, cache: Cache, capacity: int, count: int) -> tuple[dict[str, Tensor], bool]:
    """Views of the parts of a cache of `capacity` positions that a file has for the first `count`, by name; and whether
    these are parts. A cache whose tensors do not show their positions is stored whole."""
    leaves = {f"cache{pytree.keystr(path)}": leaf for path, leaf in pytree.tree_flatten_with_path(cache)[0]}
    for name, leaf in leaves.items():
        if not isinstance(leaf, Tensor):
            raise SessionError(f"a cache is saved if it is a pytree of tensors; {name} is a {type(leaf).__name__}")
    # The dimension of positions is found by comparing with an empty cache of another length.
    length = next(length for length in _PROBE_LENGTHS if length != capacity)
    dims = position_dims(cache, capacity, model.new_cache(1, length), length) or [None] * len(leaves)
    firsts = [0] * len(leaves)
    blocks = None if model.new_blocks is None else model.new_blocks(1)
    if isinstance(cache, KVCache) and blocks is not None and blocks.windows is not None:
        seen = first_seen(blocks.windows.window, count)
        of_layers = [0 if shape.window is None else seen for shape in blocks.plan.shapes]
        firsts[: 2 * len(of_layers)] = of_layers * 2  # of keys, then of values
    parts = {
        name: leaf if dim is None else leaf.narrow(dim, first, count - first)
        for (name, leaf), dim, first in zip(leaves.items(), dims, firsts, strict=True)
    }
    return parts, None not in dims


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    """The name, dtype and shape of each tensor, as JSON."""
    return json.dumps([[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()])


def _restored(file: Path, model: Model, saved: Segment, capacity: int) -> tuple[Cache, int]:
    """The cache in a file, and its number of positions."""
    count = len(saved.tokens)
    cache = model.new_cache(1, length := padded_length(count, model))
    tensors, shows_positions = _stored(model, cache, length, count)
    if not shows_positions and length != capacity:  # a tensor that was saved whole is as long as its cache was
        try:
            cache, length = model.new_cache(1, capacity), capacity
        except (RuntimeError, MemoryError) as error:
            raise SessionError(
                f"{str(file)!r} needs a cache for {capacity} positions, which cannot be made: {one_line(error)[:200]}"
            ) from error
        tensors, _ = _stored(model, cache, length, count)
    if (shapes := _shapes(tensors)) != saved.metadata["cache"]:
        raise SessionError(
            f"{str(file)!r} doesn't match this model's cache (one with a head as its draft has more tensors): "
            f"{saved.metadata['cache'][:300]} instead of {shapes[:300]}"
        )
    try:
        for tensor, entry in zip(tensors.values(), saved.entries, strict=True):
            content = torch.empty(tensor.shape, dtype=tensor.dtype)
            if not read_prefix(file, [(entry.part, [as_bytes(content)])]):
                raise ValueError("the checksum of its cache does not match")
            tensor.copy_(content)
    except (OSError, ValueError) as error:
        raise SessionError(f"{str(file)!r} is not a saved session or is damaged: {one_line(error)}") from error
    return cache, length


def _read_header(file: Path, message: str) -> Segment:
    """The header of a saved session. `message` begins the error for other files."""
    if file.is_dir():
        raise SessionError(f"{str(file)!r} is a folder, but a session is a file: choose another name")
    try:
        saved = load_prefix(file)
        if not saved.metadata.keys() >= {"capacity", "notes", "cache"}:
            raise ValueError("it is a prefix of something else")
    except OSError as error:
        raise SessionError(f"{str(file)!r} cannot be read: {error.strerror or one_line(error)}") from error
    except ValueError as error:
        reason = one_line(error)
        if _is_of_first_format(file):
            reason = "it is a session in a format that this Onward no longer reads, make the session again"
        raise SessionError(f"{message}: {reason}") from error
    return saved


def _is_of_first_format(file: Path) -> bool:
    with suppress(OSError, ValueError), file.open("rb") as content:
        return b'"onward_session"' in content.read(2**20)
    return False
