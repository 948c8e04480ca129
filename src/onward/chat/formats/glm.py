"""The format of GLM-4.5 and its successors.

<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Oslo</arg_value>
</tool_call>
<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>
"""

import re
from typing import final

from onward.chat.calls import Arguments
from onward.chat.format import ArgumentSyntax, CallSyntax, MessageFormat
from onward.chat.source import MessageBuilder, Reading, TextReader

_NAME = re.compile(r"[\w.-]*")
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_CLOSING = "</tool_call>"
# Whitespace around a key is layout.
_KEYS = re.compile(rf"(?!.*{_KEY_END})\S(.*\S)?", re.DOTALL)


class Glm(MessageFormat):
    """GLM-4.5: each mark is on its own line. Reads the layout of GLM-4.7, too."""

    name = "glm"
    openers = ("<tool_call>",)
    marks = (_CLOSING, _KEY, _KEY_END, _VALUE, _VALUE_END)
    syntax = CallSyntax(
        "",
        "\n",
        _CLOSING,
        "\n<tool_call>",
        argument=ArgumentSyntax(_KEY, f"{_KEY_END}\n{_VALUE}", f"{_VALUE_END}\n", _KEYS),
    )

    def is_of(self, template: str) -> bool:
        return _KEY in template and f"{_KEY_END}{_VALUE}" not in template

    def read_calls(self, opener: str, source: TextReader, message: MessageBuilder) -> Reading[bool]:
        yield from source.skip_space()
        name = yield from source.word(_NAME)
        yield from source.skip_space()
        # A call of a function without parameters is only a name.
        if not name or (yield from source.peek()) != "<":
            return False
        source.forget()
        message.call(name)
        arguments = Arguments(message, message.schema(name))
        while (yield from source.skip(_KEY)):
            key: list[str] = []
            whole = (yield from source.until([_KEY_END], key.append)) is not None
            yield from source.skip_space()
            if not whole or not (yield from source.close(_VALUE)):
                return True
            if not (yield from arguments.read("".join(key).strip(), source, [_VALUE_END])):
                return True
            yield from source.skip_space()
        whole = yield from source.skip(_CLOSING)
        if not whole and source.is_cut([_KEY, _CLOSING]):
            yield from source.close(_KEY, _CLOSING)
        else:
            arguments.end()
        return True


@final
class LaterGlm(Glm):
    """GLM-4.7: a call is one line."""

    name = "glm-4.7"
    syntax = CallSyntax(
        "", "", _CLOSING, "<tool_call>", argument=ArgumentSyntax(_KEY, f"{_KEY_END}{_VALUE}", _VALUE_END, _KEYS)
    )

    def is_of(self, template: str) -> bool:
        return f"{_KEY_END}{_VALUE}" in template
