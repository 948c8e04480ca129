"""Quantized weights for the tests, and a second, independent definition of the formats."""

import re
from pathlib import Path

import torch
from hypothesis import strategies as st

from onward.ops import QuantizedWeight

FORMATS = ("int8", "int4", "iq4_nl")
IQ4_NL = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Half a unit in the last place, relative: significands of 24, 11 and 8 bits.
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 140))
GROUP = 32
DOCS = Path(__file__).parents[2] / "docs" / "quantized-checkpoints.md"


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def integers(format, rows, inputs, seed=0):
    """Random q over the format's whole range, and scales; those of groups have either sign."""
    generator = torch.Generator().manual_seed(seed + 1000 * rows + inputs)
    low, high = {"int8": (-127, 128), "int4": (-8, 8), "iq4_nl": (0, 16)}[format]
    q = torch.randint(low, high, (rows, inputs), generator=generator, dtype=torch.int8)
    if format == "int8":
        return q, torch.rand(rows, 1, generator=generator) + 0.1
    return q, torch.randn(rows, -(-inputs // GROUP), generator=generator).to(torch.float16)


def numbers(format, q):
    """The values of q without their scales."""
    return torch.tensor(IQ4_NL)[q.long()] if format == "iq4_nl" else q


def packed(format, rows, inputs, seed=0, dtype=torch.float32):
    return QuantizedWeight.pack(format, *integers(format, rows, inputs, seed), dtype)


def spread(scales, inputs):
    """Scales [rows, groups] -> float64 [rows, inputs]."""
    group = inputs if scales.shape[1] == 1 else GROUP
    return scales.to(torch.float64).repeat_interleave(group, 1)[:, :inputs]


def documented_functions():
    """The formats that docs/quantized-checkpoints.md defines for converters, by name."""
    names = {}
    section = DOCS.read_text(encoding="utf-8").partition("\n### Write a folder with your own converter\n")[2]
    exec("\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL)), names)
    return names
