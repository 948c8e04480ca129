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


def token_texts(
    ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None, before: Sequence[int], tokenizer: Decoder
) -> list[TokenText]:
    """The text of each of `ids`, which follow `before`. A character of several tokens is in the last of them.

    logprobs: of each token, for the texts of the likeliest ids at its place; None for none.
    """
    detokenizer = StreamingDetokenizer(tokenizer.decode, before)
    texts = []
    for at, token in enumerate(ids):
        entry = None if logprobs is None else logprobs[at]
        top = () if entry is None else tuple(_text_of(other, detokenizer) for other, _ in entry.top)
        text = detokenizer.push(token)
        if at == len(ids) - 1:
            text += detokenizer.flush()
        texts.append(TokenText(text, top))
    return texts


def _text_of(token: int, before: StreamingDetokenizer) -> str:
    here = before.fork()
    return here.push(token) or here.flush()
