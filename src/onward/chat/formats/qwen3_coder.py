"""The format of Qwen3-Coder, and of Qwen 3.5 and later.

<tool_call>
<function=weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>
"""

import re
from typing import final

from onward.chat.calls import Arguments
from onward.chat.format import ArgumentSyntax, CallSyntax, MessageFormat
from onward.chat.source import MessageBuilder, Reading, TextReader

_NAME = re.compile(r"[^\s<>]*")
_PARAMETERS = re.compile(r"[^\n<>]*")
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_CLOSING = "</function>"


@final
class Qwen3Coder(MessageFormat):
    name = "qwen3-coder"
    openers = ("<tool_call>",)
    marks = ("</tool_call>",)
    syntax = CallSyntax(
        f"\n{_FUNCTION}",
        ">\n",
        f"{_CLOSING}\n</tool_call>",
        "\n<tool_call>",
        argument=ArgumentSyntax(_PARAMETER, ">\n", "\n</parameter>\n", _PARAMETERS),
    )

    def is_of(self, template: str) -> bool:
        return "<tool_call>" in template and _FUNCTION in template

    def read_calls(self, opener: str, source: TextReader, message: MessageBuilder) -> Reading[bool]:
        yield from source.skip_space()
        if not (yield from source.skip(_FUNCTION)):
            return False
        name = yield from _read_name(source, _NAME)
        if not name:
            return False
        source.forget()
        message.call(name)
        arguments = Arguments(message, message.schema(name))
        yield from source.skip_space()
        while (yield from source.skip(_PARAMETER)):
            parameter = yield from _read_name(source, _PARAMETERS)
            if parameter is None and source.is_over:
                return True
            yield from source.skip("\n")
            if not (yield from arguments.read(parameter or "", source, ["\n</parameter>", "</parameter>"])):
                return True
            yield from source.skip_space()
        whole = yield from source.skip(_CLOSING)
        if not whole and source.is_cut([_PARAMETER, _CLOSING]):
            yield from source.close(_PARAMETER, _CLOSING)
            return True
        arguments.end()
        yield from source.skip_space()
        yield from source.close(self.marks[0])
        return True


def _read_name(source: TextReader, pattern: re.Pattern[str]) -> Reading[str | None]:
    """Read a name and the end of its mark; None if the mark does not end."""
    name = yield from source.word(pattern)
    return name if (yield from source.skip(">")) else None
