"""The one state machine that reads answers: reasoning, content and calls, however the text is cut."""

from collections.abc import Callable, Collection

from onward.messages.format import MessageFormat
from onward.messages.message import MessageDelta
from onward.messages.source import Reading, Source
from onward.messages.written import Written


class MessageParser:
    """Reads one answer as it comes.

    Text is held back as long as it may be the beginning of a mark, or of a call whose name is not known. A call whose
    name cannot be read is content, its mark too, so nothing is lost. One that breaks off later stays a call, with the
    arguments as far as they were written.

    format: how the model writes.
    new_id: the id of the call with an index.
    tools: the names of the tools that were given; empty where they are not known. None: no tools were given, and what
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
        self._format, self._calls, self._thinking = format, tools is not None, thinking
        self._source, self._written = Source(), Written(new_id, tools or ())
        self._reading = self._read()
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

    def take(self) -> MessageDelta:
        """What became certain since the last time."""
        return self._written.take()

    def _read(self) -> Reading[None]:
        yield from self._read_reasoning()
        source, written = self._source, self._written
        openers = self._format.openers if self._calls else ()
        if self._calls:
            source.mark()
            if not (yield from self._format.read_start(source, written)):
                source.rewind()
        while opener := (yield from source.until(openers, written.content.add)):
            source.mark()
            if not (yield from self._format.read_calls(opener, source, written)):
                source.rewind()
                written.content.add(opener)

    def _read_reasoning(self) -> Reading[None]:
        """A message may begin with reasoning, and nowhere else has it any."""
        opening, closing = self._format.thinking
        source, written = self._source, self._written
        source.mark()
        yield from source.skip_space()
        if not (yield from source.skip(opening)) and not self._thinking:
            source.rewind()
            return
        source.forget()
        if (yield from source.until([closing], written.reasoning.add)) is not None:
            written.content.mark()
