"""Completions as JSON."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onward import Completion
    from onward.decoding import TokenLogprobs


def json_fields(completion: "Completion") -> dict[str, Any]:
    """A completion's fields, with objects for logprobs, which are tuples."""
    found: dict[str, Any] = dataclasses.asdict(completion)
    for one, told in zip((found, *found["others"]), completion.choices, strict=True):
        for name in ("logprobs", "prompt_logprobs"):
            if (tokens := getattr(told, name)) is not None:
                one[name] = [token and _json_logprobs(token) for token in tokens]
    return found


def _json_logprobs(token: "TokenLogprobs") -> dict[str, Any]:
    top = [{"id": one, "logprob": finite(value)} for one, value in token.top]
    return {"logprob": finite(token.chosen), "top": top}


def finite(value: float) -> float | None:
    """JSON knows no infinity."""
    return value if math.isfinite(value) else None
