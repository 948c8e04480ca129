"""What happens to logits before a token is drawn, a transform a file. `SamplingParams` lists them in their order."""

from onward.sampling.transforms.transform import (
    Adjustment,
    Changes,
    Columns,
    Draws,
    Filter,
    LogitEntries,
    Transform,
    ban,
    transforms_of,
)

__all__ = [
    "Adjustment",
    "Changes",
    "Columns",
    "Draws",
    "Filter",
    "LogitEntries",
    "Transform",
    "ban",
    "transforms_of",
]
