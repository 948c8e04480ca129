"""Caches of compiled grammars and of vocabularies to compile them for.

Compiling takes from a fraction of a millisecond to a second, in the calling thread, without blocking others.
llguidance's own limits bound the work; grammars that they may not bound are tried in another process first
(`onward.constraints.trial`). So no grammar can take minutes, exhaust the memory or crash the process.
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
        """The bytes of each id; None for an id that is not text."""
        ...


class Vocabulary(NamedTuple):
    """A tokenizer for llguidance.

    end: an id past all others that ends the text there, since the ids that end a text differ between requests.
    described: the same tokens for another process, as JSON.
    """

    tokens: llguidance.LLTokenizer
    end: int
    described: Callable[[], dict[str, Any]]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """Raises `TokenizerError` if the bytes of tokens are not known."""
        try:
            if isinstance(tokenizer, JsonTokenizer):
                inner = tokenizers.Tokenizer.from_str(tokenizer.to_json())
                inner.add_special_tokens([_END])
                end = inner.token_to_id(_END)
                assert end is not None, "it was added"
                tokens = llguidance.LLTokenizer(inner.to_str(), eos_token=end)
                return cls(tokens, end, lambda: {"json": inner.to_str(), "end": end})
            if isinstance(tokenizer, TokenBytes):
                wrapped = _TokenizerAdapter(tokenizer, tokenizer.token_bytes())
                tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(wrapped))
                return cls(tokens, wrapped.eos_token_id, wrapped.described)
        except ValueError as error:
            raise TokenizerError(f"{tokenizer!r} cannot constrain a text ({one_line(error)[:300]})") from error
        raise TokenizerError(
            f"constraints need the bytes of each token, and a {type(tokenizer).__name__} does not provide them: give "
            "it a method token_bytes (onward.constraints.TokenBytes)"
        )


class _TokenizerAdapter:
    """The interface of tokenizers in Python that llguidance requires."""

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


_BITS = 32  # of a word of a mask


class GrammarConstraint(Constraint):
    """A compiled grammar, after the ids that it has accepted.

    matcher: in the same state. end: the matcher's id for the end of the text. stop_ids: the ids that end it here;
    admitted exactly where the grammar is complete. name: of the grammar, for errors.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        end: int,
        stop_ids: AbstractSet[int] = frozenset(),
        name: str = "the grammar",
    ) -> None:
        self._matcher, self._end, self._stop_ids, self._name = matcher, end, stop_ids, name
        self._state: tuple[Mask, bool] | None = None  # the mask, and whether nothing may follow, once computed

    def mask(self) -> Mask:
        return self._mask_and_done()[0]

    @property
    def is_done(self) -> bool:
        return self._mask_and_done()[1]

    def accept(self, token_id: int) -> None:
        self._state = None
        self._matcher.consume_token(token_id)
        self._check()

    def rollback(self, count: int) -> None:
        self._state = None
        self._matcher.rollback(count)
        self._check()

    def fork(self) -> Self:
        other = type(self)(self._matcher.deep_copy(), self._end, self._stop_ids, self._name)
        other._state = self._state
        return other

    def forced(self) -> Sequence[int]:
        return [token for token in self._matcher.compute_ff_tokens() if token != self._end]

    def _mask_and_done(self) -> tuple[Mask, bool]:
        if self._state is None:
            words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
            self._check()
            length = max((*self._stop_ids, self._end)) // _BITS + 1
            mask = np.zeros(max(len(words), length), dtype=np.int32)
            mask[: len(words)] = words
            may_end = _remove(mask, self._end)
            for token in self._stop_ids:
                _remove(mask, token)
            is_done = self._matcher.is_stopped() or (may_end and not mask.any())
            if may_end:
                for token in self._stop_ids:
                    mask.view(np.uint32)[token // _BITS] |= np.uint32(1 << token % _BITS)
            self._state = mask, is_done
        return self._state

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"{self._name} cannot be followed any further: {brief(self._matcher.get_error())}")


def _remove(mask: Mask, token_id: int) -> bool:
    """Remove an id from a mask, and return whether it was there."""
    words, bit = mask.view(np.uint32), np.uint32(1 << token_id % _BITS)
    was_there = bool(words[token_id // _BITS] & bit)
    words[token_id // _BITS] &= ~bit
    return was_there


def brief(message: str) -> str:
    """llguidance's message on one line, without its internal state."""
    for inner in ("<state>", "<backtrace>", "<non-verbose/>"):
        message = message.partition(inner)[0]
    return " ".join(message.split())[:400]


# Entries of the caches; characters of a grammar.
_MAX_GRAMMARS, _MAX_VOCABULARIES = 128, 4
MAX_GRAMMAR = 2_000_000

# The defaults: fuel of 1,000,000 is some 20 ms at the start of a lexer; a step of 200,000 some 15 ms (llguidance).
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)


class CompiledGrammars:
    """The most recently used grammars and vocabularies."""

    def __init__(self) -> None:
        self._trials = GrammarTrials()
        self.renew()
        renew_in_forks(self)

    def renew(self) -> None:
        """Clear the caches, also in a forked child, where another thread may have left one inconsistent."""
        self._matchers: OrderedDict[tuple[int, str], llguidance.LLMatcher] = OrderedDict()
        self._vocabularies: OrderedDict[int, tuple[Tokenizer, Vocabulary]] = OrderedDict()
        self._lock = threading.Lock()

    def constraint(self, source: str, tokenizer: Tokenizer, stop_ids: AbstractSet[int], name: str) -> GrammarConstraint:
        """See `compiled`."""
        if len(source) > MAX_GRAMMAR:
            raise RequestError(f"{name} has {len(source):,} characters; the longest grammar has {MAX_GRAMMAR:,}")
        vocabulary = self.vocabulary(tokenizer)
        key = (id(tokenizer), source)
        with self._lock:
            cached = self._matchers.get(key)
            if cached is not None:
                self._matchers.move_to_end(key)
                return GrammarConstraint(cached.deep_copy(), vocabulary.end, stop_ids, name)
        # Compile without the lock, so that others don't wait. Two threads may compile the same grammar.
        if needs_trial(source):
            self._trials.check(source, vocabulary.tokens, vocabulary.described, name)
        matcher = llguidance.LLMatcher(vocabulary.tokens, source, log_level=0, limits=_LIMITS)
        brace = vocabulary.tokens.tokenize_str("{")
        # A vocabulary without a brace returns an id past its end.
        known = all(token < vocabulary.tokens.vocab_size for token in brace)
        _check_start(matcher, brace if known else [], name)
        with self._lock:
            if id(tokenizer) in self._vocabularies:
                self._matchers[key] = matcher.deep_copy()
                if len(self._matchers) > _MAX_GRAMMARS:
                    self._matchers.popitem(last=False)
        return GrammarConstraint(matcher, vocabulary.end, stop_ids, name)

    def vocabulary(self, tokenizer: Tokenizer) -> Vocabulary:
        with self._lock:
            if id(tokenizer) in self._vocabularies:
                self._vocabularies.move_to_end(id(tokenizer))
                return self._vocabularies[id(tokenizer)][1]
        vocabulary = Vocabulary.of(tokenizer)
        with self._lock:
            # Stored with its tokenizer, so that the id isn't reused. If two threads make one at once, use the first.
            _, vocabulary = self._vocabularies.setdefault(id(tokenizer), (tokenizer, vocabulary))
            if len(self._vocabularies) > _MAX_VOCABULARIES:
                dropped, _ = self._vocabularies.popitem(last=False)
                self._matchers = OrderedDict(item for item in self._matchers.items() if item[0][0] != dropped)
        return vocabulary


def _check_start(matcher: llguidance.LLMatcher, brace: list[int], name: str) -> None:
    """Raise `RequestError` if a grammar cannot be compiled, or cannot be followed through an opening brace.

    A grammar with too many possibilities at some position fails when a text reaches it, and the largest object of a
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


_cache = CompiledGrammars()


def compiled(source: str, tokenizer: Tokenizer, stop_ids: AbstractSet[int], name: str) -> GrammarConstraint:
    """A constraint at the start of a text. name: of the grammar, for messages.

    Raises:
        RequestError: the grammar is invalid, too large, or matches no text.
        TokenizerError: the bytes of the tokenizer's tokens are not known.
    """
    return _cache.constraint(source, tokenizer, stop_ids, name)


def symbol(text: str, tokenizer: Tokenizer) -> int | None:
    """The id of the single token `text` if grammars must refer to it by id, as <[id]>; None if they match it as text.

    llguidance doesn't treat special tokens, and added tokens of the form <…>, as text.

    Raises:
        TokenizerError: the bytes of the tokenizer's tokens are not known.
    """
    try:
        ids = tokenizer.encode(text, add_special_tokens=False)
    except RequestError:
        return None  # it is past the model's vocabulary
    return ids[0] if len(ids) == 1 and _cache.vocabulary(tokenizer).tokens.is_special_token(ids[0]) else None
