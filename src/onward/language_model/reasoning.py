"""The budget of an answer's reasoning: after that many tokens, the tokens that close the reasoning are forced."""

import copy
from collections.abc import Sequence
from typing import NamedTuple, Self

from onward.chat import AnswerFormat
from onward.errors import OptionError
from onward.sampling import Constraint, mask_of
from onward.sampling.constraint import Mask, PartialConstraint
from onward.tokenizer import Tokenizer, special_tokens
from onward.tokenizer.text_stream import REPLACEMENT
from onward.util.text import unfinished

# How a reasoning budget ends the reasoning, by default: the words that Qwen documents for its models.
DEFAULT_BUDGET_MESSAGE = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n"
)
_BEGINNING, _REASONING, _REST = "beginning", "reasoning", "rest"
# The most ids of a character after its first.
_INSIDE = 3


class _State(NamedTuple):
    """The state after some ids.

    part: of the answer's present message. start: the index of the part's first id. tokens: the number of ids of
    reasoning. cuts: how often the reasoning was cut. forced: how many ids of the last closing are there; None if it is
    complete.
    """

    part: str
    start: int = 0
    tokens: int = 0
    cuts: int = 0
    forced: int | None = None


class ReasoningBudget(PartialConstraint):
    """Allows any ids until the reasoning has `limit` of them, and then only those that close it.

    A cut waits for the end of a character, and of text that may begin a closing mark. An answer whose reasoning is
    closed earlier is not restricted. Whatever it is, the state depends on the answer's own ids alone.

    answer: where reasoning is. closings: the ids that end the reasoning, the first time and later. inner: a further
    constraint, which also applies; it must allow the closings.
    """

    def __init__(
        self,
        answer: AnswerFormat,
        tokenizer: Tokenizer,
        limit: int,
        closings: tuple[Sequence[int], Sequence[int]],
        inner: Constraint | None = None,
    ) -> None:
        self._answer, self._tokenizer, self._limit = answer, tokenizer, limit
        self._closings, self._inner = closings, inner
        self._marks = dict(answer.marks)
        ends = answer.format.reasoning_ends
        self._longest = max(map(len, ends))
        # A mark of several ids may begin before the cut.
        self._split = [end for end in ends if len(tokenizer.encode(end, add_special_tokens=False)) > 1]
        self._ids: list[int] = []
        self._states = [self._cut(_State(_REASONING if answer.thinking else _BEGINNING))]

    @classmethod
    def of(
        cls, limit: int, message: str | None, answer: AnswerFormat, tokenizer: Tokenizer, inner: Constraint | None
    ) -> Self:
        """The budget of a request; message: None for the default. Raises `OptionError` for a message that cannot be in
        reasoning."""
        message, format = DEFAULT_BUDGET_MESSAGE if message is None else message, answer.format
        special = special_tokens(tokenizer)
        found = [special[token] for token in tokenizer.encode(message, add_special_tokens=False) if token in special]
        if found := [*found, *(end for end in format.reasoning_ends if end in message)]:
            raise OptionError("reasoning_budget_message", f"must not contain {found[0]!r}, a mark of the chat format")
        first = format.end_of_reasoning(calls=answer.tools is not None)
        texts = (message if limit else "") + first, format.end_of_reasoning(calls=False)
        closings = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return cls(answer, tokenizer, limit, (closings[0], closings[1]), inner)

    @property
    def imposed(self) -> int | None:
        """The only id that may follow, whatever other options ban; None if there is a choice."""
        closing, state = self._closing(), self._states[-1]
        return None if state.forced is None else closing[state.forced]

    @property
    def is_open(self) -> bool:
        return self._inner is None and self._states[-1].forced is None

    def mask(self) -> Mask:
        if (token := self.imposed) is not None:
            return mask_of([token])
        assert self._inner is not None, "an open constraint has no mask"
        return self._inner.mask()

    def forced(self) -> Sequence[int]:
        if (forced := self._states[-1].forced) is not None:
            return self._closing()[forced:]
        return () if self._inner is None else self._inner.forced()

    @property
    def is_done(self) -> bool:
        return self._inner is not None and self._inner.is_done

    def accept(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.accept(token_id)
        self._ids.append(token_id)
        state = self._states[-1]
        forced = state.forced
        if forced is not None:
            forced = None if forced + 1 == len(self._closing()) else forced + 1
        self._states.append(self._cut(self._moved(state)._replace(forced=forced)))

    def rollback(self, count: int) -> None:
        if self._inner is not None:
            self._inner.rollback(count)
        if count:
            del self._ids[-count:], self._states[-count:]

    def fork(self) -> Self:
        other = copy.copy(self)
        other._ids, other._states = self._ids.copy(), self._states.copy()
        other._inner = None if self._inner is None else self._inner.fork()
        return other

    def _closing(self) -> Sequence[int]:
        return self._closings[self._states[-1].cuts > 1]

    def _moved(self, state: _State) -> _State:
        """The state after the last id, whose part may be another."""
        format, next_id = self._answer.format, len(self._ids)
        if state.part == _BEGINNING:
            text = self._text(state.start)
            begins = format.begins_reasoning(text, calls=self._answer.tools is not None)
            if begins is None:
                return state if text.strip() else state._replace(start=next_id)
            if begins or not (format.has_messages and any(end in text for end in format.reasoning_ends)):
                return state._replace(part=_REASONING if begins else _REST, start=next_id)
            return state._replace(start=next_id)
        if state.part == _REST and not format.has_messages:
            return state
        text = self._text(max(state.start, next_id - self._longest))
        if any(end in text for end in format.reasoning_ends):
            return state._replace(part=_BEGINNING if format.has_messages else _REST, start=next_id)
        return state._replace(tokens=state.tokens + 1) if state.part == _REASONING else state

    def _cut(self, state: _State) -> _State:
        """The state with the reasoning cut, if it is time."""
        over = state.tokens - self._limit
        if state.part != _REASONING or state.forced is not None or over < 0:
            return state
        if over < _INSIDE and self._tokenizer.decode(self._ids[-_INSIDE - 1 :]).endswith(REPLACEMENT):
            return state
        text = self._text(max(state.start, len(self._ids) - self._longest))
        if over < self._longest and unfinished(text, self._split):
            return state
        return state._replace(cuts=state.cuts + 1, forced=0)

    def _text(self, first: int) -> str:
        """The text of the ids from an index on, with marks that are special tokens."""
        parts, run = [], list[int]()
        for token in self._ids[first:]:
            if token in self._marks:
                parts += [self._tokenizer.decode(run), self._marks[token]]
                run = []
            else:
                run.append(token)
        return "".join([*parts, self._tokenizer.decode(run)])
