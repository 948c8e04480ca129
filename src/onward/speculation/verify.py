"""Which ids of a draft the target accepts, and which id follows them.

    (chooser, sequences, logits [B, K+1, V], positions int32 [B, K+1], a draft of at most K ids each) -> ids each emits

logits[:, k] are the logits after the pending token and k drafted ids; positions[:, k] are the positions of the ids to
choose from them. A sequence emits the accepted ids and one more, which the target itself chose. Neither verifier
changes a history or a constraint.
"""

import weakref
from collections import abc
from collections.abc import Callable

import torch
from torch import Tensor

from onward.decoding import Chooser, SamplingChooser, Sequence
from onward.decoding.choose import constraints_of, histories_of
from onward.decoding.token import checked_ids, not_finite
from onward.errors import NothingToDrawError, OnwardError
from onward.sampling.noise import coins, gumbel_noise
from onward.speculation.drafter import Draft

Verifier = Callable[[Chooser, abc.Sequence[Sequence], Tensor, Tensor, abc.Sequence[Draft]], list[list[int]]]

# Streams of noise (`onward.sampling.noise`) of the accept/resample rule, independent of each other.
_DRAFT, _RESAMPLE, _ACCEPT = 2, 3, 4


def coupled(
    chooser: Chooser,
    sequences: abc.Sequence[Sequence],
    logits: Tensor,
    positions: Tensor,
    drafts: abc.Sequence[Draft],
) -> list[list[int]]:
    """The target chooses every id as it would without a draft. A drafted id is accepted if it is the same id.

    The ids are those of plain decoding, whatever the draft. A drafter that draws with the same noise agrees nearly as
    often as the two distributions overlap. (Daliri et al., "Coupling without communication and drafter-invariant
    speculative decoding", arXiv 2408.07978)
    """
    samples = isinstance(chooser, SamplingChooser)
    if samples:
        try:
            chosen = chooser(logits, positions, sequences, [draft.ids for draft in drafts]).tolist()
        except NothingToDrawError:
            # Bans may leave nothing to draw after an id that is not accepted. Plain decoding never reaches that
            # position, so the positions are chosen one by one below.
            pass
        else:
            return [ids[: _agreeing(ids, draft.ids) + 1] for ids, draft in zip(chosen, drafts, strict=True)]

    def choose(k: int, places: abc.Sequence[int]) -> list[int]:
        if samples:
            ids = chooser(logits[places, k], positions[places, k], [sequences[place] for place in places])
            return checked_ids(ids, logits[places, k])
        # A user's own function gets all rows, as in a plain step.
        ids = chooser(logits[:, k], positions[:, k], sequences)
        return checked_ids(ids[places] if len(ids) == len(logits) else ids, logits[places, k])

    return _one_by_one(sequences, drafts, choose)


def rejection(
    chooser: Chooser,
    sequences: abc.Sequence[Sequence],
    logits: Tensor,
    positions: Tensor,
    drafts: abc.Sequence[Draft],
) -> list[list[int]]:
    """The accept/resample rule: an id x drawn from q is accepted with probability min(1, p(x)/q(x)); otherwise an id is
    drawn from max(0, p - q). The emitted ids follow p, the target's own distribution after its transforms.

    The noise is keyed by seed and position. So the ids depend only on these, on the logits and, unlike those of
    `coupled`, on the drafts. (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318)
    """
    assert isinstance(chooser, SamplingChooser), "there is no distribution without sampling"

    def choose(k: int, places: abc.Sequence[int]) -> list[int]:
        some = [sequences[place] for place in places]
        sampler = chooser.sampler(some)
        logits_k, positions_k = logits[places, k], positions[places, k]
        histories, constraints = histories_of(sampler, some), constraints_of(some)
        target = _finite(sampler.probabilities(logits_k, positions_k, histories, constraints))
        drafted = torch.tensor([_id_at(drafts[place], k) for place in places], device=logits_k.device)
        drawn_from = _draft_distributions([drafts[place] for place in places], k, drafted, target)
        ids = accept_or_resample(target, drawn_from, drafted, sampler.keys, positions_k)
        plain = [at for at, place in enumerate(places) if not drafts[place].ids]
        if plain:  # as in a plain step, which these would be in where nothing was drafted for others
            ids[plain] = chooser(logits_k[plain], positions_k[plain], [some[at] for at in plain])
        return checked_ids(ids, logits_k)

    return _one_by_one(sequences, drafts, choose)


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


class DraftChooser(SamplingChooser):
    """Draws drafted ids for the accept/resample rule, with a stream of noise of their own.

    probabilities: the distribution of the last draw for each sequence, float64 [V].
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.probabilities = weakref.WeakKeyDictionary[Sequence, Tensor]()

    def __call__(
        self,
        logits: Tensor,
        positions: Tensor,
        sequences: abc.Sequence[Sequence],
        drafts: abc.Sequence[abc.Sequence[int]] | None = None,
    ) -> Tensor:
        assert drafts is None, "drafted ids are drawn one after another"
        sampler = self.sampler(sequences)
        histories, constraints = histories_of(sampler, sequences), constraints_of(sequences)
        probabilities = _finite(sampler.probabilities(logits, positions, histories, constraints))
        self.probabilities.update(zip(sequences, probabilities, strict=True))
        noise = gumbel_noise(sampler.keys, positions, logits.shape[-1], _DRAFT)
        return (probabilities.log() + noise).argmax(-1)

    def kernel(self, sequences: abc.Sequence[Sequence]) -> None:
        return None


def _one_by_one(
    sequences: abc.Sequence[Sequence],
    drafts: abc.Sequence[Draft],
    choose: Callable[[int, abc.Sequence[int]], list[int]],
) -> list[list[int]]:
    """Choose position by position, each only for the sequences whose draft agrees so far, with histories and
    constraints that hold these ids.

    Where nothing can be chosen after an accepted id, the round ends with that id. If the text goes on there, the next
    round raises the error.
    """
    emitted: list[list[int]] = [[] for _ in drafts]
    places = list(range(len(drafts)))
    try:
        for k in range(max(len(draft.ids) for draft in drafts) + 1):
            agreed = []
            try:
                chosen = choose(k, places)
            except OnwardError:
                # Bans that leave nothing to draw, or logits that are not finite: perhaps past the end of a text.
                if k == 0:
                    raise
                break
            for place, token in zip(places, chosen, strict=True):
                emitted[place].append(token)
                if token == _id_at(drafts[place], k):
                    agreed.append(place)
                    if (history := sequences[place].history) is not None:
                        history.append(token)
                    if (constraint := sequences[place].constraint) is not None:
                        constraint.append(token)
            places = agreed
            if not places:
                break
    finally:
        for sequence in sequences:
            if sequence.history is not None:
                sequence.history.truncate(len(sequence.token_ids))
            if sequence.constraint is not None:
                sequence.constraint.truncate(len(sequence.token_ids))
    return emitted


def _finite(probabilities: Tensor) -> Tensor:
    if not bool(probabilities.isfinite().all()):
        raise not_finite()
    return probabilities


def _agreeing(picked: abc.Sequence[int], draft: abc.Sequence[int]) -> int:
    return next((k for k, token in enumerate(draft) if picked[k] != token), len(draft))


def _id_at(draft: Draft, k: int) -> int:
    return int(draft.ids[k]) if k < len(draft.ids) else -1


def _draft_distributions(drafts: abc.Sequence[Draft], k: int, drafted: Tensor, target: Tensor) -> Tensor:
    """q of position k, float64 [B, V]: the draft's own where it has one, else its id for certain; 0 past its end."""
    certain = torch.nn.functional.one_hot(drafted.clamp(min=0), target.shape[1]).to(torch.float64)
    distributions = torch.where((drafted >= 0).unsqueeze(1), certain, 0.0)
    for row, draft in enumerate(drafts):
        if draft.probabilities is not None and k < len(draft.ids):
            distributions[row] = draft.probabilities[k]
    return distributions
