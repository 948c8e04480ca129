"""The corpus: a seeded grammar of short stories, questions, extractions and conversations, with and without tools."""

from .documents import END_OF_TEXT, EVEN, KINDS, Document, documents, tool_chats

__all__ = ["END_OF_TEXT", "EVEN", "KINDS", "Document", "documents", "tool_chats"]
