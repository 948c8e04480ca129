"""The corpus: a seeded grammar of short stories, questions, extractions and conversations."""

from .documents import END_OF_TEXT, KINDS, TOOLS, documents, tool_chats, tuning_documents

__all__ = ["END_OF_TEXT", "KINDS", "TOOLS", "documents", "tool_chats", "tuning_documents"]
