"""Turn operators into kernel calls, with one rule for each operator."""

from onward.program.lowering import adapters, experts, fused, infer, matrices, pointwise, states
from onward.program.lowering.builder import RULES, Builder, Unsupported
from onward.program.lowering.pointwise import INFER

__all__ = [
    "INFER",
    "RULES",
    "Builder",
    "Unsupported",
    "adapters",
    "experts",
    "fused",
    "infer",
    "matrices",
    "pointwise",
    "states",
]
