"""The protocol of drafters: a drafter guesses the next ids, and the target, the model being decoded, verifies them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from onward.decoding.step import Select
from onward.errors import TokenizerError
from onward.sampling import ConstraintState, History, Sampler
from onward.tokenizer import Tokenizer


@dataclass(frozen=True)
class DraftRequest:
    """The rows that a drafter drafts for.

    rows: their number; owners are 0 … rows - 1. max_len: the most positions of a row's prompt and output together.
    longest: the most ids of a draft. vocab_size: V of the target; an id of V or more is an error. device: of the
        target's tokens.
    select: picks the target's tokens. A drafter that also picks with it, at the same positions, guesses its samples.
    histories: the history of each row, shared with the target: a drafter must remove the ids it adds before it returns.
        None if no option reads them.
    constraints: the constraint of each row, shared likewise; None if there are none.
    """

    rows: int
    max_len: int
    longest: int
    vocab_size: int
    device: torch.device
    select: Select | Sampler
    histories: Sequence[History] | None = None
    constraints: Sequence[ConstraintState | None] | None = None


@dataclass(frozen=True)
class DraftRow:
    """A sequence to continue.

    owner: the row's index in the request. Ended rows are no longer asked for.
    prompt, output: its ids, the same two lists every time, of which the output grows. A drafter may keep but not change
        them.
    wanted: the most useful ids, at least 1.
    """

    owner: int
    prompt: Sequence[int]
    output: Sequence[int]
    wanted: int

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    def ids(self, start: int = 0) -> list[int]:
        """The ids from `start` on."""
        return [*self.prompt[start:], *self.output[max(0, start - len(self.prompt)) :]]


class Drafting(Protocol):
    """A drafter at work on the rows of one request."""

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int]]:
        """For each row, the ids that may follow: up to `wanted`, or none; further ids are ignored.

        This is called when drafts are needed, not after every token, so outputs may have grown by any number of ids.
        """


@runtime_checkable
class Drafter(Protocol):
    """Creates a `Drafting` for each request. A drafter without state per request may return itself."""

    def start(self, request: DraftRequest) -> Drafting: ...


def continued(ids: Sequence[int], start: int, count: int) -> list[int]:
    """`count` ids copied from `ids[start:]`, repeated from its beginning if it is shorter.

    So the last period of a repetition predicts any number of further ones.
    """
    copied = list(ids[start : start + count])
    period = len(ids) - start
    while copied and len(copied) < count:
        copied.append(copied[-period])
    return copied


@dataclass(frozen=True)
class Speculation:
    """drafted: the number of proposed ids. accepted: how many of them are part of the output. rounds: forwards that
    verified a draft, without the plain steps between them."""

    drafted: int = 0
    accepted: int = 0
    rounds: int = 0

    @property
    def acceptance(self) -> float:
        """Accepted ids per drafted id; 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """The number of ids per round: the accepted ones and one of the target's own; 0 without rounds.

        A sequence that ends inside a draft has no id of the target's own in its last round, but it is counted.
        """
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0


@runtime_checkable
class TokenTable(Protocol):
    """A tokenizer that can list its vocabulary."""

    def tokens(self) -> Sequence[str | None]:
        """The token of every id as spelled in the vocabulary; None for an id without a token."""


def check_same_tokens(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise `TokenizerError`, naming the first id that differs, unless all common ids are the same tokens.

    Sizes may differ: an id that only one tokenizer has is a special token of its own, or pads the vocabulary.
    If a tokenizer cannot list its vocabulary, the texts of single ids are compared.
    """
    if isinstance(target, TokenTable) and isinstance(draft, TokenTable):
        ours, theirs = target.tokens(), draft.tokens()
    else:
        count = min(target.vocab_size, draft.vocab_size)
        ours, theirs = ([tokenizer.decode([token]) for token in range(count)] for tokenizer in (target, draft))
    for token, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our is not None and their is not None and our != their:
            raise TokenizerError(
                f"the draft model has a different vocabulary: id {token} is {their!r} there and {our!r} in the model. "
                "Use a draft model of the same family, or 'lookup' or 'suffix', which need no model"
            )
