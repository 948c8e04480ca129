"""The format of Hermes, and of Qwen 2.5, QwQ and Qwen 3.

<think>
…
</think>

<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from typing import final

from onward.chat.calls import read_call_objects
from onward.chat.format import CallSyntax, MessageFormat
from onward.chat.source import MessageBuilder, Reading, TextReader

_CLOSING = "</tool_call>"
# Marks of families that do not write JSON in calls.
_OTHERS = ("<function=", "<arg_key>")


@final
class Hermes(MessageFormat):
    name = "hermes"
    openers = ("<tool_call>",)
    marks = (_CLOSING,)
    syntax = CallSyntax('\n{"name": ', ', "arguments": ', "}\n</tool_call>", "\n<tool_call>", quoted=True)

    def is_of(self, template: str) -> bool:
        return "<tool_call>" in template and not any(other in template for other in _OTHERS)

    def read_calls(self, opener: str, source: TextReader, message: MessageBuilder) -> Reading[bool]:
        if not (yield from read_call_objects(source, message)):
            return False
        yield from source.skip_space()
        yield from source.close(_CLOSING)
        return True
