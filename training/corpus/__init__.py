"""The corpus: a seeded grammar of short stories, questions, extractions and conversations."""

from .documents import END_OF_TEXT, KINDS, documents

__all__ = ["END_OF_TEXT", "KINDS", "documents"]
