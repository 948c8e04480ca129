"""Taps: named places in a forward, where a caller reads values or changes them."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor

from onward.errors import RequestError

# By tap: x -> the value that replaces x
TapUpdates = Mapping[str, Callable[[Tensor], Tensor]]


class _Active(threading.local):
    """What the running forward's caller asks for. names: the taps to read; None reads all. values: those read so far;
    None if nobody reads. updates: change values."""

    names: Collection[str] | None = ()
    values: dict[str, Tensor] | None = None
    updates: TapUpdates = MappingProxyType({})


_active = _Active()


def tap(x: Tensor, name: str) -> Tensor:
    """The identity, at a place that callers can name.

        x = onward.tap(x, "layers.12")

    A tap that no caller asks for costs nothing: it is not part of a program. `x` is float [B, T, ...], with the rows
    and tokens of the forward; use the result in place of `x`, so that callers can also change it. The name is unique
    in the forward.
    """
    if torch.compiler.is_compiling():
        return x
    if name in _active.updates:
        x = _active.updates[name](x)
    if is_read(name):
        report(name, x.clone())  # the forward may change x in place later
    return x


def report(name: str, values: Tensor) -> None:
    """Give the caller, which reads this tap, its values."""
    assert _active.values is not None, "the caller reads it"
    if name in _active.values:
        raise RequestError(f"a forward has two taps with the name {name!r}: names must be unique")
    _active.values[name] = values


def is_active() -> bool:
    """Whether a caller reads or changes any tap in this thread."""
    return _active.values is not None or bool(_active.updates)


def is_read(name: str) -> bool:
    """Whether a caller reads this tap."""
    return _active.values is not None and (_active.names is None or name in _active.names)


def active_updates() -> TapUpdates:
    """The changes that a caller makes at taps."""
    return _active.updates


def is_asked(name: str) -> bool:
    """Whether the caller reads or changes this tap. A forward that has fewer positions at the tap then computes all of
    them."""
    return not torch.compiler.is_compiling() and (is_read(name) or name in _active.updates)


@contextmanager
def reading(names: Collection[str] | None) -> Iterator[dict[str, Tensor]]:
    """Read taps of the forwards within the block, in this thread; None reads all."""
    before = _active.names, _active.values
    _active.names, _active.values = names, {}
    try:
        yield _active.values
    finally:
        _active.names, _active.values = before


@contextmanager
def updating(updates: TapUpdates) -> Iterator[None]:
    """Change values at taps of the forwards within the block, in this thread."""
    before, _active.updates = _active.updates, updates
    try:
        yield
    finally:
        _active.updates = before


def check_taps(values: Mapping[str, Tensor], names: Collection[str], shape: tuple[int, ...]) -> None:
    """Raise `RequestError` unless the forward has these taps, each with values [B, T, ...]; shape: (B, T)."""
    if missing := [name for name in names if name not in values]:
        raise RequestError(f"the model's forward has no tap {missing[0]!r}: `Model.taps` has the names")
    for name in names:
        check_tap_shape(values[name], shape, f" at {name!r}")


def check_tap_shape(x: Tensor, shape: Sequence[int], place: str = "") -> None:
    """Raise `RequestError` unless the values at a tap, `place`, are [B, T, ...]; shape: (B, T)."""
    if tuple(x.shape[:2]) != tuple(shape):
        raise RequestError(
            f"the values at a tap must be [B, T, ...], here {[*shape, '...']}; got {list(x.shape)}{place}"
        )
