"""Encode text as ids and decode ids, with the `tokenizers` library."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from onward.errors import CheckpointError, ConfigError, OnwardError, RequestError, TokenizerError, one_line, warn
from onward.reprs import described


class Tokenizer(Protocol):
    """What decoding needs of a tokenizer; bring your own if a checkpoint has no tokenizer.json."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        ...


class _named_errors:  # noqa: N801 (used as a statement)
    """Turns what the `tokenizers` library raises into a `TokenizerError` that names the file.

    The library raises bare `Exception`s. Where its Rust code panics, it raises a `BaseException` of a class that it
    does not export. (This is no generator of contextlib, which is slower: every streamed token decodes a text.)
    """

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
    """A `Tokenizer` over a tokenizer.json and what its tokenizer_config.json says of it.

    A text gets the special tokens that tokenizer.json's own post-processor adds. If the config has `add_bos_token`, its
    value decides whether a text begins with the BOS.
    """

    def __init__(
        self, inner: tokenizers.Tokenizer, config: Mapping[str, Any], file: str | Path = "tokenizer.json"
    ) -> None:
        self._inner = inner
        self._file = file
        with _named_errors(file):
            # Onward checks lengths itself; the tokenizer would cut or pad in silence.
            inner.no_truncation()
            inner.no_padding()
            _check_added_tokens(inner, config)
            self.vocab_size = 1 + max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
            self.bos_id = _special_id(inner, config, "bos_token")
            self.eos_id = _special_id(inner, config, "eos_token")
            self._adds_bos = self.bos_id is not None and list(inner.encode("").ids[:1]) == [self.bos_id]
        self._add_bos = self._resolve_add_bos(config)
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
        """Raises `RequestError` for what is no str, and for text that is no valid Unicode (a lone surrogate); raises
        `TokenizerError` for a text that this tokenizer has no ids for."""
        if not isinstance(text, str):
            raise RequestError(f"a tokenizer encodes a str; got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode: {text[error.start]!r} at {error.start} is half a character; "
                "was it read with the right encoding?"
            ) from error
        with _named_errors(self._file, "encode this text"):
            ids = list(self._inner.encode(text, add_special_tokens=add_special_tokens).ids)
        if not add_special_tokens or self._add_bos == self._adds_bos:
            return ids
        assert self.bos_id is not None
        return [self.bos_id, *ids] if self._add_bos else ids[1:]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens and ids that the tokenizer lacks (the model's may be padding)."""
        with _named_errors(self._file, "decode these ids"):
            try:
                return str(self._inner.decode(list(ids), skip_special_tokens=True))
            except (OverflowError, TypeError) as error:
                raise RequestError(f"ids must be whole numbers of 0 or more: {one_line(error)}") from error

    def tokens(self) -> list[str | None]:
        """The token of every id as the vocabulary spells it; None for an id that has none."""
        return [self._inner.id_to_token(token) for token in range(self.vocab_size)]

    def to_json(self) -> str:
        """The content of a tokenizer.json that makes the same ids."""
        return self._inner.to_str()

    def _resolve_add_bos(self, config: Mapping[str, Any]) -> bool:
        add_bos = _flag(config, "add_bos_token")
        if add_bos and self.bos_id is None:
            warn("tokenizer_config.json says add_bos_token, but names no bos_token: none is added")
            return False
        return self._adds_bos if add_bos is None else add_bos


def check_vocabulary(path: Path, vocab_size: int, tokenizer: Tokenizer | None, eos: tuple[int, ...]) -> None:
    """Raise unless the model's vocabulary has the tokenizer's ids and the EOS ids; it may have more (padding)."""
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, but the model's vocabulary ends at "
            f"{vocab_size - 1}: they are of different models"
        )
    if outside := [token for token in eos if token >= vocab_size]:
        raise ConfigError(
            f"{path}: eos_token_id names id {outside[0]}, but the model's vocabulary ends at {vocab_size - 1}"
        )


def token_text(value: object) -> str | None:
    """A special token as tokenizer_config.json writes it: a string, or an object with its content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _id_of(inner: tokenizers.Tokenizer, text: str) -> int | None:
    """None if the tokenizer does not have the token. No tokenizer can have half a character (a lone surrogate)."""
    try:
        token_id: int | None = inner.token_to_id(text)
    except UnicodeEncodeError:
        return None
    return token_id


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
    """Raise if tokenizer.json lacks an added token: it would cut the token, which may mark turns, in pieces."""
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
