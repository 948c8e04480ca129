"""Tokenizers as llguidance reads them: the bytes of every token, and an id of our own for the end of a text.

The ids that end a text differ from request to request, so llguidance is not told of them. It gets an id past all others
as the end, and where its masks have that id the text may end.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import llguidance
import tokenizers

from onward.checkpoint import JsonTokenizer, Tokenizer
from onward.errors import TokenizerError, one_line

_END = "<|onward:end of the text|>"


@runtime_checkable
class TokenBytes(Protocol):
    """A tokenizer that knows the bytes of its tokens."""

    def token_bytes(self) -> Sequence[bytes | None]:
        """The bytes that each id stands for; None for an id that is no text."""
        ...


class Vocabulary(NamedTuple):
    """tokens: for llguidance. end: the id that stands for the end of the text there. described: what makes the same
    tokens in another process, as JSON."""

    tokens: llguidance.LLTokenizer
    end: int
    described: Callable[[], dict[str, Any]]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """Raises `TokenizerError` where the bytes of tokens are not known."""
        try:
            if isinstance(tokenizer, JsonTokenizer):
                return _of_json(tokenizer)
            if isinstance(tokenizer, TokenBytes):
                return _of_bytes(tokenizer, tokenizer.token_bytes())
        except ValueError as error:
            raise TokenizerError(f"{tokenizer!r} cannot constrain a text ({one_line(error)[:300]})") from error
        raise TokenizerError(
            f"constraints need the bytes of each token, and a {type(tokenizer).__name__} does not tell them: give it a "
            "method token_bytes (onward.constraints.TokenBytes)"
        )


def _of_json(tokenizer: JsonTokenizer) -> Vocabulary:
    inner = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    inner.add_special_tokens([_END])
    end = inner.token_to_id(_END)
    assert end is not None, "it was added"
    tokens = llguidance.LLTokenizer(inner.to_str(), eos_token=end)
    return Vocabulary(tokens, end, lambda: {"json": inner.to_str(), "end": end})


class _Wrapped:
    """What llguidance asks of a tokenizer in Python."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[bytes | None]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [b"<|%d|>" % token if text is None else text for token, text in enumerate(tokens)]
        self.special_token_ids = [token for token, text in enumerate(tokens) if text is None]
        self.eos_token_id = len(self.tokens)
        self.tokens.append(_END.encode())
        self.special_token_ids.append(self.eos_token_id)

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("texts are str")
        return self._tokenizer.encode(text, add_special_tokens=False)

    def described(self) -> dict[str, Any]:
        tokens = [token.decode("latin-1") for token in self.tokens]
        return {"tokens": tokens, "special": self.special_token_ids, "end": self.eos_token_id}


def _of_bytes(tokenizer: Tokenizer, tokens: Sequence[bytes | None]) -> Vocabulary:
    wrapped = _Wrapped(tokenizer, tokens)
    return Vocabulary(
        llguidance.LLTokenizer(llguidance.TokenizerWrapper(wrapped)), wrapped.eos_token_id, wrapped.described
    )
