"""Streaming text from tokens, without stop strings and incomplete characters."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, Self, runtime_checkable

from onward.sampling.logprobs import TokenLogprobs
from onward.util.text import unfinished

REPLACEMENT = "\ufffd"
# The number of a prompt's last ids that are decoded again with the output. More than one because of special tokens.
_CONTEXT = 8
# Bytes of a character in UTF-8.
_MAX_BYTES = 4


class StreamingDetokenizer:
    """Emits each character as soon as all of its bytes are there.

    A token may hold part of a character, and its text may depend on the previous token (a leading space, for example).
    So the ids since the last emitted text are decoded together with the ids of that text. An incomplete character
    decodes to the replacement character: text is emitted as soon as it does not end in one. The pieces add up to
    `decode` of all ids if these are valid UTF-8. Byte fallback replaces every character of a run of bytes with an
    invalid one; here characters that were already emitted stay.

    decode: ids to text.
    before: the preceding ids, whose text is not emitted. They keep the leading space of the first word after a prompt,
        which some tokenizers drop at the start of a text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._context = _whole_end(decode, before)  # the last emitted ids
        self._pending: list[int] = []  # ids whose text has not been emitted

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._added(self._context, self._pending)
        if text.endswith(REPLACEMENT) or not text:
            return ""
        self._context, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """The rest of the text; an incomplete character becomes the replacement character."""
        text = self._added(self._context, self._pending)
        self._context, self._pending = [], []
        return text

    def added_by(self, token_id: int) -> str:
        """The text that a token would add here, without an incomplete character before it."""
        return self._added(self._context + self._pending, [token_id])

    def fork(self) -> Self:
        """An independent copy."""
        other = copy.copy(self)
        other._context, other._pending = self._context.copy(), self._pending.copy()
        return other

    def _added(self, ids: list[int], more: list[int]) -> str:
        before, text = self._decode(ids), self._decode(ids + more)
        if REPLACEMENT in text[: len(before)] and not text.startswith(before):
            return self._decode(more)  # a byte broke the characters of the bytes before it
        return text[len(before) :]


def _whole_end(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[int]:
    """The last ids from the start of a character on: byte fallback breaks all characters of a run of bytes that starts
    inside one. Empty if the ids end inside a character, which is then no part of the text."""
    last = list(ids[-_CONTEXT:])
    starts = range(min(_MAX_BYTES, len(last)))
    return next((last[start:] for start in starts if not decode(last[start:]).endswith(REPLACEMENT)), [])


class SpecialTokenMark(NamedTuple):
    """A meaningful special token, which is not part of the text.

    position: the number of characters before it, if no stop string ends the text earlier. at: its index among the
    tokens. text: its spelling.
    """

    position: int
    at: int
    text: str


class TextStream(Protocol):
    """Converts a row's tokens to text that is final when it is emitted."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, if any."""

    @property
    def marks(self) -> Sequence[SpecialTokenMark]:
        """The special tokens to report so far, in order."""

    @property
    def ends(self) -> Sequence[int]:
        """The number of complete characters after each token, including marks; empty if marks are not reported."""

    def push(self, token_id: int) -> str: ...

    def flush(self, eos: int | None = None) -> str:
        """The remaining text at the end. eos: the id that ended the sequence, if any."""

    def fork(self) -> Self: ...


class NoTextStream:
    """A `TextStream` for rows that need no text: it is always empty."""

    stopped_by = None
    marks: Sequence[SpecialTokenMark] = ()
    ends: Sequence[int] = ()

    def push(self, token_id: int) -> str:
        return ""

    def flush(self, eos: int | None = None) -> str:
        return ""

    def fork(self) -> Self:
        return self


class _Hidden(NamedTuple):
    """The characters of a special token in the pending text. mark: reported when they are final, if any."""

    begin: int
    end: int
    mark: SpecialTokenMark | None


class StopStrings:
    """A `TextStream` that ends before the first stop string, which may span several tokens.

    Stop strings are matched with and without special tokens (including the eos), which are never part of the text. Text
    that may begin a stop string is pending until it is clear that it does not.

    marks: the special tokens to report, with their spelling; None reports nothing. special: the spelling of the others.
    """

    def __init__(
        self,
        detokenizer: StreamingDetokenizer,
        stop: Sequence[str] = (),
        marks: Mapping[int, str] | None = None,
        special: Mapping[int, str] | None = None,
    ) -> None:
        self.stopped_by: str | None = None
        self.marks: list[SpecialTokenMark] = []
        self.ends: list[int] = []
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._marks, self._notes_ends = marks or {}, marks is not None
        self._special = {**(special or {}), **self._marks} if self._stop else self._marks
        self._pending = ""
        self._hidden: tuple[_Hidden, ...] = ()  # special tokens in the pending text
        self._tokens = self._characters = self._mark_characters = 0  # so far, including pending text

    def push(self, token_id: int) -> str:
        text = self._detokenizer.push(token_id)
        self._characters += len(text)
        ready = self._admit(text)
        if token_id in self._special:
            mark_text = self._special[token_id]
            mark = None
            if token_id in self._marks:
                mark = SpecialTokenMark(self._characters, self._tokens, mark_text)
                self._mark_characters += len(mark_text)
            ready += self._admit_broken(mark_text) + self._admit(mark_text, _Hidden(0, len(mark_text), mark))
        self._tokens += 1
        if self._notes_ends:
            self.ends.append(self._characters + self._mark_characters)
        return ready

    def flush(self, eos: int | None = None) -> str:
        text = self._admit(self._detokenizer.flush())
        if eos is not None and eos in self._special:
            mark_text = self._special[eos]
            text += self._admit(mark_text, _Hidden(0, len(mark_text), None))
        return text + self._release(len(self._pending))

    def fork(self) -> Self:
        other = copy.copy(self)
        other._detokenizer = self._detokenizer.fork()
        other.marks, other.ends = self.marks.copy(), self.ends.copy()
        return other

    def _admit(self, text: str, hidden: _Hidden | None = None) -> str:
        """Add pending text and return what is final now. hidden: for the text of a special token."""
        if self.stopped_by is not None:
            return ""
        if hidden is not None:
            begin = len(self._pending)
            self._hidden += (_Hidden(begin, begin + hidden.end, hidden.mark),)
        self._pending += text
        starts = {stop: start for stop in self._stop if (start := self._find(stop)) >= 0}
        if not starts:
            return self._release(self._certain())
        self.stopped_by = min(starts, key=starts.__getitem__)
        ready = self._release(starts[self.stopped_by])
        self._pending, self._hidden = "", ()
        return ready

    def _find(self, stop: str) -> int:
        """The index of a stop string in the pending text, or -1."""
        start = self._pending.find(stop)
        if self._hidden and (in_shown := self._shown().find(stop)) >= 0:
            place = self._place(in_shown)
            return place if start < 0 else min(start, place)
        return start

    def _certain(self) -> int:
        """The number of pending characters that cannot be part of a stop string."""
        if not self._stop:
            return len(self._pending)
        certain = len(self._pending) - unfinished(self._pending, self._stop)
        if self._hidden:
            shown = self._shown()
            certain = min(certain, self._place(len(shown) - unfinished(shown, self._stop)))
        return certain

    def _shown(self) -> str:
        ends = [0, *(hidden.end for hidden in self._hidden)]
        begins = [*(hidden.begin for hidden in self._hidden), len(self._pending)]
        return "".join(self._pending[end:begin] for end, begin in zip(ends, begins, strict=True))

    def _place(self, index: int) -> int:
        """The index in the pending text of the character at `index` in `_shown`."""
        for begin, end, _ in self._hidden:
            if index < begin:
                break
            index += end - begin
        return index

    def _admit_broken(self, special: str) -> str:
        """The character that a special token interrupts, if that completes a stop string. Otherwise it stays pending,
        because the rest of the character may follow."""
        if not self._stop or self.stopped_by is not None or not (broken := self._detokenizer.fork().flush()):
            return ""
        text = self._pending + broken + special
        return self._admit(self._detokenizer.flush()) if any(stop in text for stop in self._stop) else ""

    def _release(self, end: int) -> str:
        """Emit the first `end` pending characters without special tokens."""
        text, self._pending = self._pending[:end], self._pending[end:]
        if not self._hidden:
            return text
        shown, at = "", 0
        for begin, after, mark in self._hidden:
            shown, at = shown + text[at:begin], after
            if mark is not None and after <= end:
                self.marks.append(mark)
        self._hidden = tuple(
            _Hidden(max(0, begin - end), after - end, mark) for begin, after, mark in self._hidden if after > end
        )
        return shown + text[at:]


class Decoder(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


@runtime_checkable
class OwnBytes(Protocol):
    """A tokenizer that knows the bytes of tokens with incomplete characters."""

    def bytes_of(self, id: int) -> bytes | None:
        """The bytes that a token adds to every text, empty if `decode` skips it; None if they are those of its text."""


class TokenText(NamedTuple):
    """The text of a token.

    text: the characters that it completes. bytes: its own; those of all tokens add up to the text in UTF-8. top: the
    most likely ids at its place, in the order of its logprobs, with the text that they would have had there; part of a
    character is written as OpenAI does, "bytes:\\xe2\\x82".
    """

    text: str
    bytes: bytes
    top: tuple["TokenText", ...] = ()


class TokenTexts:
    """The texts of streamed tokens. A token that ends inside a character waits for the one that completes it."""

    def __init__(self, before: Sequence[int], tokenizer: Decoder) -> None:
        """before: the ids that the tokens follow."""
        self._detokenizer = StreamingDetokenizer(tokenizer.decode, before)
        self._bytes_of = tokenizer.bytes_of if isinstance(tokenizer, OwnBytes) else None
        self._waiting: list[TokenText] = []

    def push(self, token: int, entry: TokenLogprobs | None = None) -> list[TokenText]:
        """The texts that are final with this token: the waiting ones and its own, or none. entry: its logprobs."""
        incomplete = b"".join(waiting.bytes for waiting in self._waiting)
        top = () if entry is None else tuple(self._alternative(other, incomplete) for other, _ in entry.top)
        own = None if self._bytes_of is None else self._own_bytes(token, self._bytes_of, incomplete)
        text = self._detokenizer.push(token)
        self._waiting.append(TokenText(text, text.encode("utf-8", "replace") if own is None else own, top))
        return self._final() if text else []

    def flush(self) -> list[TokenText]:
        """The waiting texts at the end: an incomplete character is in the last of them."""
        text = self._detokenizer.flush()
        if self._waiting:
            last = self._waiting[-1]
            own = last.bytes if self._bytes_of is not None else text.encode("utf-8", "replace")
            self._waiting[-1] = TokenText(last.text + text, own, last.top)
        return self._final()

    def _final(self) -> list[TokenText]:
        final, self._waiting = self._waiting, []
        return final

    def _own_bytes(self, token: int, bytes_of: Callable[[int], bytes | None], incomplete: bytes) -> bytes:
        text = self._detokenizer.added_by(token)
        if incomplete or REPLACEMENT in text:
            own = bytes_of(token)
            if own is not None:
                return own
        return text.encode("utf-8", "replace")

    def _alternative(self, token: int, incomplete: bytes) -> TokenText:
        if self._bytes_of is None:
            text = self._detokenizer.added_by(token)
            return TokenText(text, text.encode("utf-8", "replace"))
        own = self._own_bytes(token, self._bytes_of, incomplete)
        for whole in (incomplete + own, own) if own else ():
            try:
                return TokenText(whole.decode(), own)
            except UnicodeDecodeError:
                continue
        return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in own) if own else "", own)


def token_texts(
    ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None, before: Sequence[int], tokenizer: Decoder
) -> list[TokenText]:
    """The text of each of `ids` after `before`. A character of several tokens is in the last of them.

    logprobs: of each token, for the texts of the most likely ids at its place.
    """
    texts = TokenTexts(before, tokenizer)
    final: list[TokenText] = []
    for at, token in enumerate(ids):
        final += texts.push(token, None if logprobs is None else logprobs[at])
    return final + texts.flush()
