"""The protocol of drafters. A drafter guesses how texts go on; the target, the model decoded from, verifies it."""

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
    """What a drafter is told of the rows that it will draft for.

    rows: how many there are; their owners are 0 … rows - 1.
    max_len: the most positions that prompt and output of a row take together.
    longest: the most ids that a draft can have.
    vocab_size: V of the target; an id of V or more is an error.
    device: where the target's tokens are.
    select: picks the target's tokens. A drafter that picks with it too, at the same positions, guesses its samples.
    histories: the history of each row, shared with the target. A drafter that adds ids must take them back before it
        returns. None where no option reads them.
    constraints: what may follow in each row, shared likewise; None where no row has a constraint.
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
    """A text to be continued.

    owner: the row's index in the request. Rows that have ended are no longer asked for.
    prompt, output: its ids. They are the same two lists every time, and the output grows. A drafter may keep them but
        must not change them.
    wanted: the most ids that can be used, 1 or more.
    """

    owner: int
    prompt: Sequence[int]
    output: Sequence[int]
    wanted: int

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    def ids(self, start: int = 0) -> list[int]:
        """The ids of the text from `start` on."""
        after = max(0, start - len(self.prompt))
        return [*self.prompt[start:], *self.output[after:]]


class Drafting(Protocol):
    """A drafter at work on the rows of one request."""

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int]]:
        """For each row the ids that may follow. There may be fewer than `wanted`, or none; ids beyond that are ignored.

        This is called when drafts are needed, not after every token: the texts may have grown by any number of ids.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """Makes a `Drafting` for each request. A drafter that remembers nothing of a request may return itself."""

    def start(self, request: DraftRequest) -> Drafting: ...


def continued(ids: Sequence[int], start: int, count: int) -> list[int]:
    """`count` ids copied from `ids` from `start` on. At the end of `ids` the copy goes on from its own beginning.

    So the last period of a repetition predicts any number of further ones.
    """
    copied = list(ids[start : start + count])
    period = len(ids) - start
    while copied and len(copied) < count:
        copied.append(copied[-period])
    return copied


@dataclass(frozen=True)
class Speculation:
    """drafted: how many ids were proposed.
    accepted: how many of them became part of the text.
    rounds: passes of the model that verified a draft; plain steps between them are not counted.
    """

    drafted: int = 0
    accepted: int = 0
    rounds: int = 0

    @property
    def acceptance(self) -> float:
        """Accepted ids over drafted ones; 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """How many ids a round brings: the accepted ones and one of the target's own. 0 where there was no round.

        A text that ends inside a draft has no id of the target's own in its last round; it is counted all the same.
        """
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0


@runtime_checkable
class TokenTable(Protocol):
    """A tokenizer that can write out its vocabulary."""

    def tokens(self) -> Sequence[str | None]:
        """The token of every id as the vocabulary spells it; None for an id that has none."""
        ...


def check_same_tokens(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise unless every id that both tokenizers have is the same token in both.

    Sizes may differ: an id that only one tokenizer has is a special token of its own, or pads the vocabulary.
    Where a tokenizer cannot write out its vocabulary, the texts of single ids are compared.

    Raises:
        TokenizerError: naming the first id that differs.
    """
    if isinstance(target, TokenTable) and isinstance(draft, TokenTable):
        ours, theirs = target.tokens(), draft.tokens()
    else:
        count = min(target.vocab_size, draft.vocab_size)
        ours, theirs = ([tokenizer.decode([token]) for token in range(count)] for tokenizer in (target, draft))
    for token, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our is not None and their is not None and our != their:
            raise TokenizerError(
                f"the draft model has another vocabulary than the model: id {token} is {their!r} there and {our!r} "
                "here. Take a draft of the same family, or 'lookup' or 'suffix', which need no model"
            )
