"""From operators to kernel calls: one rule an operator."""

from onward.program.lowering import fused, infer, matrices, pointwise
from onward.program.lowering.builder import RULES, Builder, Unsupported
from onward.program.lowering.pointwise import INFER

__all__ = ["INFER", "RULES", "Builder", "Unsupported", "fused", "infer", "matrices", "pointwise"]
