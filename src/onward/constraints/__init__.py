"""Constraints: JSON schemas, regular expressions, grammars and choices. docs/structured.md says how they work."""

from onward.constraints.compiled import GrammarConstraint, TokenBytes, compiled, symbol
from onward.constraints.grammars import After, Choice, Grammar, JsonSchema, Lark, Regex
from onward.sampling.constraint import ConstrainedText, Constraint, Mask, mask_of

__all__ = [
    "After",
    "Choice",
    "ConstrainedText",
    "Constraint",
    "Grammar",
    "GrammarConstraint",
    "JsonSchema",
    "Lark",
    "Mask",
    "Regex",
    "TokenBytes",
    "compiled",
    "mask_of",
    "symbol",
]
