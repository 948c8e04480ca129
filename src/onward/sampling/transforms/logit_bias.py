"""Logit bias: numbers added to the logits of single ids."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

import numpy as np

from onward.errors import RequestError
from onward.sampling.history import History
from onward.sampling.transforms.transform import Adjustment, Changes
from onward.util.checks import check_whole, is_float32, plain


class LogitBiasDict(TypedDict, total=False):
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class LogitBias(Adjustment):
    """logit_bias: {id: number added to its logit}; -inf bans the id."""

    needs_history: ClassVar[bool] = False
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()

    def check(self) -> None:
        self._set("logit_bias", _as_pairs(self.logit_bias))

    def is_on(self) -> bool:
        return bool(self.logit_bias)

    def changes(self, history: History) -> Changes:
        biases = dict(self.logit_bias)
        return np.array(list(biases), dtype=np.int64), list(biases.values())

    def can_ban(self) -> bool:
        return float("-inf") in dict(self.logit_bias).values()

    def named_ids(self) -> Iterable[int]:
        return dict(self.logit_bias)


def _as_pairs(bias: object) -> tuple[tuple[int, float], ...]:
    if isinstance(bias, Mapping):
        pairs: tuple[Any, ...] = tuple((plain(token), plain(value)) for token, value in bias.items())
    elif isinstance(bias, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in bias):
        pairs = bias
    else:
        raise RequestError(f"logit_bias must be a mapping of ids to numbers; got {bias!r}")
    for token, value in pairs:
        check_whole("logit_bias: an id", token, low=0)
        if not (is_float32(value) or value == float("-inf")):
            raise RequestError(f"logit_bias of id {token} must be a number, or -inf to ban it; got {value!r}")
    if len({token for token, _ in pairs}) < len(pairs):
        raise RequestError("logit_bias names an id twice")
    return tuple(sorted(pairs))
