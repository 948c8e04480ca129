"""The transforms that name ids, at every position of every row, from the row's own options and history."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from onward.errors import NothingToDrawError, RequestError
from onward.sampling.history import History
from onward.sampling.params import SamplingParams
from onward.sampling.transforms import Adjustment, Changes, Entries, transforms_of


class Adjustments:
    """What is done to logits before temperature and filters, in the order of docs/sampling.md.

    An option that no row uses costs nothing. needs_history: whether some row's options look at what came before.
    """

    def __init__(self, rows: Sequence[SamplingParams], device: torch.device | None) -> None:
        self._device = torch.device("cpu") if device is None else device
        kinds = dict.fromkeys(
            kind for of in {type(row): None for row in rows} for kind in transforms_of(of, Adjustment)
        )
        # Of each row those that are on, and all of these in their order.
        self._of_rows = [[kind for kind in kinds if isinstance(row, kind) and kind.is_on(row)] for row in rows]
        self._rows = rows
        pairs = [(kind, row) for row, on in zip(rows, self._of_rows, strict=True) for kind in on]
        self._kinds = [kind for kind in kinds if any(kind is one for one, _ in pairs)]
        self.any = bool(pairs)
        self.needs_history = any(kind.needs_history for kind in self._kinds)
        self._can_ban = any(kind.can_ban(row) for kind, row in pairs)
        self._named = max((token for kind, row in pairs for token in kind.named_ids(row)), default=-1)

    def __call__(
        self, logits: Tensor, histories: Sequence[History] | None, drafts: Sequence[Sequence[int]] | None
    ) -> Tensor:
        """float32 [B, K, V] -> the same, as `Sampler` explains.

        Raises:
            RequestError: an id outside the vocabulary, no histories where they are needed, or nothing left to draw.
        """
        batch, positions, vocab = logits.shape
        if self._named >= vocab:
            raise RequestError(
                f"logit_bias, bad_words or eos names id {self._named}, but the vocabulary ends at {vocab - 1}"
            )
        if histories is None:
            if self.needs_history:
                raise RequestError("penalties, DRY, n-grams, bad words and min_new_tokens need the rows' histories")
            histories = [History(()) for _ in self._rows]
        if len(histories) != batch:
            raise RequestError(f"the sampler was called with {batch} rows and {len(histories)} histories")
        changes: dict[type[Adjustment], list[tuple[int, Changes]]] = {kind: [] for kind in self._kinds}
        for place, row in _places(histories, drafts, positions):
            for kind in self._of_rows[row]:
                ids, values = kind.changes(self._rows[row], histories[row])
                changes[kind].append((place, (ids.copy(), values)))  # a history's arrays change with it
        flat = adjusted = logits.reshape(batch * positions, vocab)
        for kind, of_places in changes.items():
            adjusted = kind.adjust(adjusted, Entries.of(of_places, self._device))
        self._check_some_left(adjusted, flat)
        return adjusted.view(logits.shape)

    def _check_some_left(self, adjusted: Tensor, before: Tensor) -> None:
        if self._can_ban:
            empty = (adjusted.amax(-1) == float("-inf")) & (before.amax(-1) > float("-inf"))
            if bool(empty.any()):
                raise NothingToDrawError(
                    "logit_bias, bad_words, no_repeat_ngram_size and min_new_tokens together ban every id: nothing is "
                    "left to draw"
                )


def _places(
    histories: Sequence[History], drafts: Sequence[Sequence[int]] | None, positions: int
) -> Iterator[tuple[int, int]]:
    """(place, row) for every position of every row, while the row's history is what it would be there.

    Each draft is walked once.
    """
    for row, history in enumerate(histories):
        draft = () if drafts is None else drafts[row]
        with history.assuming(()):
            for position in range(positions):
                yield row * positions + position, row
                if position < min(len(draft), positions - 1):
                    history.append(draft[position])
