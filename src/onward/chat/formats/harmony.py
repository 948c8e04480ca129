"""Harmony, the format of gpt-oss: an answer is several messages, each with a channel and an optional recipient.

<|channel|>analysis<|message|>Oslo?<|end|>
<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>
<|start|>assistant<|channel|>final<|message|>It rains.<|return|>

The prompt ends with `<|start|>assistant`. Analysis is reasoning. A message to a function is a call. All other messages
are content: the final one, and commentary to the user before calls.
"""

import re
from collections.abc import Callable
from typing import final

from onward.chat.format import CallSyntax, MessageFormat
from onward.chat.source import SPACE, MessageBuilder, Reading, TextReader

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_TO, _FUNCTIONS = "to=", "functions."
_WORD = re.compile(rf"[^{SPACE}<]*")


@final
class Harmony(MessageFormat):
    name = "harmony"
    thinking = (f"{_CHANNEL}analysis{_MESSAGE}", "<|end|>")
    after_thinking = f"{_START}assistant"
    before_content = f"{_CHANNEL}final{_MESSAGE}"
    has_messages = True
    reasoning_ends = _ENDS
    openers = (f"{_CHANNEL}commentary {_TO}{_FUNCTIONS}",)
    marks = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
    syntax = CallSyntax("", f" {_CONSTRAIN}json{_MESSAGE}", "", None)

    def is_of(self, template: str) -> bool:
        return _CHANNEL in template and _MESSAGE in template

    def marks_of(self, *, calls: bool) -> tuple[str, ...]:
        return self.all_marks

    def read(self, source: TextReader, message: MessageBuilder, *, calls: bool, thinking: bool) -> Reading[None]:
        header = ("analysis", "") if thinking else (yield from _read_header(source))
        while (yield from source.until(_ENDS, _receiver(header, message, calls), is_cut=message.has_calls)) is not None:
            if not (yield from source.peek()):
                return
            header = yield from _read_header(source)
            if header is None and message.has_calls() and source.is_over:  # the text is cut in a header
                return

    def begins_reasoning(self, text: str, *, calls: bool) -> bool | None:
        source = TextReader()
        source.add(text)
        try:
            next(_read_header(source))
        except StopIteration as end:
            return _is_reasoning(end.value, calls)
        return None


def _is_reasoning(header: tuple[str, str] | None, calls: bool) -> bool:
    channel, recipient = header or ("", "")
    return channel == "analysis" and not (calls and recipient.startswith(_FUNCTIONS))


def _receiver(header: tuple[str, str] | None, message: MessageBuilder, calls: bool) -> Callable[[str], object]:
    """Return the function that takes the text of a message; without a header, it is content."""
    recipient = "" if header is None else header[1]
    if calls and recipient.startswith(_FUNCTIONS):
        message.call(recipient.removeprefix(_FUNCTIONS))
        return message.arguments
    text = message.reasoning if _is_reasoning(header, calls) else message.content
    text.paragraph()
    return text.add


def _read_header(source: TextReader) -> Reading[tuple[str, str] | None]:
    """Read a header through its message mark, and return its channel and recipient; if there is none, read nothing."""
    source.mark()
    yield from source.skip_space()
    if (yield from source.skip(_START)):
        yield from source.take(_WORD)  # the role
    channel = recipient = ""
    while True:
        yield from source.skip_space()
        if (yield from source.skip(_MESSAGE)):
            source.forget()
            return channel, recipient
        if (yield from source.skip(_CHANNEL)):
            channel = yield from source.word(_WORD)
        elif (yield from source.skip(_TO)):
            recipient = yield from source.word(_WORD)
        elif not (yield from source.skip(_CONSTRAIN)) and not (channel and (yield from source.word(_WORD))):
            source.rewind()  # a content type may come here, with or without its mark
            return None
