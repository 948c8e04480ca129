"""Reads answers as they come: reasoning, content and calls, however the text is cut."""

from collections.abc import Callable, Collection, Sequence

from onward.messages.format import MessageFormat
from onward.messages.message import MessageDelta
from onward.messages.source import Source
from onward.messages.written import Written


class MessageParser:
    """Reads one answer as it comes.

    Text is held back as long as it may be the beginning of a mark, or of a call whose name is not known. A call whose
    name cannot be read is content, its mark too, so nothing is lost. One that breaks off later stays a call, with the
    arguments as far as they were written.

    format: how the model writes.
    new_id: the id of the call with an index.
    tools: the names of the tools that were given, maybe each with the JSON schema of its arguments, by which formats
        without JSON tell texts from numbers; empty where they are not known. None: no tools were given, and what
        looks like a call is content.
    thinking: whether the prompt has opened the reasoning already.
    """

    def __init__(
        self,
        format: MessageFormat,
        new_id: Callable[[int], str],
        tools: Collection[str] | None = None,
        thinking: bool = False,
    ) -> None:
        self._source = source = Source()
        self._written = Written(new_id, lambda: source.place, tools or ())
        self._reading = format.read(self._source, self._written, calls=tools is not None, thinking=thinking)
        next(self._reading, None)

    def feed(self, text: str) -> None:
        """Read on."""
        if text:
            self._source.add(text)
            next(self._reading, None)

    def finish(self) -> None:
        """The text is over: what was held back is certain, too."""
        self._source.end()
        next(self._reading, None)
        self._written.content.end()

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """Where reasoning stands in the text that was fed, without its marks: (begin, end), in order."""
        return self._written.reasoning.spans

    def take(self) -> MessageDelta:
        """What became certain since the last time."""
        return self._written.take()
