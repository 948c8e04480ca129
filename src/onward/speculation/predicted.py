"""A drafter that is told what the text will probably be."""

from collections.abc import Sequence
from dataclasses import dataclass

from onward.speculation.drafter import DraftRequest, DraftRow

# How many of the last ids have to stand in the prediction for it to be taken up again after a difference.
_AGREEING = 3


class PredictedText:
    """A `Drafter` that proposes ids known beforehand, such as a file that is to be changed in a few places.

    Where the text differs from the prediction, it is taken up again after the next place where the text's last three
    ids stand in it; a place that follows the last one comes before the others.

    ids: of the prediction. It is for the texts of one request.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = tuple(ids)
        self._after: dict[tuple[int, ...], list[int]] = {}
        for end in range(_AGREEING, len(self.ids)):
            self._after.setdefault(self.ids[end - _AGREEING : end], []).append(end)

    def start(self, request: DraftRequest) -> "_Predictions":
        return _Predictions(self)

    def after(self, last: Sequence[int], place: int) -> int | None:
        """Where the prediction goes on after the ids `last`; from `place` on if it can."""
        places = self._after.get(tuple(last), ())
        return next((at for at in places if at >= place), places[0] if places else None)


@dataclass
class _Place:
    """Where a text stands in the prediction. at: the id that comes next; None while they differ."""

    at: int | None = 0
    last: int = 0  # the last `at` that there was
    seen: int = 0  # how many ids of the output have been looked at


class _Predictions:
    def __init__(self, predicted: PredictedText) -> None:
        self._predicted = predicted
        self._places: dict[int, _Place] = {}

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        return [self._continuation(row) for row in rows]

    def _continuation(self, row: DraftRow) -> Sequence[int]:
        ids, place = self._predicted.ids, self._places.setdefault(row.owner, _Place())
        for seen in range(place.seen, len(row.output)):
            if place.at is not None and place.at < len(ids) and ids[place.at] == row.output[seen]:
                place.at += 1
            else:
                last = row.output[max(0, seen + 1 - _AGREEING) : seen + 1]
                place.at = self._predicted.after(last, place.last)
            place.last = place.last if place.at is None else place.at
        place.seen = len(row.output)
        return () if place.at is None else ids[place.at : place.at + row.wanted]
