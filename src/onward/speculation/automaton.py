"""A suffix automaton finds any run of ids in a text, in time that does not depend on the text's length."""

from array import array


class SuffixAutomaton:
    """The runs of ids in a text that grows at its end, and for each run the position where one occurrence ended.

    A state stands for all runs that end at the same positions. Adding an id costs O(1) amortised. The automaton has at
    most two states and three transitions for each id of the text. (Blumer et al., "The smallest automaton recognizing
    the subwords of a text", Theoretical Computer Science 40, 1985)

    ids: the text.
    state, length: of the longest end of the text that also occurs earlier in it; 0 and 0 where none does.
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
        """The position after an occurrence of the state's runs.

        It is the latest one at which they were the longest repeated end of the text; else it is the first.
        """
        return self._after[state]

    def push(self, token: int) -> None:
        """Add an id at the end."""
        repeated = self.state
        self._after[repeated] = len(self.ids)  # the occurrence that ended here is now an earlier one
        self.ids.append(token)
        new = self._new_state({}, self._length[self._last] + 1, len(self.ids))
        suffix = self._last
        while suffix >= 0 and token not in self._next[suffix]:
            self._next[suffix][token] = new
            suffix = self._link[suffix]
        self._link[new] = 0 if suffix < 0 else self._split(suffix, token)
        self._last = new

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Follow another text by one id: from the state and length of its longest end that occurs here to the next."""
        while state > 0 and token not in self._next[state]:
            state = self._link[state]
            length = min(length, self._length[state])  # a state may have been split since
        following = self._next[state].get(token)
        return (0, 0) if following is None else (following, length + 1)

    def _split(self, state: int, token: int) -> int:
        """The state whose longest run is the longest run of `state` followed by `token`; a new one where needed."""
        following = self._next[state][token]
        if self._length[following] == self._length[state] + 1:
            return following
        clone = self._new_state(dict(self._next[following]), self._length[state] + 1, self._after[following])
        self._link[clone] = self._link[following]
        self._link[following] = clone
        while state >= 0 and self._next[state].get(token) == following:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _new_state(self, transitions: dict[int, int], length: int, after: int) -> int:
        self._next.append(transitions)
        self._link.append(0)
        self._length.append(length)
        self._after.append(after)
        return len(self._next) - 1
