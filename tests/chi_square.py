"""Chi-square test of counts against expected probabilities."""

import torch
from torch import Tensor

# A fair sampler fails a test of this level once in a million choices of its seed; ours are fixed.
LEVEL = 1e-6


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Pearson's test. Cells are those of positive probability; a count in any other is impossible: 0."""
    possible = probs > 0
    if bool(counts[~possible].any()):
        return 0.0
    expected = probs[possible] / probs[possible].sum() * counts.sum()
    assert bool((expected >= 5).all()), "the approximation wants 5 expected in every cell"
    statistic = ((counts[possible] - expected).square() / expected).sum()
    freedom = torch.tensor(float(possible.sum() - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
