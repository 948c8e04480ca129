"""Verification: the target chooses every id as it would without a draft, and equal drafted ids are accepted.

So the ids are those of plain decoding, whatever the draft. A drafter that draws with the same noise agrees nearly as
often as the two distributions overlap. (Daliri et al., "Coupling without communication and drafter-invariant
speculative decoding", arXiv 2408.07978)
"""

from collections import abc

import torch
from torch import Tensor

from onward.decoding.sequence import Sequence
from onward.decoding.step import Drafts, SamplerCache, TokenSampler
from onward.errors import NothingToDrawError, OnwardError
from onward.sampling.logprobs import checked_ids, not_finite


def verify(
    chooser: TokenSampler, sequences: abc.Sequence[Sequence], logits: Tensor, positions: Tensor, drafts: Drafts
) -> list[list[int]]:
    """The ids that each of B sequences emits: the accepted ids of its draft, and one more. Histories and constraints
    stay as they are.

    Args:
        chooser: chooses the target's ids.
        logits: float [B, K+1, V]; logits[:, k] are those after the pending id and k drafted ids.
        positions: int [B, K+1], of the ids to choose from them.
        drafts: at most K ids for each sequence.

    Raises:
        OnwardError: the first id of a sequence cannot be chosen. If a later one cannot, its draft ends there.
    """
    if isinstance(chooser, SamplerCache):
        try:
            chosen = chooser(logits, positions, sequences, drafts).tolist()
        except NothingToDrawError:
            # Bans may leave nothing to draw after an id that is not accepted. Plain decoding never reaches that
            # position, so the ids are chosen position by position below.
            pass
        else:
            accepted = [
                ids[: 1 + next((k for k, token in enumerate(draft) if ids[k] != token), len(draft))]
                for ids, draft in zip(chosen, drafts, strict=True)
            ]
            return _with_finite_logits(logits, accepted)
    return _one_by_one(chooser, sequences, logits, positions, drafts)


def _one_by_one(
    chooser: TokenSampler, sequences: abc.Sequence[Sequence], logits: Tensor, positions: Tensor, drafts: Drafts
) -> list[list[int]]:
    """Choose position by position, only for drafts that agree so far."""

    def choose(k: int, places: abc.Sequence[int]) -> list[int]:
        if isinstance(chooser, SamplerCache):
            accepted = [drafts[place][:k] for place in places]
            agreeing = [sequences[place] for place in places]
            ids = chooser(logits[places, : k + 1], positions[places, : k + 1], agreeing, accepted)[:, k]
            return checked_ids(ids, logits[places, k])
        # A user's own function gets all rows, as in a plain step.
        ids = chooser(logits[:, k], positions[:, k], sequences)
        return checked_ids(ids[places] if len(ids) == len(logits) else ids, logits[places, k])

    emitted: list[list[int]] = [[] for _ in drafts]
    places = list(range(len(drafts)))
    for k in range(logits.shape[1]):
        try:
            chosen = choose(k, places)
        except OnwardError:
            # Bans that leave nothing to draw, or logits that are not finite, perhaps past the end of a sequence. If the
            # sequence continues there, the next round raises the error.
            if k == 0:
                raise
            break
        for place, token in zip(places, chosen, strict=True):
            emitted[place].append(token)
        places = [place for place in places if k < len(drafts[place]) and drafts[place][k] == emitted[place][k]]
        if not places:
            break
    return emitted


def _with_finite_logits(logits: Tensor, ids: list[list[int]]) -> list[list[int]]:
    """The ids of each row before the first one whose logit in [B, K+1, V] is not finite.

    It is an error only for a row's first id: a later one may be past the end of the sequence. Checking the logits of
    the picked ids is enough, because NaN wins every argmax.
    """
    longest = max(map(len, ids))
    padded = [[*new, *[0] * (longest - len(new))] for new in ids]
    picked = torch.tensor(padded, device=logits.device).unsqueeze(2)
    finite = logits[:, :longest].gather(2, picked).squeeze(2).isfinite().tolist()
    finite_counts = [
        next((k for k, ok in enumerate(row[: len(new)]) if not ok), len(new))
        for row, new in zip(finite, ids, strict=True)
    ]
    if any(new and not count for count, new in zip(finite_counts, ids, strict=True)):
        raise not_finite()
    return [new[:count] for count, new in zip(finite_counts, ids, strict=True)]
