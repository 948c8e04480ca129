"""Logit bias: numbers added to the logits of single ids."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from onward.errors import OptionError
from onward.sampling.history import History
from onward.sampling.transforms.transform import Adjustment, Changes
from onward.util.checks import check_id, is_number, plain
from onward.util.options import FLOAT32_MAX, REPETITION, option


@dataclass(frozen=True, kw_only=True)
class LogitBias(Adjustment):
    """logit_bias: {id: number added to its logit}; -inf bans the id."""

    needs_history: ClassVar[bool] = False
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = option(
        (), help="Numbers to add to the logits of ids; -inf bans one.", group=REPETITION, flag=""
    )

    def check(self) -> None:
        self._set("logit_bias", _as_pairs(self.logit_bias))

    def is_on(self) -> bool:
        return bool(self.logit_bias)

    def changes(self, history: History) -> Changes:
        biases = dict(self.logit_bias)
        return np.array(list(biases), dtype=np.int64), list(biases.values())

    def can_ban(self) -> bool:
        return float("-inf") in dict(self.logit_bias).values()

    def named_ids(self) -> Mapping[str, Iterable[int]]:
        return {"logit_bias": dict(self.logit_bias)}


def _as_pairs(bias: object) -> tuple[tuple[int, float], ...]:
    if isinstance(bias, Mapping):
        pairs: tuple[Any, ...] = tuple((plain(token), plain(value)) for token, value in bias.items())
    elif isinstance(bias, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in bias):
        pairs = bias
    else:
        raise OptionError("logit_bias", f"must be a mapping of ids to numbers; got {bias!r}")
    for token, value in pairs:
        check_id("logit_bias", token)
        if not (is_number(value) and (abs(value) <= FLOAT32_MAX or value == float("-inf"))):
            raise OptionError("logit_bias", f"of id {token} must be a number, or -inf to ban it; got {value!r}")
    if len({token for token, _ in pairs}) < len(pairs):
        raise OptionError("logit_bias", "names an id twice")
    return tuple(sorted(pairs))
