"""What a drafter is: whoever guesses how texts go on, for the model that is decoded from to verify."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from onward.decoding import Select
from onward.sampling import History, Sampler


@dataclass(frozen=True)
class DraftRequest:
    """What a drafter may want to know of the rows it will draft for.

    rows: how many there are; their owners are 0 … rows - 1.
    max_len: the most positions that prompt and output of a row take together.
    longest: the most ids that a draft will be wanted of.
    vocab_size: V of the target; an id of V or more is an error.
    device: where the target's tokens are.
    select: picks the target's tokens. A drafter that picks with it too, at the same positions, guesses its samples.
    histories: what it has seen of each row, shared with the target; whoever adds to them takes that back. None where
        nobody looks.
    probabilities: whether the verifier weighs drafts by the distribution they were drawn from. It then takes a draft
        without one as certain.
    """

    rows: int
    max_len: int
    longest: int
    vocab_size: int
    device: torch.device
    select: Select | Sampler
    histories: Sequence[History] | None = None
    probabilities: bool = False


@dataclass(frozen=True)
class DraftRow:
    """A text that is to be continued.

    owner: which of the request's rows; rows that have ended are no longer asked for.
    prompt, output: its ids. The same two lists every time, and the output grows: keep them if you like, but do not
        change them.
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


class Draft(NamedTuple):
    """Drafted ids; where the verifier asks for it, what each was drawn from: float64 [N, V] of the target's V."""

    ids: Sequence[int]
    probabilities: Tensor | None = None


class Drafting(Protocol):
    """A drafter at work on the rows of one request."""

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Draft | Sequence[int]]:
        """For each row the ids that may follow: none, some, or as many as wanted. More than wanted are not looked at.

        Called whenever a draft is wanted, not after every token: the texts may have grown by any number of ids.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """Makes a `Drafting` for each request. One that remembers nothing of a request may return itself."""

    def start(self, request: DraftRequest) -> Drafting: ...


def continued(ids: Sequence[int], start: int, count: int) -> list[int]:
    """`count` ids as they follow from `start` on in `ids`; where these run out, as the copy itself goes on.

    So the last period of a repetition predicts any number of further ones.
    """
    copied = list(ids[start : start + count])
    period = len(ids) - start
    while copied and len(copied) < count:
        copied.append(copied[-period])
    return copied
