"""A step processes the pending ids and emits the ids that follow. Prefill and decoding are the same step."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from onward.decoding.state import DecodeState
from onward.errors import OnwardError, RequestError
from onward.models import Cache
from onward.models.contract import check_logits
from onward.program import Pick
from onward.sampling import History, Sampler
from onward.sampling.logprobs import logprobs

# (logits [B, V], positions int32 [B] of the tokens to pick) -> int64 [B]
Select = Callable[[Tensor, Tensor], Tensor]


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities under the model's own distribution.

    chosen: the logprob of the token itself. top: (id, logprob) of the likeliest ids, best first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


class Token(NamedTuple):
    """An id that a step emitted, with its logprobs where the request asks for them."""

    id: int
    logprobs: TokenLogprobs | None = None


# The tokens that a step emitted, for every row of the cache; none for rows that have ended.
Emitted = list[list[Token]]
Step = Callable[[DecodeState], tuple[DecodeState, Emitted]]


class Run(Protocol):
    """A model with its weights: `onward.models.ModelRun`, a `Model`, or a user's forward bound to its params."""

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Cache, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Cache]: ...


@runtime_checkable
class PickingRun(Run, Protocol):
    """A `Run` that can process one token a row and pick the next from its logits [B, 1, V], both in one call.

    `picked` returns None for the ids where it could only process.
    """

    def picked(
        self, tokens: Tensor, offsets: Tensor, cache: Cache, pick: Pick, positions: Tensor
    ) -> tuple[Tensor, Tensor | None, Cache]: ...


class Picker:
    """A `Select` or a `Sampler` over the rows that are left, each with its history.

    histories: one for each of the loop's rows. The ids picked are added to them. None where no option reads them.
    top_logprobs: how many alternatives to report with each token; None reports no logprobs at all.
    """

    def __init__(
        self,
        select: Select | Sampler,
        histories: Sequence[History] | None = None,
        top_logprobs: int | None = None,
    ) -> None:
        self.histories = histories
        self.top_logprobs = top_logprobs
        self._select = select
        self._taken: tuple[tuple[int, ...], Select | Sampler] | None = None

    def __call__(
        self,
        logits: Tensor,
        positions: Tensor,
        owners: tuple[int, ...],
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """The next id of each row: float [B, V] and int [B] -> int64 [B]. `owners` are the rows' indices in the loop.

        A `Sampler` also takes K places a row: [B, K, V], [B, K] and a draft for each row.
        """
        select = self.of(owners)
        if isinstance(select, Sampler):
            return select(logits, positions, self.histories_of(owners), drafts)
        return select(logits, positions)

    def of_live(self, logits: Tensor, positions: Tensor, state: DecodeState) -> Tensor:
        """Pick as a call does, but for live rows alone: the bans of a row that has ended may leave nothing to pick.

        Where a `Sampler` picks, rows that have ended get the id 0.
        """
        if all(state.live) or not any(state.live) or not isinstance(self._select, Sampler):
            return self(logits, positions, state.owners)
        places = [place for place, live in enumerate(state.live) if live]
        ids = torch.zeros(len(state.live), dtype=torch.int64, device=logits.device)
        ids[places] = self(logits[places], positions[places], tuple(state.owners[place] for place in places))
        return ids

    def of(self, owners: tuple[int, ...]) -> Select | Sampler:
        """The `Select` or `Sampler` of these rows."""
        if not isinstance(self._select, Sampler) or owners == tuple(range(len(self._select.seeds))):
            return self._select
        if self._taken is None or self._taken[0] != owners:
            self._taken = (owners, self._select.take(owners))
        return self._taken[1]

    def pick_of(self, owners: tuple[int, ...]) -> Pick | None:
        """The kernel that picks for these rows; None where none does."""
        pick: Pick | None = getattr(self.of(owners), "pick", None)
        return pick

    def histories_of(self, owners: tuple[int, ...]) -> Sequence[History] | None:
        return None if self.histories is None else [self.histories[owner] for owner in owners]

    def tokens(self, ids: Sequence[int], logits: Tensor, state: DecodeState) -> Emitted:
        """Make tokens, one a row, of the ids picked from logits [B, V], and append the ids to the histories."""
        reported = [None] * len(ids) if self.top_logprobs is None else token_logprobs(ids, logits, self.top_logprobs)
        emitted: Emitted = []
        for place, (token, live) in enumerate(zip(ids, state.live, strict=True)):
            if live and self.histories is not None:
                self.histories[state.owners[place]].append(token)
            emitted.append([Token(token, reported[place])] if live else [])
        return emitted


def token_logprobs(ids: Sequence[int], logits: Tensor, top: int) -> list[TokenLogprobs]:
    """The logprobs of ids [N], each under its row of logits [N, V], and of the `top` likeliest ids of that row."""
    batch = logprobs(logits, torch.tensor(ids, dtype=torch.int64, device=logits.device), top)
    return [
        TokenLogprobs(chosen, tuple(zip(top_ids, top, strict=True)))
        for chosen, top_ids, top in zip(batch.chosen.tolist(), batch.top_ids.tolist(), batch.top.tolist(), strict=True)
    ]


class DecodeStep:
    """Emits one token a row, which the model predicts from the row's last pending one.

    run: the model. select: logits to ids, or a `Picker`. chunk: the most tokens of a row given to the model at once;
    a longer prompt is processed in pieces of this size.
    """

    def __init__(self, run: Run, select: Select | Sampler | Picker, chunk: int = 512) -> None:
        self.run = run
        self._picking = run if isinstance(run, PickingRun) else None
        self.picker = select if isinstance(select, Picker) else Picker(select)
        self.chunk = chunk

    @torch.no_grad()
    def __call__(self, state: DecodeState) -> tuple[DecodeState, Emitted]:
        next_at = [offset + len(ids) for offset, ids in zip(state.offsets, state.pending, strict=True)]
        positions = torch.tensor(next_at, dtype=torch.int32, device=state.device)
        logits, picked, cache = self._forward(state, positions)
        if picked is None:
            picked = self.picker.of_live(logits, positions, state)
        ids = checked_ids(picked, logits, state.live)
        emitted = self.picker.tokens(ids, logits, state)
        pending = tuple((token if live else 0,) for token, live in zip(ids, state.live, strict=True))
        offsets = tuple(
            after if live else before for after, before, live in zip(next_at, state.offsets, state.live, strict=True)
        )
        return state.advanced(pending, offsets, cache), emitted

    def _forward(self, state: DecodeState, positions: Tensor) -> tuple[Tensor, Tensor | None, Cache]:
        """The logits [B, V] after the pending tokens; the ids, where the run picks them in the same call; the cache."""
        pick = self.picker.pick_of(state.owners)
        if pick is None or self._picking is None or max(map(len, state.pending)) > 1:
            logits, cache = last_logits(self.run, state, self.chunk)
            return logits, None, cache
        tokens, offsets = one_token(state)
        logits, ids, cache = self._picking.picked(tokens, offsets, state.cache, pick, positions)
        check_logits(logits, tokens.shape)
        return logits[:, 0], ids, cache


def one_token(state: DecodeState) -> tuple[Tensor, Tensor]:
    """tokens [B, 1] and offsets [B] of rows with one pending token each."""
    tokens = torch.tensor(state.pending, dtype=torch.int32, device=state.device)
    return tokens, torch.tensor(state.offsets, dtype=torch.int32, device=state.device)


def last_logits(run: Run, state: DecodeState, chunk: int) -> tuple[Tensor, Cache]:
    """Process the pending tokens chunk by chunk. Returns the logits [B, V] after each row's last one, and the cache."""
    longest = max(map(len, state.pending))
    if longest == 1:
        logits, cache = forward(run, *one_token(state), state.cache, None)
        return logits[:, 0], cache
    offsets = torch.tensor(state.offsets, dtype=torch.int32, device=state.device)
    tokens = padded(state)
    last = torch.tensor([len(ids) - 1 for ids in state.pending], dtype=torch.int64, device=state.device)
    cache, last_of_rows = state.cache, None
    for start in range(0, longest, chunk):
        piece = tokens[:, start : start + chunk]
        column = last - start
        ends_here = (column >= 0) & (column < piece.shape[1])
        # A chunk in which no row ends needs no head: ask for logits at no position.
        logits_at = column.clamp(0, piece.shape[1] - 1).unsqueeze(1)[:, : int(ends_here.any())]
        logits, cache = forward(run, piece, offsets + start, cache, logits_at)
        if logits_at.shape[1]:
            here = logits[:, 0]
            last_of_rows = here if last_of_rows is None else torch.where(ends_here.unsqueeze(1), here, last_of_rows)
    assert last_of_rows is not None
    return last_of_rows, cache


def padded(state: DecodeState) -> Tensor:
    """The pending tokens as int32 [B, T], where T is the length of the longest row."""
    longest = max(map(len, state.pending))
    # The padding repeats the row's last id. Any valid id will do, for nothing past a row's length is read.
    rows = [[*ids, *([ids[-1]] * (longest - len(ids)))] for ids in state.pending]
    return torch.tensor(rows, dtype=torch.int32, device=state.device)


def forward(run: Run, tokens: Tensor, offsets: Tensor, cache: Cache, logits_at: Tensor | None) -> tuple[Tensor, Cache]:
    """Call the model, and check that its logits have the shape of the contract."""
    logits, cache = run(tokens, offsets, cache, logits_at)
    check_logits(logits, tokens.shape if logits_at is None else logits_at.shape)
    return logits, cache


def checked_ids(picked: Tensor, logits: Tensor, live: Sequence[bool]) -> list[int]:
    """The ids picked from logits [B, V], as a list on the host.

    Only the picked logits are checked for NaN. That finds a NaN anywhere in a row, for NaN wins every argmax. Rows that
    have ended are not checked: nobody takes their ids.

    Raises:
        RequestError: ids of another shape or dtype, or outside the vocabulary. OnwardError: logits that are not finite.
    """
    if picked.shape != logits.shape[:1] or picked.is_floating_point():
        raise RequestError(
            f"select must return integer ids of shape {list(logits.shape[:1])}; got {picked.dtype} {list(picked.shape)}"
        )
    ids: list[int] = picked.tolist()
    vocab = logits.shape[1]
    if out := [token for token in ids if not 0 <= token < vocab]:
        raise RequestError(f"select returned id {out[0]}, but the logits are of ids from 0 to {vocab - 1}")
    at_picked = (
        [logits[0, ids[0]].item()] if len(ids) == 1 else logits.gather(1, picked.long().unsqueeze(1))[:, 0].tolist()
    )
    if not all(math.isfinite(value) for value, goes_on in zip(at_picked, live, strict=True) if goes_on):
        raise not_finite()
    return ids


def not_finite() -> OnwardError:
    return OnwardError(
        "the model returned logits that are NaN or infinite where a token was picked: look for "
        "overflow (float16?), damaged weights or an uninitialised cache"
    )
