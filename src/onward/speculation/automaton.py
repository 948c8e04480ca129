"""A suffix automaton finds any run of ids in texts, in time that does not depend on their lengths."""

from array import array

# The position in a text takes the lower bits, and the index of the text the others.
_POSITION_BITS = 32
_POSITION = (1 << _POSITION_BITS) - 1


class SuffixAutomaton:
    """The runs of ids in texts that grow at their ends, and for each run the position where one occurrence ended.

    It begins with one text, text 0. Others may be added, and each may grow at any time.

    A state stands for all runs that end at the same positions. Adding an id costs O(1) amortised while one text grows.
    The automaton has at most two states and three transitions for each id. (Blumer et al., "The smallest automaton
    recognizing the subwords of a text", Theoretical Computer Science 40, 1985)

    ids: text 0.
    state, length: of the longest end of text 0 that also occurs earlier in it; 0 and 0 where none does.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._texts = [self.ids]
        self._lasts = array("q", [0])  # for each text the state of all of it
        self._next: list[dict[int, int]] = [{}]
        self._link = array("q", [-1])
        self._length = array("q", [0])
        self._after = array("q", [0])
        self._size = 0

    def __len__(self) -> int:
        """How many ids all texts have together."""
        return self._size

    @property
    def state(self) -> int:
        return self._repeated(0)

    @property
    def length(self) -> int:
        return self._length[self.state]

    def after(self, state: int) -> int:
        """The position in text 0 after an occurrence of the state's runs.

        It is the latest one at which they were the longest repeated end of the text; else it is the first.
        """
        return self._after[state] & _POSITION

    def following(self, state: int, count: int) -> list[int]:
        """The ids that follow an occurrence of the state's runs in its text, `count` at most."""
        after = self._after[state]
        position = after & _POSITION
        return self._texts[after >> _POSITION_BITS][position : position + count]

    def text(self, text: int) -> list[int]:
        """The ids of a text; an added one begins with the id that marks it."""
        return self._texts[text]

    def add_text(self) -> int:
        """Begin another text and return its index.

        It begins with a negative id that occurs nowhere else. So the state of all of it is never that of another run.
        """
        self._texts.append([])
        self._lasts.append(0)
        text = len(self._texts) - 1
        self.push(-text, text)
        return text

    def push(self, token: int, text: int = 0) -> None:
        """Add an id at the end of a text."""
        ids, suffix = self._texts[text], self._lasts[text]
        # The occurrence that ended here is now an earlier one.
        self._after[self._repeated(text)] = text << _POSITION_BITS | len(ids)
        ids.append(token)
        self._size += 1
        new = self._new_state({}, self._length[suffix] + 1, text << _POSITION_BITS | len(ids))
        while suffix >= 0 and token not in self._next[suffix]:
            self._next[suffix][token] = new
            suffix = self._link[suffix]
        self._link[new] = 0 if suffix < 0 else self._split(suffix, token)
        self._lasts[text] = new

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Follow another text by one id: from the state and length of its longest end that occurs here to the next."""
        while state > 0 and token not in self._next[state]:
            state = self._link[state]
            length = min(length, self._length[state])  # a state may have been split since
        following = self._next[state].get(token)
        return (0, 0) if following is None else (following, length + 1)

    def _repeated(self, text: int) -> int:
        """The state of the longest end of a text that also occurs elsewhere."""
        return max(self._link[self._lasts[text]], 0)

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
