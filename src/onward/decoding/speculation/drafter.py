"""The protocol of drafters: a drafter guesses the next ids, and the target, the model being decoded, verifies them."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from onward.decoding.cache_manager import CacheManager
from onward.decoding.sequence import Sequence as DecodedSequence
from onward.decoding.speculation.pace import AcceptanceRate
from onward.decoding.step import Select
from onward.errors import TokenizerError
from onward.models import Model, architecture_of
from onward.models.blocks import Decoder
from onward.ops.kv_format import format_of
from onward.sampling import ConstraintState, History, SamplingParams
from onward.tokenizer import Tokenizer


@dataclass(frozen=True)
class DraftTarget:
    """The model that a drafter guesses for, and the limits of its texts.

    vocab_size: V; an id of V or more is an error. device: of its tokens.
    rows: the most rows at once. max_len: the most positions of a row's prompt and output together. positions: the most
        positions of all rows together. longest: the most ids of a draft.
    select: picks the tokens of rows without sampling parameters. model: the model itself, if it is known.
    """

    vocab_size: int
    device: torch.device
    rows: int
    max_len: int
    positions: int
    longest: int
    select: Select | None = None
    model: Model | None = None


@dataclass(eq=False)
class DraftRow:
    """A sequence to continue: the same object for as long as it is drafted for.

    A drafter may keep everything here but change only `state`.

    prompt, output: its ids, the same two lists every time, of which the output grows.
    limit: the maximum number of ids of the next draft, at least 1.
    sampling: the parameters and the seed that its tokens are picked with. A drafter that also picks with them, at the
        same positions, guesses its samples. None if the target's `select` picks them.
    history, constraint: of the row, shared with the target: a drafter must remove the ids that it adds before it
        returns. None if there is none, or no option has read the history yet.
    features: the values at the model's cached taps (`onward.models.blocks.Decoder`) at the positions first … last - 1,
        float [N, W], before the row's last id. Only for a model that has such taps.
    salt: what a drafter learns or caches of the row may only serve rows with an equal one.
    state: the drafter's own. It starts as None.
    """

    prompt: Sequence[int]
    output: Sequence[int]
    limit: int = 1
    sampling: SamplingParams | None = None
    history: History | None = None
    constraint: ConstraintState | None = None
    features: Callable[[int, int], Tensor] | None = None
    salt: str | None = None
    state: Any = None

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    def ids(self, start: int = 0) -> list[int]:
        """The ids from `start` on."""
        return [*self.prompt[start:], *self.output[max(0, start - len(self.prompt)) :]]


def cached_features(
    model: Model | None, slots: CacheManager, sequence: "weakref.ref[DecodedSequence]", first: int, last: int
) -> Tensor:
    """`DraftRow.features` of a sequence of this model."""
    decoder, of = None if model is None else architecture_of(model), sequence()
    assert isinstance(decoder, Decoder), "only for a model with cached taps"
    assert of is not None, "a row's sequence runs"
    assert last <= of.computed, "later positions have no features yet"
    layers = [slots.read_keys(of.slot, layer, first, last) for layer in decoder.tap_layers.values()]
    return torch.cat([format_of(rows.dtype).load(rows).transpose(0, 1).flatten(1) for rows in layers], -1)


class Drafting(Protocol):
    """A drafter at work: it drafts for all rows of a target together, which come and go at any time.

    It may also have two methods. `join(rows)` gets rows before their first draft, and after they have left; its time
    does not count as the cost of a draft. `leave(rows)` gets rows that have ended or are interrupted: free what you
    hold for them.
    """

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int]]:
        """For each row, the ids that may follow: up to `limit`, or none; further ids are ignored.

        This is called when drafts are needed, not after every token, so outputs may have grown by any number of ids;
        and for the rows that need a draft, which may not be all.
        """


@runtime_checkable
class Drafter(Protocol):
    """Creates a `Drafting` for each target at work: a call, or an engine. A drafter that keeps nothing outside
    `DraftRow.state` may return itself."""

    def start(self, target: DraftTarget) -> Drafting: ...


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


@dataclass(eq=False)
class DraftState:
    """The `drafting` of one sequence.

    row: what its drafter knows of it; None if only forced ids are drafted. leave: frees what the drafter has for it.
    joined: the number of the drafting that its row has joined, from 1 on, which may have been replaced since; 0 before
    and after. length: the number of output ids if the sequence takes all of the last round.
    """

    row: DraftRow | None
    leave: Callable[[Any], None]
    acceptance: AcceptanceRate
    joined: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    length: int = 0

    def join(self, drafting: int) -> None:
        """The row joins a drafting. What it has of another one, which failed, is of no use."""
        assert self.row is not None, "its drafter is asked for drafts"
        if self.joined:
            self.row.state = None
        self.joined = drafting

    def counts(self, output: Sequence[int]) -> Speculation:
        """The counts without the ids of the last round that the output did not take."""
        return Speculation(self.drafted, max(0, self.accepted - max(0, self.length - len(output))), self.rounds)


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
