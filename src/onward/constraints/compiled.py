"""Compiled grammars and the vocabularies that they were compiled for, kept for the requests that follow.

Compiling takes from a fraction of a millisecond to a second. It is done in the thread that asks for it, and other
threads run meanwhile. Its work is limited in llguidance's own measures; what these do not hold is tried in another
process first (`onward.constraints.trial`). So no grammar can take minutes, the memory or the process.
"""

import threading
from collections import OrderedDict
from collections.abc import Set as AbstractSet

import llguidance

from onward.checkpoint import Tokenizer
from onward.constraints.matcher import GrammarConstraint, brief
from onward.constraints.trial import Trials, needs_trial
from onward.constraints.vocabulary import Vocabulary
from onward.errors import RequestError
from onward.forks import renew_in_forks

# The most grammars and vocabularies kept; the longest grammar, in characters.
_MOST_GRAMMARS, _MOST_VOCABULARIES = 128, 4
LONGEST_GRAMMAR = 2_000_000

# Fuel of 1,000,000 are some 20 ms at the start of a lexer; a step of 200,000 some 15 ms (llguidance's own figures).
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)


class CompiledGrammars:
    """The grammars and vocabularies that were used last."""

    def __init__(self) -> None:
        self._trials = Trials()
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
