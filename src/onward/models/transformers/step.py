"""The running forward pass, for the parts of a hosted module, to which the module itself passes nothing."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onward.cache import LayerShape
from onward.errors import RequestError
from onward.models.blocks.layer import LayerCache

NAME = "onward"  # of Onward's attention, masks and experts in transformers' registries


def library(module: str = "") -> Any:
    """Import transformers, or a module of it.

    Raises:
        RequestError: it is not installed, or too old.
    """
    try:
        return importlib.import_module(f"transformers.{module}" if module else "transformers")
    except ImportError as error:
        raise RequestError(
            f"via='transformers' needs transformers 5 or newer ({error}): pip install 'onward[transformers]'"
        ) from error


class UnsupportedModuleError(RequestError):
    """A transformers module whose attention cannot run over Onward's KV cache; the message says why."""


@dataclass(eq=False)
class CacheSurvey:
    """The observations of a first forward pass.

    cached: the cache shape by layer index. windows_of: the windows of each layer's keys. windows: by the number of the
    attention call. masks: placeholders (kept alive) and their windows, by id.
    """

    cached: dict[int, LayerShape] = field(default_factory=dict)
    windows_of: dict[int, set[int | None]] = field(default_factory=dict)
    windows: list[int | None] = field(default_factory=list)
    masks: dict[int, tuple[Tensor, int | None]] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)


@dataclass(eq=False)
class Step:
    """One forward pass.

    offsets: int32 [B]. cache: None during a survey. places: the cache index of each layer. windows: by the number of
    the attention call. logits_at: int64 [R, N], the positions whose logits the head computes. states: the layer, keys
    and values of each cache update, by the keys' id.
    """

    offsets: Tensor
    cache: LayerCache | None
    places: dict[int, int]
    windows: list[int | None]
    logits_at: Tensor | None = None
    survey: CacheSurvey | None = None
    calls: int = 0
    states: dict[int, tuple[int, tuple[Tensor, Tensor]]] = field(default_factory=dict)
    _written: set[int] = field(default_factory=set)

    @property
    def unread(self) -> bool:
        """Whether attention was not called with all cached keys and values, or none were cached."""
        return not self.states or len(self._written) < len(self.states)

    def layer_of(self, keys: Tensor, values: Tensor) -> tuple[int, bool]:
        """The index of the layer with these keys and values, and whether they are new to the cache."""
        layer, states = self.states.get(id(keys), (-1, None))
        if states is None or states[1] is not values:
            raise UnsupportedModuleError("a layer changes keys or values between its cache and its attention")
        new = layer not in self._written
        self._written.add(layer)
        return layer, new


_current: ContextVar[Step | None] = ContextVar("onward_hosted_step", default=None)


def running_step() -> Step | None:
    """The forward pass of this thread; None if the module runs its own attention."""
    return _current.get()


def current_step() -> Step:
    """The forward pass of this thread."""
    step = _current.get()
    if step is None:
        raise UnsupportedModuleError("a module that Onward runs was called from outside of Onward")
    return step


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Make a step the current one within the block."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)
