"""The ids of a row's prompt and output, with counts."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class History:
    """The ids of one row. Appending is O(1), removing k of them O(k); nothing is recounted.

    prompt: ids before the first sampled one. output: ids sampled so far.
    """

    def __init__(self, prompt: Iterable[int], output: Iterable[int] = ()) -> None:
        self._ids = _Growing()
        self._seen = _Counts()
        self._drawn = _Counts()
        for token in prompt:
            self._ids.append(token)
            self._seen.add(token)
        self.prompt_length = len(self._ids)
        self.extend(output)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def output_length(self) -> int:
        return len(self._ids) - self.prompt_length

    @property
    def ids(self) -> Ids:
        """int64 [len]: the prompt, then the output. A view that is valid until the next change."""
        return self._ids.view()

    @property
    def seen(self) -> tuple[Ids, Ids]:
        """The distinct ids of prompt and output and their counts: two int64 [N] views."""
        return self._seen.view()

    @property
    def drawn(self) -> tuple[Ids, Ids]:
        """The distinct ids of the output and their counts: two int64 [N] views."""
        return self._drawn.view()

    def append(self, token: int) -> None:
        self._ids.append(token)
        self._seen.add(token)
        self._drawn.add(token)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.append(token)

    def truncate(self, output_length: int) -> None:
        """Remove all but the first `output_length` ids of the output."""
        assert 0 <= output_length <= self.output_length, "only sampled ids can be removed"
        for token in self._ids.pop(self.output_length - output_length):
            self._seen.remove(token)
            self._drawn.remove(token)

    def fork(self) -> Self:
        """An independent copy in the same state."""
        other = copy.copy(self)
        other._ids, other._seen, other._drawn = self._ids.fork(), self._seen.fork(), self._drawn.fork()
        return other

    @contextmanager
    def assuming(self, tokens: Sequence[int]) -> Iterator[None]:
        """Append `tokens` within the context, and remove them and all later ones afterwards."""
        before = self.output_length
        self.extend(tokens)
        try:
            yield
        finally:
            self.truncate(before)


class _Growing:
    """A growable int64 array."""

    def __init__(self) -> None:
        self._buffer = np.empty(64, dtype=np.int64)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, value: int) -> None:
        if self._length == len(self._buffer):
            self._buffer = np.concatenate((self._buffer, np.empty_like(self._buffer)))
        self._buffer[self._length] = value
        self._length += 1

    def pop(self, count: int) -> list[int]:
        """Remove and return the last `count`, in reverse order."""
        self._length -= count
        removed: list[int] = self._buffer[self._length : self._length + count][::-1].tolist()
        return removed

    def fork(self) -> "_Growing":
        other = _Growing()
        other._buffer, other._length = self._buffer.copy(), self._length
        return other

    def view(self) -> Ids:
        return self._buffer[: self._length]


class _Counts:
    """Distinct ids in the order of their first occurrence, with counts.

    Ids are removed in the reverse order of insertion, so an id whose count falls to 0 is the last of the list.
    """

    def __init__(self) -> None:
        self._ids, self._counts = _Growing(), _Growing()
        self._places: dict[int, int] = {}

    def add(self, token: int) -> None:
        place = self._places.get(token)
        if place is None:
            self._places[token] = len(self._ids)
            self._ids.append(token)
            self._counts.append(1)
        else:
            self._counts.view()[place] += 1

    def remove(self, token: int) -> None:
        place = self._places[token]
        counts = self._counts.view()
        counts[place] -= 1
        if counts[place] == 0:
            assert place == len(self._ids) - 1
            del self._places[token]
            self._ids.pop(1)
            self._counts.pop(1)

    def fork(self) -> "_Counts":
        other = _Counts()
        other._ids, other._counts, other._places = self._ids.fork(), self._counts.fork(), self._places.copy()
        return other

    def view(self) -> tuple[Ids, Ids]:
        return self._ids.view(), self._counts.view()
