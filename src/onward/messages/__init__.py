"""Chat messages: reasoning and calls of tools as families of models write them, read while they come; tools."""

from onward.messages.answer import AnswerReading, MessageParser
from onward.messages.conversation import template_messages
from onward.messages.format import ArgumentSyntax, CallSyntax, MessageFormat
from onward.messages.formats import FORMATS, checked_format, format_of
from onward.messages.grammar import Content, answer_grammar, arguments_schema, content_beginning
from onward.messages.message import AssistantMessage, MessageDelta, ToolCall, ToolCallDelta
from onward.messages.source import Reading, Source, Written, read_string, read_value
from onward.messages.tools import Tool, ToolChoice, ToolLike, ToolUse, read_tool_use

__all__ = [
    "FORMATS",
    "AnswerReading",
    "ArgumentSyntax",
    "AssistantMessage",
    "CallSyntax",
    "Content",
    "MessageDelta",
    "MessageFormat",
    "MessageParser",
    "Reading",
    "Source",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "ToolLike",
    "ToolUse",
    "Written",
    "answer_grammar",
    "arguments_schema",
    "checked_format",
    "content_beginning",
    "format_of",
    "read_string",
    "read_tool_use",
    "read_value",
    "template_messages",
]
