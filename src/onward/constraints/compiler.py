"""Caches of compiled grammars and of vocabularies to compile them for.

Compiling takes from a fraction of a millisecond to a second, in the calling thread, without blocking others.
llguidance's own limits bound the work; grammars that they may not bound are tried in another process first
(`onward.constraints.trial`), and then compiled once in a thread of their own. So no grammar can take minutes, exhaust
the memory or crash the process.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import llguidance
import numpy as np
import tokenizers

from onward.constraints.trial import PROCESSES, Refusal, Trial, TrialProcesses, needs_trial, wait_for
from onward.errors import RequestError, TokenizerError, one_line
from onward.sampling.constraint import Constraint, Mask
from onward.tokenizer import JsonTokenizer, Tokenizer
from onward.util.lanes import Lane
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
_MAX_GRAMMARS, _MAX_VOCABULARIES, _MAX_TRIED = 128, 4, 1024
# Bytes of the cached grammars that were tried. Others are small.
_MAX_BYTES = 64 * 2**20
MAX_GRAMMAR = 2_000_000

# The defaults: fuel of 1,000,000 is some 20 ms at the start of a lexer; a step of 200,000 some 15 ms (llguidance).
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)

# The tokenizer, and a digest of the source.
_Key = tuple[int, bytes]


class CompiledGrammars:
    """The most recently used grammars and vocabularies, and the results of trials."""

    def __init__(self) -> None:
        self._processes = TrialProcesses()
        self._lane = Lane("grammars", PROCESSES)
        self.renew()
        renew_in_forks(self)

    def renew(self) -> None:
        """Clear the caches, also in a forked child, where another thread may have left one inconsistent."""
        self._matchers: OrderedDict[_Key, llguidance.LLMatcher] = OrderedDict()
        self._sizes: dict[_Key, int] = {}  # bytes of those that were tried
        self._vocabularies: OrderedDict[int, tuple[Tokenizer, Vocabulary]] = OrderedDict()
        self._tried: OrderedDict[_Key, Refusal] = OrderedDict()  # empty for a grammar that compiles
        self._trials: dict[_Key, Trial] = {}  # queued or running
        self._lock = threading.Lock()

    def constraint(self, source: str, tokenizer: Tokenizer, stop_ids: AbstractSet[int], name: str) -> GrammarConstraint:
        """See `compiled`."""
        if len(source) > MAX_GRAMMAR:
            raise RequestError(f"{name} has {len(source):,} characters; the longest grammar has {MAX_GRAMMAR:,}")
        vocabulary = self.vocabulary(tokenizer)
        key = (id(tokenizer), hashlib.sha256(source.encode()).digest())
        matcher: llguidance.LLMatcher | Refusal | None
        with self._lock:
            matcher = self._tried.get(key) or self._matchers.get(key)
            if key in self._matchers:
                self._matchers.move_to_end(key)
        if not matcher:
            # Without the lock, so that others don't wait. Two threads may compile the same grammar, if it is small.
            if needs_trial(source):
                matcher = wait_for(key, lambda client: self._trial(key, source, vocabulary, client))
            else:
                matcher = self._compile(key, source, vocabulary)
        if isinstance(matcher, Refusal):
            raise RequestError(f"{name} {matcher}")
        return GrammarConstraint(matcher.deep_copy(), vocabulary.end, stop_ids, name)

    def _trial(self, key: _Key, source: str, vocabulary: Vocabulary, client: str) -> Trial:
        """Join the trial of a grammar, or queue one."""
        with self._lock:
            trial = self._trials.get(key)
            if trial is not None and not trial.abandoned:
                return trial
            trial = self._trials[key] = Trial(key)
        self._lane.submit(lambda: self._run(trial, key, source, vocabulary), client)
        return trial

    def _run(self, trial: Trial, key: _Key, source: str, vocabulary: Vocabulary) -> None:
        """Try a grammar, unless the result is known, and compile it."""
        result: llguidance.LLMatcher | Refusal | None = None
        try:
            with self._lock:
                refusal = self._tried.get(key)
            if refusal is None and not trial.abandoned:
                refusal = self._processes.attempt(trial, source, vocabulary.tokens, vocabulary.described)
                if refusal:
                    refusal = Refusal(f"cannot be compiled: {refusal}", lasting=refusal.lasting)
                self._remember(key, refusal, trial)
            if refusal:
                result = refusal
            elif not trial.abandoned:
                result = self._compile(key, source, vocabulary, 0 if refusal is None else refusal.nbytes)
                if isinstance(result, Refusal):
                    self._remember(key, result, trial)
        except BaseException as error:
            trial.future.set_exception(error)
        else:
            trial.future.set_result(result)
        finally:
            with self._lock:
                if self._trials.get(key) is trial:
                    del self._trials[key]

    def _remember(self, key: _Key, refusal: Refusal, trial: Trial) -> None:
        with self._lock:
            if refusal.lasting and not trial.abandoned and key[0] in self._vocabularies:
                self._tried[key] = refusal
                if len(self._tried) > _MAX_TRIED:
                    self._tried.popitem(last=False)

    def _compile(
        self, key: _Key, source: str, vocabulary: Vocabulary, nbytes: int = 0
    ) -> "llguidance.LLMatcher | Refusal":
        """Compile a grammar and cache it. nbytes: that it takes, if it was tried."""
        matcher = llguidance.LLMatcher(vocabulary.tokens, source, log_level=0, limits=_LIMITS)
        brace = vocabulary.tokens.tokenize_str("{")
        # A vocabulary without a brace returns an id past its end.
        known = all(token < vocabulary.tokens.vocab_size for token in brace)
        if problem := _start_problem(matcher, brace if known else []):
            return Refusal(problem)
        with self._lock:
            if key[0] in self._vocabularies:
                self._matchers[key] = matcher
                self._sizes[key] = nbytes
                while len(self._matchers) > _MAX_GRAMMARS or sum(self._sizes.values()) > _MAX_BYTES:
                    self._sizes.pop(self._matchers.popitem(last=False)[0], None)
        return matcher

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
                for cache in (self._matchers, self._tried, self._sizes):
                    for key in [key for key in cache if key[0] == dropped]:
                        del cache[key]
        return vocabulary


def _start_problem(matcher: llguidance.LLMatcher, brace: list[int]) -> str:
    """Why a grammar cannot be compiled, or cannot be followed through an opening brace; empty if it can.

    A grammar with too many possibilities at some position fails when a text reaches it, and the largest object of a
    schema is mostly the first.
    """
    if matcher.is_error():
        return f"cannot be compiled: {brief(matcher.get_error())}"
    ahead = matcher.deep_copy()
    ahead.compute_bitmask()
    if not ahead.is_error() and ahead.validate_tokens(brace) == len(brace):
        ahead.consume_tokens(brace)
        ahead.compute_bitmask()
    return f"cannot be followed: {brief(ahead.get_error())}" if ahead.is_error() else ""


_cache = CompiledGrammars()


def compiled(source: str, tokenizer: Tokenizer, stop_ids: AbstractSet[int], name: str) -> GrammarConstraint:
    """A constraint at the start of a text. name: of the grammar, for messages.

    Raises:
        RequestError: the grammar is invalid, too large, or matches no text.
        TokenizerError: the bytes of the tokenizer's tokens are not known.
        TrialPending: the grammar is being tried (only inside `onward.constraints.trial.deferred`).
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
