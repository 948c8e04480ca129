"""The texts of single tokens, which add up to the whole."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from onward.decoding.detokenizer import REPLACEMENT, StreamingDetokenizer
from onward.decoding.token import TokenLogprobs


class Decoder(Protocol):
    """The method of a tokenizer that texts of tokens need."""

    def decode(self, ids: Sequence[int]) -> str: ...


@runtime_checkable
class OwnBytes(Protocol):
    """A tokenizer that knows the bytes of tokens that are a part of a character."""

    def bytes_of(self, id: int) -> bytes | None:
        """The bytes that a token adds to every text; empty for one that `decode` leaves out. None where they are those
        of the text that `decode` adds for it."""
        ...


class TokenText(NamedTuple):
    """A token of a text.

    text: the characters that are complete with it. bytes: its own; those of a text's tokens add up to the text in
    UTF-8. top: the likeliest ids at its place, as its logprobs list them. Their text is the one that they would have
    had in its place; for a part of a character it is written as OpenAI does, "bytes:\\xe2\\x82".
    """

    text: str
    bytes: bytes
    top: tuple["TokenText", ...] = ()


class TokenTexts:
    """The texts of tokens as they come. A token that ends inside a character waits for the one that completes it."""

    def __init__(self, before: Sequence[int], tokenizer: Decoder) -> None:
        """before: the ids that the tokens follow."""
        self._detokenizer = StreamingDetokenizer(tokenizer.decode, before)
        self._bytes_of = tokenizer.bytes_of if isinstance(tokenizer, OwnBytes) else None
        self._waiting: list[TokenText] = []

    def push(self, token: int, entry: TokenLogprobs | None = None) -> list[TokenText]:
        """The texts that are final with this token: its own, and before it those that waited; none if it has to wait.

        entry: for the texts of the likeliest ids at its place.
        """
        begun = b"".join(waiting.bytes for waiting in self._waiting)
        top = () if entry is None else tuple(self._alternative(other, begun) for other, _ in entry.top)
        own = None if self._bytes_of is None else self._own_bytes(token, self._bytes_of, begun)
        text = self._detokenizer.push(token)
        self._waiting.append(TokenText(text, text.encode("utf-8", "replace") if own is None else own, top))
        return self._final() if text else []

    def flush(self) -> list[TokenText]:
        """The texts that wait, when no token follows: an unfinished character is in the last of them."""
        text = self._detokenizer.flush()
        if self._waiting:
            last = self._waiting[-1]
            own = last.bytes if self._bytes_of is not None else text.encode("utf-8", "replace")
            self._waiting[-1] = TokenText(last.text + text, own, last.top)
        return self._final()

    def _final(self) -> list[TokenText]:
        final, self._waiting = self._waiting, []
        return final

    def _own_bytes(self, token: int, bytes_of: Callable[[int], bytes | None], begun: bytes) -> bytes:
        """begun: the bytes of an unfinished character before it."""
        text = self._detokenizer.added_by(token)
        if begun or REPLACEMENT in text:
            own = bytes_of(token)
            if own is not None:
                return own
        return text.encode("utf-8", "replace")

    def _alternative(self, token: int, begun: bytes) -> TokenText:
        if self._bytes_of is None:
            text = self._detokenizer.added_by(token)
            return TokenText(text, text.encode("utf-8", "replace"))
        own = self._own_bytes(token, self._bytes_of, begun)
        for whole in (begun + own, own) if own else ():
            try:
                return TokenText(whole.decode(), own)
            except UnicodeDecodeError:
                continue
        return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in own) if own else "", own)


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
