"""What a reader makes of a text: the parts of a message, gathered until someone takes them."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from onward.messages.message import MessageDelta, ToolCallDelta
from onward.messages.source import SPACE


class Words:
    """Text beside marks. Spaces and line breaks next to a mark lay the text out, and are no part of it.

    Where text goes on after a mark, the spaces before the mark part it from what stood there. Text without marks is
    given out whole.
    """

    def __init__(self, give: Callable[[str], object]) -> None:
        self._give = give
        self._space = ""  # at the end of the text so far
        self._has_words = self._skips = self._after_mark = False

    def add(self, text: str) -> None:
        if self._skips:
            text = text.lstrip(SPACE)
            if not text:
                return
            self._skips = False
        whole = self._space + text
        words = whole.rstrip(SPACE)
        self._space = whole[len(words) :]
        if words:
            self._has_words, self._after_mark = True, False
            self._give(words)

    def mark(self) -> None:
        """A mark stands here."""
        if not self._has_words:
            self._space = ""
        self._skips = self._after_mark = True

    def paragraph(self) -> None:
        """What follows stands apart from what stood before."""
        if self._has_words:
            self._space, self._after_mark = "\n\n", True

    def end(self) -> None:
        """No more text will come."""
        if not self._after_mark:
            self._give(self._space)


class PlacedWords(Words):
    """Text beside marks, with its places in the answer.

    place: how many characters of the answer stand before the text that is added. spans: (begin, end) of all text.
    """

    def __init__(self, give: Callable[[str], object], place: Callable[[], int]) -> None:
        super().__init__(give)
        self._place = place
        self.spans: list[tuple[int, int]] = []

    def add(self, text: str) -> None:
        if text:
            begin = self._place()
            if self.spans and self.spans[-1][1] == begin:
                begin = self.spans.pop()[0]
            self.spans.append((begin, self._place() + len(text)))
        super().add(text)


class Written:
    """The parts of one message in the order in which they are read.

    new_id: of the call with an index. place: how many characters of the answer are read. tools: those that were given,
    by name, maybe each with the JSON schema of its arguments; empty where they are not known.
    """

    def __init__(self, new_id: Callable[[int], str], place: Callable[[], int], tools: Collection[str] = ()) -> None:
        self._new_id, self._tools = new_id, tools
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._count = 0
        self.content = Words(self._content.append)
        self.reasoning = PlacedWords(self._reasoning.append, place)
        self.reasoning.mark()

    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._count > 0

    def knows(self, name: str) -> bool:
        """Whether a tool of this name was given."""
        return not self._tools or name in self._tools

    def schema(self, name: str) -> Mapping[str, Any]:
        """Of a tool's arguments; empty where it is not known."""
        return self._tools.get(name, {}) if isinstance(self._tools, Mapping) else {}

    def call(self, name: str, id: str | None = None) -> None:
        """A call begins. id: where the model gave it one."""
        self.content.mark()
        self._calls.append(ToolCallDelta(self._count, id or self._new_id(self._count), name))
        self._count += 1

    def arguments(self, text: str) -> None:
        """The next characters of the arguments of the call that began last."""
        if text:
            self._calls.append(ToolCallDelta(self._count - 1, arguments=text))

    def take(self) -> MessageDelta:
        """What was written since the last time."""
        calls: list[ToolCallDelta] = []
        for call in self._calls:
            if calls and calls[-1].index == call.index:
                last = calls.pop()
                call = ToolCallDelta(last.index, last.id, last.name, last.arguments + call.arguments)
            calls.append(call)
        delta = MessageDelta("".join(self._content), "".join(self._reasoning), tuple(calls))
        for parts in (self._content, self._reasoning, self._calls):
            parts.clear()
        return delta
