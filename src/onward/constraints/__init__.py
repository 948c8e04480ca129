"""Constraints: JSON schemas, regular expressions, grammars and choices. docs/structured.md says how they work."""

from onward.constraints.compiled import compiled, symbol
from onward.constraints.grammars import After, Choice, Grammar, Lark, Regex
from onward.constraints.json_schema import JsonSchema
from onward.constraints.matcher import GrammarConstraint
from onward.constraints.vocabulary import TokenBytes
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
