"""The format of Llama 3.1, 3.2 and 3.3: a call is a JSON object, with an optional mark before it.

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

    def read_start(self, source: TextReader, message: MessageBuilder) -> Reading[bool]:
        # Other objects are answers in JSON, not calls.
        return (yield from read_call_objects(source, message, separator=";", known=True))

    def read_calls(self, opener: str, source: TextReader, message: MessageBuilder) -> Reading[bool]:
        # The mark also opens code, which is content.
        return (yield from read_call_objects(source, message, separator=";"))
