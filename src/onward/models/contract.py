"""The contract of a forward (`onward.models.model`): checks of its result, and logits at some positions."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onward.errors import RequestError

# The tap whose values are the head's input (`onward.tap`).
NORM = "norm"


def logits_and_cache(result: object, source: str = "forward", advice: str = "") -> tuple[Tensor, Any]:
    """The result of a forward, checked to be (logits, cache). `source` and `advice` start and end the error message.

    Raises:
        RequestError: it is not a tuple of two items, or the first one is not a tensor.
    """
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
        raise RequestError(f"{source} must return (logits, cache); it returned {_type_names(result)}{advice}")
    return result


def check_logits(logits: Tensor, shape: torch.Size) -> None:
    """Raise `RequestError` unless logits are [*shape, V]; `shape` is [B, T], or [R, N] of selected positions."""
    if logits.dim() != 3 or logits.shape[:2] != shape:
        raise RequestError(f"forward must return logits {[*shape, 'V']}; got {list(logits.shape)}")


def take_positions(x: Tensor, positions: Tensor) -> Tensor:
    """[B, T, D] at int64 [R, N] indices into T of the first R rows -> [R, N, D]."""
    rows = torch.arange(positions.shape[0], device=x.device).unsqueeze(1)
    return x[rows, positions]


def takes_logits_at(function: Callable[..., Any]) -> bool:
    """Whether a forward, or a module's, has a parameter `logits_at`."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # a function without a signature, such as one written in C
        return False
    return "logits_at" in signature.parameters


@dataclass(frozen=True)
class SelectingForward:
    """Adds `logits_at` to a forward without it, which computes all logits."""

    forward: Callable[..., tuple[Tensor, Any]]

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Any, params: Any, *, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        result = self.forward(tokens, offsets, cache, params)
        if logits_at is None:
            return result
        logits, cache = logits_and_cache(result)
        check_logits(logits, tokens.shape)
        return take_positions(logits, logits_at), cache


def _type_names(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_type_name, value))})"
    return "None" if value is None else f"a {_type_name(value)}"


def _type_name(value: object) -> str:
    return "Tensor" if isinstance(value, Tensor) else type(value).__name__  # not the tracer's kind of tensor
