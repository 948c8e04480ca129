"""JSON Schemas: validation, references, and exact grammars of numbers."""

from onward.schemas.numbers import integers_between
from onward.schemas.references import alternatives, kind_of, kinds_of, resolve, values_of
from onward.schemas.rules import SPACED, Spacing, has_large_numbers, json_rules, lark_string
from onward.schemas.shape import check_schema, normalized

__all__ = [
    "SPACED", "Spacing", "alternatives", "check_schema", "has_large_numbers", "integers_between", "json_rules",
    "kind_of", "kinds_of", "lark_string", "normalized", "resolve", "values_of",
]  # fmt: skip
