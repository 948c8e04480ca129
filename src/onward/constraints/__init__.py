"""Constraints: JSON schemas, regular expressions, grammars and choices. See docs/structured.md."""

from onward.constraints.compiler import GrammarConstraint, TokenBytes, compiled, symbol
from onward.constraints.grammars import AfterText, Choice, Grammar, GrammarSource, JsonSchema, Lark, Regex

__all__ = [
    "AfterText", "Choice", "Grammar", "GrammarConstraint", "GrammarSource", "JsonSchema", "Lark", "Regex",
    "TokenBytes", "compiled", "symbol",
]  # fmt: skip
