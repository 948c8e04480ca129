"""The values of texts at taps: checks of requests for them, and hidden states without new tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onward.decoding.tap_capture import TapPositions
from onward.errors import OptionError
from onward.models import Model
from onward.util.text import in_bytes

# The maximum bytes of the values that one request reports.
_MAX_BYTES = 2**30
# The maximum number of texts that run together, by default, and of their tokens.
_MAX_ROWS = 64
_MAX_TOKENS = 2**14

HiddenAt = Literal["all", "last", "mean"]


def check_names(model: Model, names: Sequence[str]) -> None:
    """Raise `OptionError` for a tap that the model's forward does not have."""
    for name in names:
        if name not in model.taps:
            known = ", ".join(model.taps) or "none (see onward.tap)"
            raise OptionError("taps", f"names {name!r}, which the model's forward does not have; it has {known}")


def check_capture(model: Model, taps: Mapping[str, TapPositions], prompt: int, new: int, texts: int) -> None:
    """Raise `OptionError` for unknown taps, and for values of too many bytes. prompt, new: numbers of ids."""
    check_names(model, list(taps))
    counts = {"last": 1, "new": new, "all": prompt + new}
    nbytes = texts * sum(model.taps[name].nbytes * counts[which] for name, which in taps.items())
    if nbytes > _MAX_BYTES:
        raise OptionError(
            "taps",
            f"may report {in_bytes(nbytes)} of values, and a request at most {in_bytes(_MAX_BYTES)}: ask for fewer "
            'taps or new tokens, or for "last"',
        )


def checked_at(at: object) -> HiddenAt:
    if at not in get_args(HiddenAt):
        raise OptionError("at", f'must be "all", "last" or "mean"; got {at!r}')
    return at  # type: ignore[return-value]


_Result = TypeVar("_Result")


def in_groups(
    lengths: Sequence[int], run: Callable[[list[int]], list[_Result]], max_rows: int = _MAX_ROWS
) -> list[_Result]:
    """The results of texts of these lengths, in their order. run: the results of some texts, by index, which run
    together, at most `max_rows`; they have similar lengths, and the first one is the longest."""
    left = sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True)
    results: dict[int, _Result] = {}
    while left:
        rows = max(1, min(max_rows, _MAX_TOKENS // max(1, lengths[left[0]])))
        group, left = left[:rows], left[rows:]
        results |= zip(group, run(group), strict=True)
    return [results[index] for index in range(len(lengths))]


def weighted_mean(values: Tensor, weights: NDArray[Any] | None = None) -> Tensor:
    """[T, ...] -> float32 [...]: summed in order of position in double precision, whatever the number of threads."""
    rows = values.to(torch.float64).numpy()
    if weights is not None:
        rows = rows * weights.reshape(-1, *[1] * (rows.ndim - 1))
    total = len(rows) if weights is None else weights.sum()
    return torch.from_numpy((np.add.reduce(rows, axis=0) / max(total, 1)).astype(np.float32))
