"""Prompt lookup: a drafter that copies what followed an earlier occurrence of the last ids."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from onward.decoding.speculation.drafter import DraftRequest, DraftRow, continued
from onward.errors import RequestError

# The most earlier occurrences to compare, latest first.
_CANDIDATES = 32


class PromptLookup:
    """A `Drafter` that looks up the last ids earlier in the sequence and proposes what followed.

    It compares the earlier occurrences of the last `shortest` ids and takes the one with the longest match, up to
    `longest` ids, or the latest of equals. This costs a few microseconds per token.
    (A. Saxena, "Prompt lookup decoding", 2023; J. Yang et al., "Inference with reference", arXiv 2304.04487)

    Raises:
        RequestError: unless 1 <= shortest <= longest.
    """

    def __init__(self, shortest: int = 2, longest: int = 8) -> None:
        if not 1 <= shortest <= longest:
            raise RequestError(f"PromptLookup needs 1 <= shortest <= longest; got {shortest} and {longest}")
        self.shortest = shortest
        self.longest = longest

    def start(self, request: DraftRequest) -> "_Lookups":
        return _Lookups(self)


@dataclass
class _Index:
    """The ids of a row. after: for each run of `shortest` ids, the positions after its occurrences, in order."""

    ids: list[int] = field(default_factory=list)
    after: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    indexed: int = 0  # `after` has the runs that end before this position


class _Lookups:
    def __init__(self, lookup: PromptLookup) -> None:
        self._shortest, self._longest = lookup.shortest, lookup.longest
        self._rows: dict[int, _Index] = {}

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        return [self._continuation(row) for row in rows]

    def _continuation(self, row: DraftRow) -> list[int]:
        index = self._rows.setdefault(row.owner, _Index())
        index.ids += row.ids(len(index.ids))
        ids, shortest = index.ids, self._shortest
        # The run at the end itself is not indexed, because nothing follows it yet.
        for after in range(max(index.indexed, shortest), len(ids)):
            index.after.setdefault(tuple(ids[after - shortest : after]), []).append(after)
        index.indexed = max(index.indexed, len(ids))
        start = self._after_longest_match(ids, index.after.get(tuple(ids[len(ids) - shortest :]), ()))
        return [] if start is None else continued(ids, start, row.wanted)

    def _after_longest_match(self, ids: Sequence[int], positions: Sequence[int]) -> int | None:
        best, length = None, 0
        for after in positions[: -_CANDIDATES - 1 : -1]:
            agreeing = self._shortest
            while agreeing < min(self._longest, after) and ids[after - agreeing - 1] == ids[len(ids) - agreeing - 1]:
                agreeing += 1
            if agreeing > length:
                best, length = after, agreeing
            if length == self._longest:
                break
        return best


# How many of the last ids must match the prediction to resume it after a difference.
_AGREEING = 3


class PredictedOutput:
    """A `Drafter` that proposes a predicted output, such as a file to be edited in a few places.

    After a difference it resumes behind the next place in the prediction that matches the last three ids, preferably
    after the previous place.

    ids: of the prediction, which is for one request.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = tuple(ids)
        self._after: dict[tuple[int, ...], list[int]] = {}
        for end in range(_AGREEING, len(self.ids)):
            self._after.setdefault(self.ids[end - _AGREEING : end], []).append(end)

    def start(self, request: DraftRequest) -> "_Predictions":
        return _Predictions(self)

    def after(self, last: Sequence[int], place: int) -> int | None:
        """The index in the prediction after the ids `last`, from `place` on if possible."""
        places = self._after.get(tuple(last), ())
        return next((at for at in places if at >= place), places[0] if places else None)


@dataclass
class _Place:
    """A row's place in the prediction. at: the index of the next id; None while they differ."""

    at: int | None = 0
    last: int = 0  # the last `at` that was not None
    seen: int = 0  # the number of output ids compared so far


class _Predictions:
    def __init__(self, predicted: PredictedOutput) -> None:
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
