"""The cache that a hosted module sees: it remembers what is new, which attention then stores."""

from functools import cache as once
from typing import Any

from torch import Tensor

from onward.cache import LayerShape
from onward.models.hosted.library import library
from onward.models.hosted.step import Step


class _Layer:
    """A layer of transformers' cache; `_layer_class` adds its base. It says that nothing was cached before.

    A module asks that only where it gets no positions; masks are ours.
    """

    def __init__(self, step: Step, index: int) -> None:
        super().__init__()
        self._step, self._index = step, index
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Remember new keys and values [B, G, T, D], and return them as they are."""
        survey = self._step.survey
        if survey is not None:
            survey.dtypes |= {key_states.dtype, value_states.dtype}
            survey.cached[self._index] = LayerShape(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        self._step.remember(self._index, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        return query_length, 0

    def lazy_initialization(self, *_: Any) -> None:
        """Do nothing: the memory is there already."""


@once
def _layer_class() -> Any:
    return type("OnwardHostedLayer", (_Layer, library("cache_utils").DynamicLayer), {})


def new_cache_of(step: Step, num_layers: int) -> Any:
    """A `transformers.Cache` for one forward."""
    layer_class = _layer_class()
    return library("cache_utils").Cache(layers=[layer_class(step, index) for index in range(num_layers)])
