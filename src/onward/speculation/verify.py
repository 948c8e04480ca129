"""Which ids of a draft the target accepts, and which id follows them.

    (picker, state, logits [B, K+1, V], positions int32 [B, K+1], a draft of at most K ids a row) -> ids a row emits

logits[:, k] are the logits after the pending token and k drafted ids; positions[:, k] are the positions of the ids to
pick from them. A row emits the accepted ids and one more, which the target itself picked. Neither verifier changes a
history.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onward.decoding import DecodeState, Picker
from onward.decoding.step import checked_ids, not_finite
from onward.errors import NothingToDrawError, OnwardError
from onward.sampling import History, Sampler
from onward.sampling.noise import coins, gumbel_noise
from onward.speculation.drafter import Draft

Verifier = Callable[[Picker, DecodeState, Tensor, Tensor, Sequence[Draft]], list[list[int]]]

# Streams of noise (`onward.sampling.noise`) of the accept/resample rule, independent of each other.
_DRAFT, _RESAMPLE, _ACCEPT = 2, 3, 4


def coupled(
    picker: Picker, state: DecodeState, logits: Tensor, positions: Tensor, drafts: Sequence[Draft]
) -> list[list[int]]:
    """The target picks every id as it would without a draft. A drafted id is accepted if it is the same id.

    The ids are those of plain decoding, whatever the draft. A drafter that draws with the same noise agrees nearly as
    often as the two distributions overlap. (Daliri et al., "Coupling without communication and drafter-invariant
    speculative decoding", arXiv 2408.07978)
    """
    select = picker.of(state.owners)
    if isinstance(select, Sampler):
        try:
            picked = picker(logits, positions, state.owners, [draft.ids for draft in drafts]).tolist()
        except NothingToDrawError:
            # Bans may leave nothing to draw after an id that is not accepted. Plain decoding never reaches that
            # position, so the positions are picked one by one below.
            pass
        else:
            rows = zip(picked, drafts, state.live, strict=True)
            return [ids[: _agreeing(ids, draft.ids) + 1] if live else [] for ids, draft, live in rows]

    def pick(k: int, places: Sequence[int]) -> list[int]:
        if isinstance(select, Sampler):
            owners = tuple(state.owners[place] for place in places)
            ids = picker(logits[places, k], positions[places, k], owners)
            return checked_ids(ids, logits[places, k], [True] * len(places))
        # A user's own function gets all rows, as in a plain step.
        is_checked = [place in places for place in range(len(drafts))]
        all_ids = checked_ids(picker(logits[:, k], positions[:, k], state.owners), logits[:, k], is_checked)
        return [all_ids[place] for place in places]

    return _one_by_one(picker, state, drafts, pick)


def rejection(
    picker: Picker, state: DecodeState, logits: Tensor, positions: Tensor, drafts: Sequence[Draft]
) -> list[list[int]]:
    """The accept/resample rule: an id x drawn from q is accepted with probability min(1, p(x)/q(x)); otherwise an id is
    drawn from max(0, p - q). The emitted ids follow p, the target's own distribution after its transforms.

    The noise is keyed by seed and position. So the ids depend only on these, on the logits and, unlike those of
    `coupled`, on the drafts. (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318)
    """

    def pick(k: int, places: Sequence[int]) -> list[int]:
        owners = tuple(state.owners[place] for place in places)
        sampler = picker.of(owners)
        assert isinstance(sampler, Sampler), "there is no distribution without a Sampler"
        logits_k, positions_k = logits[places, k], positions[places, k]
        target = _finite(sampler.probabilities(logits_k, positions_k, picker.histories_of(owners)))
        drafted = torch.tensor([_id_at(drafts[place], k) for place in places], device=logits_k.device)
        drawn_from = _draft_distributions([drafts[place] for place in places], k, drafted, target)
        ids = accept_or_resample(target, drawn_from, drafted, sampler.keys, positions_k)
        return checked_ids(ids, logits_k, [True] * len(places))

    return _one_by_one(picker, state, drafts, pick)


def accept_or_resample(target: Tensor, drawn_from: Tensor, drafted: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """One id a row: the drafted one where it is accepted, otherwise one drawn from what is left of `target`.

    target, drawn_from: p and q, float64 [B, V].
    drafted: int64 [B]. Where it is negative nothing was drafted, q is 0, and the id is drawn from p.
    keys, positions: int64 [B] and int [B], as in `gumbel_noise`.
    """
    chosen = drafted.clamp(min=0).unsqueeze(1)
    p, q = target.gather(1, chosen).squeeze(1), drawn_from.gather(1, chosen).squeeze(1)
    accepted = (drafted >= 0) & (coins(keys, positions, _ACCEPT) * q < p)
    left = (target - drawn_from).clamp(min=0).log()
    resampled = (left + gumbel_noise(keys, positions, target.shape[1], _RESAMPLE)).argmax(-1)
    return torch.where(accepted, drafted, resampled)


class DraftSampler(Picker):
    """Draws drafted ids for the accept/resample rule, with a stream of noise of their own.

    probabilities: the distributions of the last draw, float64 [B, V].
    """

    def __init__(self, sampler: Sampler, histories: Sequence[History] | None) -> None:
        super().__init__(sampler, histories)
        self.probabilities = torch.empty(0)

    def __call__(
        self,
        logits: Tensor,
        positions: Tensor,
        owners: tuple[int, ...],
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        assert drafts is None
        sampler = self.of(owners)
        assert isinstance(sampler, Sampler)
        self.probabilities = _finite(sampler.probabilities(logits, positions, self.histories_of(owners)))
        noise = gumbel_noise(sampler.keys, positions, logits.shape[-1], _DRAFT)
        return (self.probabilities.log() + noise).argmax(-1)


def _one_by_one(
    picker: Picker,
    state: DecodeState,
    drafts: Sequence[Draft],
    pick: Callable[[int, Sequence[int]], list[int]],
) -> list[list[int]]:
    """Pick position by position, each only for the rows whose draft agrees so far, with histories that hold these ids.

    Where nothing can be picked after an accepted id, the round ends with that id. If the text goes on there, the next
    round raises the error.
    """
    emitted: list[list[int]] = [[] for _ in drafts]
    places = [place for place, live in enumerate(state.live) if live]
    histories = picker.histories
    before = {} if histories is None else {place: histories[state.owners[place]].output_length for place in places}
    try:
        for k in range(max(len(draft.ids) for draft in drafts) + 1):
            agreed = []
            try:
                picked = pick(k, places)
            except OnwardError:
                # Bans that leave nothing to draw, or logits that are not finite: perhaps past the end of a text.
                if k == 0:
                    raise
                break
            for place, token in zip(places, picked, strict=True):
                emitted[place].append(token)
                if token == _id_at(drafts[place], k):
                    agreed.append(place)
                    if histories is not None:
                        histories[state.owners[place]].append(token)
            places = agreed
            if not places:
                break
    finally:
        for place, length in before.items():
            assert histories is not None
            histories[state.owners[place]].truncate(length)
    return emitted


def _finite(probabilities: Tensor) -> Tensor:
    if not bool(probabilities.isfinite().all()):
        raise not_finite()
    return probabilities


def _agreeing(picked: Sequence[int], draft: Sequence[int]) -> int:
    return next((k for k, token in enumerate(draft) if picked[k] != token), len(draft))


def _id_at(draft: Draft, k: int) -> int:
    return int(draft.ids[k]) if k < len(draft.ids) else -1


def _draft_distributions(drafts: Sequence[Draft], k: int, drafted: Tensor, target: Tensor) -> Tensor:
    """q of position k, float64 [B, V]: the draft's own where it has one, else its id for certain; 0 past its end."""
    certain = torch.nn.functional.one_hot(drafted.clamp(min=0), target.shape[1]).to(torch.float64)
    distributions = torch.where((drafted >= 0).unsqueeze(1), certain, 0.0)
    for row, draft in enumerate(drafts):
        if draft.probabilities is not None and k < len(draft.ids):
            distributions[row] = draft.probabilities[k]
    return distributions
