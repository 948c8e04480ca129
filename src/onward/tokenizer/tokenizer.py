"""Encode text as ids and decode ids, with the `tokenizers` library."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import tokenizers

from onward.errors import CheckpointError, ConfigError, OnwardError, RequestError, TokenizerError, one_line, warn
from onward.tokenizer.text_length import TokenLength, steps_of
from onward.util.text import described
from onward.util.text_input import check_value

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Characters of a text above which it is encoded as a batch of one: `encode` blocks all other threads of Python, and
# batches don't, but they are slower for short texts.
_LONG = 4096


def own_bytes(inner: tokenizers.Tokenizer) -> Callable[[str], bytes | None]:
    """A function from a token's spelling to the bytes that it adds to every text, or None if its text, which has whole
    characters, depends on the tokens before it."""
    kinds = {step["type"] for step in steps_of(inner.decoder, "decoders")}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return byte_level
    return _byte_fallback if "ByteFallback" in kinds else lambda token: None


def byte_level(token: str) -> bytes:
    """The bytes that the ByteLevel decoder writes: a token with a character that is not a byte is text."""
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> bytes | None:
    match = _BYTE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match is not None else None


def _byte_characters() -> dict[str, int]:
    """The byte of each character in a byte-level vocabulary (GPT-2's `bytes_to_unicode`): printable Latin-1 characters
    are themselves, and 256 + n is the n-th of the others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_characters()
# Each byte's character: LETTERS[0x20] is "Ġ".
LETTERS = tuple(sorted(_BYTES, key=_BYTES.__getitem__))


class Tokenizer(Protocol):
    """The tokenizer protocol; bring your own if a checkpoint has no tokenizer.json."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""


@runtime_checkable
class SpecialTokens(Protocol):
    """A tokenizer that can spell the tokens that `decode` skips, so that stop strings can contain them."""

    @property
    def special_tokens(self) -> Mapping[int, str]:
        """The ids that `decode` skips, each with its text."""


@runtime_checkable
class TextLengths(Protocol):
    """A tokenizer that bounds the number of ids of a text without encoding it."""

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of ids of a text, by its length alone; 0 if there is none."""


def special_tokens(tokenizer: Tokenizer) -> Mapping[int, str]:
    """The ids that a tokenizer's `decode` skips, each with its text, if it can spell them."""
    return tokenizer.special_tokens if isinstance(tokenizer, SpecialTokens) else {}


class _named_errors:  # noqa: N801 (used as a statement)
    """Converts errors of the `tokenizers` library, bare `Exception`s and the `BaseException` of a panic, to a
    `TokenizerError` that names the file. (A contextlib generator would be slower, and every streamed token decodes.)"""

    def __init__(self, file: str | Path, task: str = "") -> None:
        self._file = file
        self._task = task

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, OnwardError):
            return
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            return
        does = f"cannot {self._task}" if self._task else "cannot be read"
        raise TokenizerError(f"{self._file} {does} ({one_line(error)[:300]}): download or save it again") from error


class JsonTokenizer:
    """A `Tokenizer` over a tokenizer.json and its tokenizer_config.json.

    Encoding adds the special tokens of tokenizer.json's post-processor. `add_bos_token` of the config, if present,
    decides whether to add the BOS. spelling: ids that `inner` lacks or decodes wrongly, each with the ids of `inner`
    whose texts make up its own; none if `decode` skips it.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        file: str | Path = "tokenizer.json",
        spelling: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        self._inner = inner
        self._file = file
        self._spelling = dict(spelling)  # a mapping proxy cannot be copied or pickled
        with _named_errors(file):
            # Onward checks lengths itself; the tokenizer would truncate or pad silently.
            inner.no_truncation()
            inner.no_padding()
            _check_added_tokens(inner, config)
            ids = (*inner.get_vocab(with_added_tokens=True).values(), *spelling)
            self.vocab_size = 1 + max(ids, default=-1)
            self._limit = self.vocab_size  # the model has no ids from here on
            self.bos_id = _special_id(inner, config, "bos_token")
            self.eos_id = _special_id(inner, config, "eos_token")
            self._adds_bos = self.bos_id is not None and list(inner.encode("").ids[:1]) == [self.bos_id]
        self._add_bos = self._resolve_add_bos(config)
        if _flag(config, "split_special_tokens"):
            warn("tokenizer_config.json says split_special_tokens: here a special token in a text stays that token")
        if _flag(config, "add_eos_token"):
            warn("tokenizer_config.json says add_eos_token, which would end every prompt before its answer: not added")

    @classmethod
    def read(cls, file: Path, config: Mapping[str, Any]) -> "JsonTokenizer":
        """Raises `TokenizerError` for a file that cannot be read."""
        with _named_errors(file):
            inner = tokenizers.Tokenizer.from_file(str(file))
        return cls(inner, config, file)

    def __repr__(self) -> str:
        return described(self, f"vocabulary {self.vocab_size:,}", f"BOS {self.bos_id}", f"EOS {self.eos_id}")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises `RequestError` for a non-str, invalid Unicode (a lone surrogate), or a token without an embedding in
        the model, and `TokenizerError` for a text that cannot be encoded."""
        if not isinstance(text, str):
            raise RequestError(f"a tokenizer encodes a str; got {type(text).__name__}")
        check_value(text, "text")
        with _named_errors(self._file, "encode this text"):
            if len(text) < _LONG:
                ids = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
            else:
                ids = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if add_special_tokens and self._add_bos != self._adds_bos:
            assert self.bos_id is not None
            ids = [self.bos_id, *ids] if self._add_bos else ids[1:]
        if self._limit < self.vocab_size and (outside := [token for token in ids if token >= self._limit]):
            raise RequestError(
                f"the text holds the token {self._inner.id_to_token(outside[0])!r} (id {outside[0]}), and the model's "
                f"vocabulary ends at {self._limit - 1}: leave it out"
            )
        return ids

    def least_tokens(self, text: str) -> int:
        """See `TextLengths`."""
        return 0 if self._token_length is None else self._token_length.least_tokens(text)

    @cached_property
    def _token_length(self) -> TokenLength | None:
        with _named_errors(self._file):
            return TokenLength.of(self._inner, LETTERS)

    def within(self, path: Path, vocab_size: int) -> "JsonTokenizer":
        """This tokenizer for a model with this vocabulary. Added tokens may be past its end: encoding one raises."""
        if self.vocab_size <= vocab_size:
            return self
        added = self._inner.get_added_tokens_decoder()
        others = [token for token in self._inner.get_vocab().values() if token >= vocab_size and token not in added]
        if others:
            raise CheckpointError(_ends_before(path, max(others), vocab_size))
        limited = copy(self)
        limited._limit = vocab_size
        return limited

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens and ids that the tokenizer lacks (such as padding of the model)."""
        with _named_errors(self._file, "decode these ids"):
            try:
                if self._spelling:
                    ids = [part for id in ids for part in self._spelling.get(id, (id,))]
                return str(self._inner.decode(ids, skip_special_tokens=True))
            except (OverflowError, TypeError) as error:
                raise RequestError(f"ids must be whole numbers of 0 or more: {one_line(error)}") from error

    @cached_property
    def special_tokens(self) -> Mapping[int, str]:
        added = self._inner.get_added_tokens_decoder()
        with _named_errors(self._file, "decode its special tokens"):
            return {
                id: str(self._inner.decode([id], skip_special_tokens=False))
                for id, token in added.items()
                if token.special
            }

    def bytes_of(self, id: int) -> bytes | None:
        """See `OwnBytes`."""
        parts = [part for part in self._spelling.get(id, (id,)) if part not in self.special_tokens]
        tokens = [token for part in parts if (token := self._inner.id_to_token(part)) is not None]
        own = [self._own_bytes(token) for token in tokens]
        known = [each for each in own if each is not None]
        return b"".join(known) if len(known) == len(own) else None

    @cached_property
    def _own_bytes(self) -> Callable[[str], bytes | None]:
        with _named_errors(self._file):
            return own_bytes(self._inner)

    def tokens(self) -> list[str | None]:
        """The token of every id as spelled in the vocabulary; None for an id without a token."""
        return [self._token(id) for id in range(min(self.vocab_size, self._limit))]

    def _token(self, id: int) -> str | None:
        token: str | None = self._inner.id_to_token(id)
        if token is None and len(same := self._spelling.get(id, ())) == 1:
            token = self._inner.id_to_token(same[0])
        return token

    @property
    def decoded_otherwise(self) -> list[int]:
        """The ids that `decode` handles, but a tokenizer made from `to_json` does not."""
        return sorted(id for id, parts in self._spelling.items() if parts)

    def to_json(self) -> str:
        """The content of an equivalent tokenizer.json, without tokens past the model's vocabulary."""
        if self._limit == self.vocab_size:
            return self._inner.to_str()
        content = json.loads(self._inner.to_str())
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < self._limit]
        return json.dumps(content)

    def _resolve_add_bos(self, config: Mapping[str, Any]) -> bool:
        add_bos = _flag(config, "add_bos_token")
        if add_bos and self.bos_id is None:
            warn("tokenizer_config.json says add_bos_token, but names no bos_token: none is added")
            return False
        return self._adds_bos if add_bos is None else add_bos


def check_vocabulary(path: Path, vocab_size: int, tokenizer: Tokenizer | None, eos: tuple[int, ...]) -> None:
    """Raise unless the model's vocabulary includes the tokenizer's ids and the EOS ids; it may have more (padding)."""
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise CheckpointError(_ends_before(path, tokenizer.vocab_size - 1, vocab_size))
    if outside := [token for token in eos if token >= vocab_size]:
        raise ConfigError(
            f"{path}: eos_token_id names id {outside[0]}, but the model's vocabulary ends at {vocab_size - 1}"
        )


def _ends_before(path: Path, last: int, vocab_size: int) -> str:
    return (
        f"{path}: the tokenizer has ids up to {last}, but the model's vocabulary ends at {vocab_size - 1}: they are of "
        "different models"
    )


def token_text(value: object) -> str | None:
    """A special token of tokenizer_config.json: a string, or an object with its content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _id_of(inner: tokenizers.Tokenizer, text: str) -> int | None:
    try:
        return inner.token_to_id(text)
    except UnicodeEncodeError:  # a lone surrogate, which no tokenizer has
        return None


def _special_id(inner: tokenizers.Tokenizer, config: Mapping[str, Any], name: str) -> int | None:
    if config.get(name) is None:
        return None
    text = token_text(config[name])
    if text is None:
        raise TokenizerError(
            f"tokenizer_config.json: {name} must be a string or have a 'content'; got {config[name]!r}"
        )
    token_id = _id_of(inner, text)
    if token_id is None:
        raise TokenizerError(
            f"tokenizer_config.json names {name} {text!r}, which tokenizer.json does not have: are they of one model?"
        )
    return token_id


def _check_added_tokens(inner: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Raise if tokenizer.json lacks an added token: it would split the token, which may mark turns."""
    added = config.get("added_tokens_decoder") or {}
    if not isinstance(added, Mapping):
        raise TokenizerError(
            f"tokenizer_config.json: added_tokens_decoder must be an object; got {type(added).__name__}"
        )
    for added_id, token in added.items():
        text = token_text(token)
        token_id = None if text is None else _id_of(inner, text)
        if str(token_id) != added_id:
            has = "does not have" if token_id is None else f"has as id {token_id}"
            raise TokenizerError(
                f"tokenizer_config.json adds the token {text!r} as id {added_id}, which tokenizer.json {has}: "
                "are they of one model?"
            )


def _flag(config: Mapping[str, Any], name: str) -> bool | None:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise TokenizerError(f"tokenizer_config.json: {name} must be true or false; got {value!r}")
    return value
