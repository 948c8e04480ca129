"""The format of Llama 3.1, 3.2 and 3.3: an answer is JSON where it is a call, and a mark may stand before it.

{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "weather", "parameters": {"city": "Bergen"}}
<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}
"""

from typing import final

from onward.chat.calls import read_call_objects
from onward.chat.format import CallSyntax, MessageFormat
from onward.chat.source import MessageBuilder, Reading, TextReader


@final
class Llama3(MessageFormat):
    name = "llama3"
    openers = ("<|python_tag|>",)
    bare = True
    syntax = CallSyntax('{"name": ', ', "parameters": ', "}", "; ", quoted=True)

    def is_of(self, template: str) -> bool:
        return "<|start_header_id|>" in template and ("<|python_tag|>" in template or '"parameters"' in template)

    def read_start(self, source: TextReader, written: MessageBuilder) -> Reading[bool]:
        # Other objects are answers in JSON.
        return (yield from read_call_objects(source, written, separator=";", known=True))

    def read_calls(self, opener: str, source: TextReader, written: MessageBuilder) -> Reading[bool]:
        # Beside calls it opens code, which is content.
        return (yield from read_call_objects(source, written, separator=";"))
