"""What a row has seen: its prompt's ids and its output's, counted as they come."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class History:
    """The ids of one row. Appending is O(1), taking back k of them O(k); nothing is recounted.

    prompt: ids before the first that was drawn. output: ids drawn so far.
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
        """Ids of prompt and output together."""
        return len(self._ids)

    @property
    def output_length(self) -> int:
        return len(self._ids) - self.prompt_length

    @property
    def ids(self) -> Ids:
        """int64 [len]: the prompt, then the output. A view that the next change ends."""
        return self._ids.view()

    @property
    def seen(self) -> tuple[Ids, Ids]:
        """The different ids of prompt and output and how often each occurs: two int64 [N] views."""
        return self._seen.view()

    @property
    def drawn(self) -> tuple[Ids, Ids]:
        """The different ids of the output and how often each occurs: two int64 [N] views."""
        return self._drawn.view()

    def append(self, token: int) -> None:
        """One more id of the output."""
        self._ids.append(token)
        self._seen.add(token)
        self._drawn.add(token)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.append(token)

    def truncate(self, output_length: int) -> None:
        """Take back what was drawn after the first `output_length` ids of the output, which must be there."""
        assert 0 <= output_length <= self.output_length, "only what was drawn can be taken back"
        for token in self._ids.pop(self.output_length - output_length):
            self._seen.remove(token)
            self._drawn.remove(token)

    def fork(self) -> Self:
        """A copy that goes on from here by itself."""
        other = copy.copy(self)
        other._ids, other._seen, other._drawn = self._ids.fork(), self._seen.fork(), self._drawn.fork()
        return other

    @contextmanager
    def assuming(self, tokens: Sequence[int]) -> Iterator[None]:
        """As it would be after `tokens`, and what is appended to them meanwhile; afterwards as it was."""
        before = self.output_length
        self.extend(tokens)
        try:
            yield
        finally:
            self.truncate(before)


class _Growing:
    """An int64 array with room at its end."""

    def __init__(self) -> None:
        self._room = np.empty(64, dtype=np.int64)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, value: int) -> None:
        if self._length == len(self._room):
            self._room = np.concatenate((self._room, np.empty_like(self._room)))
        self._room[self._length] = value
        self._length += 1

    def pop(self, count: int) -> list[int]:
        """The last `count`, the very last first."""
        self._length -= count
        taken: list[int] = self._room[self._length : self._length + count][::-1].tolist()
        return taken

    def fork(self) -> "_Growing":
        other = _Growing()
        other._room, other._length = self._room.copy(), self._length
        return other

    def view(self) -> Ids:
        return self._room[: self._length]


class _Counts:
    """Different ids in the order in which they first came, each with its count.

    Ids are removed in the reverse order of being added, so one whose count falls to 0 is the last in the list.
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
