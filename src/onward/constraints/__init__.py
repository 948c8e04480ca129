"""Constraints: JSON schemas, regular expressions, grammars and choices. docs/structured.md says how they work."""

from onward.constraints.compiled import symbol
from onward.constraints.grammars import After, Choice, Grammar, Lark, Regex
from onward.constraints.json_schema import JsonSchema
from onward.constraints.vocabulary import TokenBytes
from onward.sampling.constraint import ConstrainedText, Constraint, Mask, mask_of

__all__ = [
    "After",
    "Choice",
    "ConstrainedText",
    "Constraint",
    "Grammar",
    "JsonSchema",
    "Lark",
    "Mask",
    "Regex",
    "TokenBytes",
    "mask_of",
    "symbol",
]
