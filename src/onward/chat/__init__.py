"""Chats: templates, tools, and streaming parsers for the reasoning and tool calls of each model family."""

from onward.chat.format import AnswerFormat, ArgumentSyntax, CallSyntax, MessageFormat, MessageParser
from onward.chat.formats import FORMATS, checked_format, format_of
from onward.chat.grammar import Content, answer_grammar, arguments_schema, content_beginning
from onward.chat.message import AssistantMessage, MessageDelta, ToolCall, ToolCallDelta, template_messages
from onward.chat.source import MessageBuilder, Reading, TextReader, read_string, read_value
from onward.chat.template import PROMPT_ENDINGS, ChatTemplate, Message
from onward.chat.tools import Tool, ToolChoice, ToolLike, ToolUse, read_tool_use

__all__ = [
    "FORMATS",
    "PROMPT_ENDINGS",
    "AnswerFormat",
    "ArgumentSyntax",
    "AssistantMessage",
    "CallSyntax",
    "ChatTemplate",
    "Content",
    "Message",
    "MessageBuilder",
    "MessageDelta",
    "MessageFormat",
    "MessageParser",
    "Reading",
    "TextReader",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "ToolLike",
    "ToolUse",
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
