"""Checks of a forward's result (`onward.models.model`), and the selection of logits by position."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onward.errors import RequestError


def logits_and_cache(result: object, source: str = "forward", advice: str = "") -> tuple[Tensor, Any]:
    """The result of a forward, checked to be (logits, cache). `source` and `advice` start and end the error message.

    Raises:
        RequestError: it is not a tuple of two items, or the first one is not a tensor.
    """
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
        raise RequestError(f"{source} must return (logits, cache); it returned {_type_names(result)}{advice}")
    return result


def check_logits(logits: Tensor, shape: Sequence[int]) -> None:
    """Raise `RequestError` unless logits are [*shape, V]; `shape` is [B, T], or [R, N] of selected positions."""
    if logits.dim() != 3 or logits.shape[:2] != tuple(shape):
        raise RequestError(f"forward must return logits {[*shape, 'V']}; got {list(logits.shape)}")


def take_positions(x: Tensor, positions: Tensor) -> Tensor:
    """[B, T, D] at int64 [R, N] indices into T of the first R rows -> [R, N, D]."""
    rows = torch.arange(positions.shape[0], device=x.device).unsqueeze(1)
    return x[rows, positions]


def _type_names(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return "None" if value is None else f"a {type(value).__name__}"
