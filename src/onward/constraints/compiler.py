"""Compiled grammars and the vocabularies that they were compiled for, kept for the requests that follow.

Compiling takes from a fraction of a millisecond to a second. It is done in the thread that asks for it, and other
threads run meanwhile. Its work is limited in llguidance's own measures; what these do not hold is tried in another
process first (`onward.constraints.trial`). So no grammar can take minutes, the memory or the process.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import llguidance
import numpy as np
import tokenizers

from onward.constraints.trial import GrammarTrials, needs_trial
from onward.errors import RequestError, TokenizerError, one_line
from onward.sampling.constraint import Constraint, Mask
from onward.tokenizer import JsonTokenizer, Tokenizer
from onward.util.process import renew_in_forks

_END = "<|onward:end of the text|>"


@runtime_checkable
class TokenBytes(Protocol):
    """A tokenizer that knows the bytes of its tokens."""

    def token_bytes(self) -> Sequence[bytes | None]:
        """The bytes that each id stands for; None for an id that is no text."""
        ...


class Vocabulary(NamedTuple):
    """A tokenizer as llguidance reads it.

    tokens: for llguidance. end: an id past all others, which stands for the end of the text there, since the ids that
    end a text differ from request to request. described: the same tokens for another process, as JSON.
    """

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


# The most words that llguidance's masks are made longer by, for ids that end a text and that the tokenizer lacks.
_BITS = 32


class _Place(NamedTuple):
    """What a grammar says of one place. mask: what may follow, ids that end the text too. is_done: nothing may."""

    mask: Mask
    is_done: bool


class GrammarConstraint(Constraint):
    """A compiled grammar, after the ids that it has accepted.

    matcher: stands where this does. end: the id that stands for the end of the text there. stop_ids: those that end it
    here; they are admitted where the grammar is complete, and nowhere else. name: of the grammar, for errors.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        end: int,
        stop_ids: AbstractSet[int] = frozenset(),
        name: str = "the grammar",
    ) -> None:
        self._matcher, self._end, self._stop_ids, self._name = matcher, end, stop_ids, name
        self._place: _Place | None = None

    def mask(self) -> Mask:
        return self._here().mask

    @property
    def is_done(self) -> bool:
        return self._here().is_done

    def accept(self, token_id: int) -> None:
        self._place = None
        self._matcher.consume_token(token_id)
        self._check()

    def rollback(self, count: int) -> None:
        self._place = None
        self._matcher.rollback(count)
        self._check()

    def fork(self) -> Self:
        other = type(self)(self._matcher.deep_copy(), self._end, self._stop_ids, self._name)
        other._place = self._place
        return other

    def forced(self) -> Sequence[int]:
        return [token for token in self._matcher.compute_ff_tokens() if token != self._end]

    def _here(self) -> _Place:
        if self._place is None:
            words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
            self._check()
            longest = max((*self._stop_ids, self._end)) // _BITS + 1
            mask = np.zeros(max(len(words), longest), dtype=np.int32)
            mask[: len(words)] = words
            may_end = _take(mask, self._end)
            for token in self._stop_ids:
                _take(mask, token)
            is_done = self._matcher.is_stopped() or (may_end and not mask.any())
            if may_end:
                for token in self._stop_ids:
                    mask.view(np.uint32)[token // _BITS] |= np.uint32(1 << token % _BITS)
            self._place = _Place(mask, is_done)
        return self._place

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"{self._name} cannot be followed any further: {brief(self._matcher.get_error())}")


def _take(mask: Mask, token_id: int) -> bool:
    """Take an id out of a mask, and say whether it was there."""
    words, bit = mask.view(np.uint32), np.uint32(1 << token_id % _BITS)
    was_there = bool(words[token_id // _BITS] & bit)
    words[token_id // _BITS] &= ~bit
    return was_there


def brief(message: str) -> str:
    """llguidance's message on one line, without what it says of its own state."""
    for inner in ("<state>", "<backtrace>", "<non-verbose/>"):
        message = message.partition(inner)[0]
    return " ".join(message.split())[:400]


# The most grammars and vocabularies kept; the longest grammar, in characters.
_MOST_GRAMMARS, _MOST_VOCABULARIES = 128, 4
LONGEST_GRAMMAR = 2_000_000

# Fuel of 1,000,000 are some 20 ms at the start of a lexer; a step of 200,000 some 15 ms (llguidance's own figures).
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)


class CompiledGrammars:
    """The grammars and vocabularies that were used last."""

    def __init__(self) -> None:
        self._trials = GrammarTrials()
        self.renew()
        renew_in_forks(self)

    def renew(self) -> None:
        """Begin with nothing. A forked child does so, for another thread may have had something half made."""
        self._matchers: OrderedDict[tuple[int, str], llguidance.LLMatcher] = OrderedDict()
        self._vocabularies: OrderedDict[int, tuple[Tokenizer, Vocabulary]] = OrderedDict()
        self._lock = threading.Lock()

    def constraint(self, source: str, tokenizer: Tokenizer, stop_ids: AbstractSet[int], name: str) -> GrammarConstraint:
        """As `compiled`."""
        if len(source) > LONGEST_GRAMMAR:
            raise RequestError(f"{name} has {len(source):,} characters; the longest grammar has {LONGEST_GRAMMAR:,}")
        vocabulary = self.vocabulary(tokenizer)
        key = (id(tokenizer), source)
        with self._lock:
            kept = self._matchers.get(key)
            if kept is not None:
                self._matchers.move_to_end(key)
                return GrammarConstraint(kept.deep_copy(), vocabulary.end, stop_ids, name)
        # Not under the lock: others do not wait for it. Two threads may compile the same.
        if needs_trial(source):
            self._trials.check(source, vocabulary.tokens, vocabulary.described, name)
        matcher = llguidance.LLMatcher(vocabulary.tokens, source, log_level=0, limits=_LIMITS)
        brace = vocabulary.tokens.tokenize_str("{")
        # A vocabulary that has no brace gets an id past its end.
        known = all(token < vocabulary.tokens.vocab_size for token in brace)
        _check_beginning(matcher, brace if known else [], name)
        with self._lock:
            if id(tokenizer) in self._vocabularies:
                self._matchers[key] = matcher.deep_copy()
                if len(self._matchers) > _MOST_GRAMMARS:
                    self._matchers.popitem(last=False)
        return GrammarConstraint(matcher, vocabulary.end, stop_ids, name)

    def vocabulary(self, tokenizer: Tokenizer) -> Vocabulary:
        with self._lock:
            if id(tokenizer) in self._vocabularies:
                self._vocabularies.move_to_end(id(tokenizer))
                return self._vocabularies[id(tokenizer)][1]
        vocabulary = Vocabulary.of(tokenizer)
        with self._lock:
            # Kept with its tokenizer, for its id must not become another's. Of two threads that made it at once, the
            # first one's counts: there is one vocabulary for a tokenizer.
            _, vocabulary = self._vocabularies.setdefault(id(tokenizer), (tokenizer, vocabulary))
            if len(self._vocabularies) > _MOST_VOCABULARIES:
                gone, _ = self._vocabularies.popitem(last=False)
                self._matchers = OrderedDict(
                    (key, matcher) for key, matcher in self._matchers.items() if key[0] != gone
                )
        return vocabulary


def _check_beginning(matcher: llguidance.LLMatcher, brace: list[int], name: str) -> None:
    """Raise `RequestError` for what cannot be compiled, or cannot be followed through the brace that most texts have
    first.

    Whether a grammar has too many possibilities at some place shows when a text gets there, and the largest object of a
    schema is mostly the first.
    """
    if matcher.is_error():
        raise RequestError(f"{name} cannot be compiled: {brief(matcher.get_error())}")
    ahead = matcher.deep_copy()
    ahead.compute_bitmask()
    if not ahead.is_error() and ahead.validate_tokens(brace) == len(brace):
        ahead.consume_tokens(brace)
        ahead.compute_bitmask()
    if ahead.is_error():
        raise RequestError(f"{name} cannot be followed: {brief(ahead.get_error())}")


_kept = CompiledGrammars()


def compiled(source: str, tokenizer: Tokenizer, stop_ids: AbstractSet[int], name: str) -> GrammarConstraint:
    """A constraint at the beginning of a text. name: of the grammar, for messages.

    Raises:
        RequestError: the grammar cannot be read, is too large, or no text meets it.
        TokenizerError: the bytes of the tokenizer's tokens are not known.
    """
    return _kept.constraint(source, tokenizer, stop_ids, name)


def symbol(text: str, tokenizer: Tokenizer) -> int | None:
    """The id of the one token that is written so, where a grammar has to name it by its id, as <[id]>.

    llguidance takes special tokens, and added tokens of the form <…>, for no text. None where grammars have it as text.

    Raises:
        TokenizerError: the bytes of the tokenizer's tokens are not known.
    """
    try:
        ids = tokenizer.encode(text, add_special_tokens=False)
    except RequestError:
        return None  # it lies past the model's vocabulary
    return ids[0] if len(ids) == 1 and _kept.vocabulary(tokenizer).tokens.is_special_token(ids[0]) else None
