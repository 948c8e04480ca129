"""The transforms of logits before sampling, one per file. `SamplingParams` lists them in order."""

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

__all__ = ["Adjustment", "Changes", "Columns", "Draws", "Filter", "LogitEntries", "Transform", "ban", "transforms_of"]
