"""The texts of single tokens, which add up to the whole."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from onward.decoding.detokenizer import StreamingDetokenizer
from onward.decoding.token import TokenLogprobs


class Decoder(Protocol):
    """What a tokenizer has for it."""

    def decode(self, ids: Sequence[int]) -> str: ...


class TokenText(NamedTuple):
    """text: of a token. top: of those that might have stood there, as its logprobs list them."""

    text: str
    top: tuple[str, ...] = ()


class TokenTexts:
    """The texts of tokens as they come. A token that ends inside a character waits for the one that completes it."""

    def __init__(self, before: Sequence[int], tokenizer: Decoder) -> None:
        """before: the ids that the tokens follow."""
        self._detokenizer = StreamingDetokenizer(tokenizer.decode, before)
        self._waiting: list[TokenText] = []

    def push(self, token: int, entry: TokenLogprobs | None = None) -> list[TokenText]:
        """The texts that are final with this token: its own, and before it those that waited; none if it has to wait.

        entry: for the texts of the likeliest ids at its place.
        """
        top = () if entry is None else tuple(_text_of(other, self._detokenizer) for other, _ in entry.top)
        text = self._detokenizer.push(token)
        self._waiting.append(TokenText(text, top))
        return self._final() if text else []

    def flush(self) -> list[TokenText]:
        """The texts that wait, when no token follows: an unfinished character is in the last of them."""
        text = self._detokenizer.flush()
        if self._waiting:
            self._waiting[-1] = TokenText(self._waiting[-1].text + text, self._waiting[-1].top)
        return self._final()

    def _final(self) -> list[TokenText]:
        final, self._waiting = self._waiting, []
        return final


def token_texts(
    ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None, before: Sequence[int], tokenizer: Decoder
) -> list[TokenText]:
    """The text of each of `ids`, which follow `before`. A character of several tokens is in the last of them.

    logprobs: of each token, for the texts of the likeliest ids at its place; None for none.
    """
    texts = TokenTexts(before, tokenizer)
    final: list[TokenText] = []
    for at, token in enumerate(ids):
        final += texts.push(token, None if logprobs is None else logprobs[at])
    return final + texts.flush()


def _text_of(token: int, before: StreamingDetokenizer) -> str:
    here = before.fork()
    return here.push(token) or here.flush()
