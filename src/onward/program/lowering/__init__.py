"""Turn operators into kernel calls, with one rule for each operator."""

from collections import ChainMap
from collections.abc import Mapping

from torch._ops import OpOverload

from onward.ops.operators import FAKES
from onward.program.lowering import adapters, experts, fused, infer, matrices, pointwise, states
from onward.program.lowering.builder import RULES, Builder, Unsupported
from onward.program.nodes import Infer

# Shapes and dtypes of results, for the recorder: of torch's operators and of ours.
INFER: Mapping[OpOverload, Infer] = ChainMap(pointwise.INFER, FAKES)

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
