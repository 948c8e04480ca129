"""Models with random weights, made in memory: no files, and never more than one layer in floats."""

from typing import Any

import torch
from torch import Tensor

from onward.models import Model, WeightScope, build_model, pack_layer, pack_params, read_config
from onward.quantization import quantize_params


class _Noise:
    """Random weights, all slices of one pool, because drawing billions of numbers would take a minute."""

    def __init__(self) -> None:
        self._pool = torch.randn(1 << 26, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
        self._at = 0

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or torch.bfloat16
        count = torch.Size(shape).numel()
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype)
        if count > len(self._pool):
            return self._pool.repeat(count // len(self._pool) + 1)[:count].view(shape).to(dtype)
        self._at = (self._at + 7919) % (len(self._pool) - count + 1)
        return self._pool[self._at : self._at + count].view(shape).to(dtype)


def random_model(precision: str, config: dict) -> Model:
    """A model with random weights for this config in bf16, int8 or int4, packed layer by layer."""
    architecture = read_config(config)

    def convert(part: Any) -> Any:
        return part if precision == "bf16" else quantize_params(part, precision)[0]

    params = architecture.read(WeightScope(_Noise()), lambda layer: pack_layer(convert(layer)))
    rest = convert(params._replace(layers=()))
    return build_model(architecture, pack_params(rest)._replace(layers=params.layers))
