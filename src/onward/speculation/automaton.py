"""A suffix automaton: every run of ids of a text, found in time that does not depend on the text's length."""

from array import array


class SuffixAutomaton:
    """Of a text that grows at its end: which runs of ids it holds, and where one of their occurrences ended.

    A state stands for runs that end at the same places. Adding an id costs O(1) amortised, the text's automaton has
    at most two states and three transitions an id. (Blumer et al., "The smallest automaton recognizing the subwords
    of a text", Theoretical Computer Science 40, 1985)

    ids: the text. state, length: of the longest end of the text that stood in it before: 0 and 0 for none.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = array("q", [-1])
        self._length = array("q", [0])
        self._after = array("q", [0])
        self._last = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def state(self) -> int:
        return max(self._link[self._last], 0)

    @property
    def length(self) -> int:
        return self._length[self.state]

    def after(self, state: int) -> int:
        """The position after an occurrence of the state's runs: the latest at which they were the longest repeated
        end of the text, or the first."""
        return self._after[state]

    def push(self, token: int) -> None:
        """Add an id at the end."""
        repeated = self.state
        self._after[repeated] = len(self.ids)  # the occurrence that ended here has become an earlier one
        self.ids.append(token)
        new = self._state({}, self._length[self._last] + 1, len(self.ids))
        at = self._last
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = new
            at = self._link[at]
        self._link[new] = 0 if at < 0 else self._split(at, token)
        self._last = new

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """From the state of the longest end of a foreign text found here to that of the text with one id more."""
        while state > 0 and token not in self._next[state]:
            state = self._link[state]
            length = min(length, self._length[state])  # a state may have been split since
        following = self._next[state].get(token)
        return (0, 0) if following is None else (following, length + 1)

    def _split(self, at: int, token: int) -> int:
        """The state of exactly the longest run of `at` with `token` behind it."""
        following = self._next[at][token]
        if self._length[following] == self._length[at] + 1:
            return following
        clone = self._state(dict(self._next[following]), self._length[at] + 1, self._after[following])
        self._link[clone] = self._link[following]
        self._link[following] = clone
        while at >= 0 and self._next[at].get(token) == following:
            self._next[at][token] = clone
            at = self._link[at]
        return clone

    def _state(self, transitions: dict[int, int], length: int, after: int) -> int:
        self._next.append(transitions)
        self._link.append(0)
        self._length.append(length)
        self._after.append(after)
        return len(self._next) - 1
