"""Tokens to text as they come: stop strings never leak, half characters never show."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, Self, runtime_checkable

from onward.sampling.logprobs import TokenLogprobs
from onward.util.text import unfinished

REPLACEMENT = "\ufffd"
# How many of a prompt's last ids are decoded again with what follows. One would do but for special tokens.
_CONTEXT = 8
# Of a character in UTF-8.
_MAX_BYTES = 4


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...

    def fork(self) -> Self:
        """A copy that goes on from here by itself."""
        ...


class StreamingDetokenizer:
    """Gives out a character once all of its bytes are there, never before.

    A token may hold part of a character, and a tokenizer may write a token differently after another one (with a
    leading space, for example). So the ids since the last text given out are decoded together with the ids of that
    text. An unfinished character decodes to the replacement character: the new text is given out as soon as it does
    not end in one. The pieces add up to `decode` of all ids, as long as these are valid UTF-8. Byte fallback writes
    a run of bytes with an invalid one as replacement characters throughout; here characters that were given out stay.

    decode: ids to text.
    before: the ids that the text continues. Their own text is not given out. With them the first word after a prompt
        keeps its leading space, where a tokenizer drops one at the start of a text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        # Ids whose text has been given out, as far as later ones need them.
        self._context = _whole_end(decode, before)
        self._pending: list[int] = []  # ids whose text has not been given out

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) or not text:
            return ""
        self._context, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """The rest of the text; an unfinished character becomes the replacement character."""
        text = self._new_text()
        self._context, self._pending = [], []
        return text

    def added_by(self, token_id: int) -> str:
        """The text that a token would add here, less an unfinished character before it."""
        ids = self._context + self._pending
        return self._added(ids, [token_id])

    def fork(self) -> Self:
        """A copy that goes on from here by itself."""
        other = copy.copy(self)
        other._context, other._pending = self._context.copy(), self._pending.copy()
        return other

    def _new_text(self) -> str:
        return self._added(self._context, self._pending)

    def _added(self, ids: list[int], more: list[int]) -> str:
        """The text that ids add to that of others."""
        before, text = self._decode(ids), self._decode(ids + more)
        if REPLACEMENT in text[: len(before)] and not text.startswith(before):
            return self._decode(more)  # a byte broke the characters of the bytes before it
        return text[len(before) :]


def _whole_end(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[int]:
    """The last of these ids, from the start of a character on: byte fallback breaks all characters of a run of bytes
    that starts inside one. None where the ids end inside a character, which is no part of a text then.
    """
    last = list(ids[-_CONTEXT:])
    starts = range(min(_MAX_BYTES, len(last)))
    return next((last[start:] for start in starts if not decode(last[start:]).endswith(REPLACEMENT)), [])


class SpecialTokenMark(NamedTuple):
    """A special token that says something, though it is no part of the text.

    position: how many characters of the text stand before it, if no stop string ends the text earlier.
    at: which of the text's tokens it is. text: how it is written.
    """

    position: int
    at: int
    text: str


class TextStream(Protocol):
    """Turns one row's tokens into text that is final when it is given out."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text; None while the text goes on."""
        ...

    @property
    def marks(self) -> Sequence[SpecialTokenMark]:
        """The marks so far, in order."""
        ...

    @property
    def ends(self) -> Sequence[int]:
        """How many characters are complete with each token, those of marks too; empty where marks are not noted."""
        ...

    def push(self, token_id: int) -> str: ...

    def flush(self, eos: int | None = None) -> str:
        """The text that was held back; for when no token follows. eos: the id that ended the text, if one did."""
        ...

    def fork(self) -> Self:
        """A copy that goes on from here by itself."""
        ...


class NoTextStream:
    """A `TextStream` for rows whose text nobody asks for: it is always empty."""

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
    """Characters of a special token among those held back. mark: to report once they are certain, if any."""

    begin: int
    end: int
    mark: SpecialTokenMark | None


class StopStrings:
    """A `TextStream` that ends before the first stop string, also one that spans several tokens.

    Stop strings are searched for in the text, and in the text with its special tokens written out, the eos included.
    Special tokens are never part of the text. Text that may be the beginning of a stop string is held back
    until it is clear that it is not.

    marks: the special tokens to report, and how each is written; None reports nothing. special: how the other special
    tokens are written.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
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
        self._held = ""
        self._hidden: tuple[_Hidden, ...] = ()  # of special tokens in it
        self._tokens = self._characters = self._of_marks = 0  # pushed so far, also those that are held back

    def push(self, token_id: int) -> str:
        text = self._detokenizer.push(token_id)
        self._characters += len(text)
        ready = self._admit(text)
        if token_id in self._special:
            written = self._special[token_id]
            mark = None
            if token_id in self._marks:
                mark = SpecialTokenMark(self._characters, self._tokens, written)
                self._of_marks += len(written)
            ready += self._admit_broken(written) + self._admit(written, _Hidden(0, len(written), mark))
        self._tokens += 1
        if self._notes_ends:
            self.ends.append(self._characters + self._of_marks)
        return ready

    def flush(self, eos: int | None = None) -> str:
        text = self._admit(self._detokenizer.flush())
        if eos is not None and eos in self._special:
            written = self._special[eos]
            text += self._admit(written, _Hidden(0, len(written), None))
        return text + self._release(len(self._held))

    def fork(self) -> Self:
        other = copy.copy(self)
        other._detokenizer = self._detokenizer.fork()
        other.marks, other.ends = self.marks.copy(), self.ends.copy()
        return other

    def _admit(self, text: str, hidden: _Hidden | None = None) -> str:
        """Add text to what is held back; returns what is final now. hidden: where the text is a special token's."""
        if self.stopped_by is not None:
            return ""
        if hidden is not None:
            begin = len(self._held)
            self._hidden += (_Hidden(begin, begin + hidden.end, hidden.mark),)
        self._held += text
        starts = {stop: start for stop in self._stop if (start := self._find(stop)) >= 0}
        if not starts:
            return self._release(self._certain())
        self.stopped_by = min(starts, key=starts.__getitem__)
        ready = self._release(starts[self.stopped_by])
        self._held, self._hidden = "", ()
        return ready

    def _find(self, stop: str) -> int:
        """Where a stop string begins in what is held back; -1 where it is not in it."""
        start = self._held.find(stop)
        if self._hidden and (in_shown := self._shown().find(stop)) >= 0:
            place = self._place(in_shown)
            return place if start < 0 else min(start, place)
        return start

    def _certain(self) -> int:
        """How many characters of what is held back are in no stop string that may still be completed."""
        certain = len(self._held) - unfinished(self._held, self._stop)
        if self._hidden and self._stop:
            shown = self._shown()
            certain = min(certain, self._place(len(shown) - unfinished(shown, self._stop)))
        return certain

    def _shown(self) -> str:
        """What is held back, less its special tokens."""
        ends = [0, *(hidden.end for hidden in self._hidden)]
        begins = [*(hidden.begin for hidden in self._hidden), len(self._held)]
        return "".join(self._held[end:begin] for end, begin in zip(ends, begins, strict=True))

    def _place(self, index: int) -> int:
        """The index in the pending text of the character with this index in `_shown`."""
        for begin, end, _ in self._hidden:
            if index < begin:
                break
            index += end - begin
        return index

    def _admit_broken(self, special: str) -> str:
        """The character that a special token breaks off, if that completes a stop string.

        Without its special tokens the text may go on with the rest of the character, so it is pending otherwise.
        """
        if not self._stop or self.stopped_by is not None or not (broken := self._detokenizer.fork().flush()):
            return ""
        text = self._held + broken + special
        return self._admit(self._detokenizer.flush()) if any(stop in text for stop in self._stop) else ""

    def _release(self, end: int) -> str:
        """Give out the first `end` characters of what is held back, less those of special tokens."""
        text, self._held = self._held[:end], self._held[end:]
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
