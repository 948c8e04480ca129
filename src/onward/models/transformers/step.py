"""What the parts of a hosted module know of the forward that runs: the module calls them, and passes nothing on."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.cache import KVCache, LayerShape, PagedKVCache
from onward.errors import RequestError

NAME = "onward"  # under which its registries know our attention, masks and experts


def library(module: str = "") -> Any:
    """The package, or a module of it.

    Raises:
        RequestError: it is not installed, or too old for its registries.
    """
    try:
        return importlib.import_module(f"transformers.{module}" if module else "transformers")
    except ImportError as error:
        raise RequestError(
            f"via='transformers' wants transformers 5 or newer ({error}): pip install 'onward[transformers]'"
        ) from error


class UnsupportedModuleError(RequestError):
    """A module of transformers whose attention cannot run over Onward's caches; the message says why."""


class TransformersLayer(NamedTuple):
    """A layer's attention as the module calls it. window: how many positions a token sees; None: all."""

    window: int | None


@dataclass(eq=False)
class CacheSurvey:
    """What a first forward shows: the layers that cache something, in order, and how each layer attends.

    cached: shape by layer index. windows_of: what is seen of the keys of each layer. layers: by the number of the call
    of attention. windows: by the id of the stand-in for a mask. stand_ins: these, kept alive.
    """

    cached: dict[int, LayerShape] = field(default_factory=dict)
    windows_of: dict[int, set[int | None]] = field(default_factory=dict)
    layers: list[TransformersLayer] = field(default_factory=list)
    windows: dict[int, int | None] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)
    stand_ins: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class Step:
    """One forward.

    offsets: int32 [B]. cache: of the contract; None during a survey. places: a layer's place in the cache by its index.
    layers: by the number of the call of attention. logits_at: int64 [R, N], the positions that the head is to compute.
    """

    offsets: Tensor
    cache: KVCache | PagedKVCache | None
    places: dict[int, int]
    layers: list[TransformersLayer]
    logits_at: Tensor | None = None
    survey: CacheSurvey | None = None
    calls: int = 0
    _states: dict[int, tuple[int, Any]] = field(default_factory=dict)
    _written: set[int] = field(default_factory=set)

    def remember(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """New keys and values of a layer, which its attention, and perhaps later layers', will be called with."""
        self._states[id(keys)] = layer, (keys, values)

    @property
    def unread(self) -> bool:
        """Whether a layer cached keys and values that attention was not called with, or none did."""
        return not self._states or len(self._written) < len(self._states)

    def layer_of(self, keys: Tensor, values: Tensor) -> tuple[int, bool]:
        """The index of the layer whose keys and values these are, and whether they are new to the cache."""
        layer, states = self._states.get(id(keys), (-1, None))
        if states is None or states[1] is not values:
            raise UnsupportedModuleError("a layer changes keys or values between its cache and its attention")
        new = layer not in self._written
        self._written.add(layer)
        return layer, new


_current: ContextVar[Step | None] = ContextVar("onward_hosted_step", default=None)


def running_step() -> Step | None:
    """The forward that runs in this thread; None where the module keeps its own attention."""
    return _current.get()


def current_step() -> Step:
    """The forward that runs in this thread."""
    step = _current.get()
    if step is None:
        raise UnsupportedModuleError("a module that Onward hosts was called by something else")
    return step


@contextmanager
def a_step(step: Step) -> Iterator[None]:
    """Within the block `current_step` is this one."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)
