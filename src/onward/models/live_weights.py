"""Weights that change while a model runs: the lock of forwards and updates; and parameters that are trained, under
their stock names, with the packed weights that forwards read."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onward.errors import RequestError
from onward.models.linear import LatentLinear, LatentWeight, ShortConv
from onward.ops.expert_weights import NativeExperts
from onward.ops.packed import NativeWeight, in_graph_of, store
from onward.util.process import renew_in_forks


class _OfThread(threading.local):
    """The lock of the current thread."""

    lock: Any = None


class WeightsLock:
    """The lock of a model's weights: `with lock.reading():` around a forward, `with lock.writing():` around an update.
    A copy is another lock.

    Each thread has a lock of its own, so that a step takes none that another thread holds; an update takes all of them.

    version: a number of the weights, which every update increases.
    """

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self._of_thread = _OfThread()
        self._all = weakref.WeakSet[Any]()  # the locks of threads
        self._writing = threading.Lock()  # guards `_all`
        self._is_awaited = False  # by an update, which goes before further forwards
        renew_in_forks(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.version,)

    def reading(self) -> Any:
        """The lock of this thread, which a forward holds; a forward may be inside another one."""
        lock = self._of_thread.lock
        if lock is None or (self._is_awaited and not lock._is_owned()):
            with self._writing:
                lock = lock or threading.RLock()
                self._of_thread.lock = lock
                self._all.add(lock)
        return lock

    def check_outside(self) -> None:
        """Raise `RequestError` in a thread that is running a forward, which could never wait for its end."""
        lock = self._of_thread.lock
        if lock is not None and lock._is_owned():
            raise RequestError("the weights cannot be updated inside a forward that reads them: do it after the call")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Wait for the end of the running forwards, and hold others off."""
        self.check_outside()
        self._is_awaited = True
        with self._writing:
            self._is_awaited = True  # another update may just have ended
            locks = list(self._all)
            try:
                for lock in locks:
                    lock.acquire()
                yield
            finally:
                self._is_awaited = False
                for lock in locks:
                    if lock._is_owned():  # an interrupt may have come before
                        lock.release()

    def renew(self) -> None:
        """In a forked child, which has one thread."""
        own = self._of_thread.lock
        if own is not None and not own._is_owned():  # another thread may have had it for an update
            own = self._of_thread.lock = None
        self._writing, self._is_awaited = threading.Lock(), False
        self._all = weakref.WeakSet(() if own is None else (own,))


# (a tensor of the packed params, the stock weights that it holds) -> its replacement
_Convert = Callable[[Tensor, Sequence[Tensor]], Tensor]


class TrainableWeights:
    """The parameters of a model and its packed weights.

    parameters: by stock name. A tied weight is one parameter. stock: the params with the parameters in their places.
    params: their packed form, in the model's dtype.
    """

    def __init__(self, parameters: dict[str, Tensor], stock: Any, params: Any) -> None:
        self.parameters, self.params, self._stock = parameters, params, stock
        self._stored: list[States] = []  # the states of the stock weights that each packed tensor holds, in order
        _converted(self._stock, self.params, self._record)
        self._states = states_of(self.parameters.values())

    def refresh(self) -> bool:
        """Pack the parameters that have changed since the last call, in place, and return whether any has. Torch counts
        this as a write to the packed weights. Every step with prompt ids calls it before its forward."""
        if states_of(self.parameters.values()) == self._states:
            return False
        with _lock, torch.no_grad():
            if states_of(self.parameters.values()) == self._states:
                return False  # another thread has done it
            self._states = states_of(self.parameters.values())
            before, self._stored = iter(self._stored), []

            def renew(data: Tensor, stock: Sequence[Tensor]) -> Tensor:
                if next(before) != states_of(stock):
                    store(stock, data)
                return self._record(data, stock)

            _converted(self._stock, self.params, renew)
        return True

    def in_graph(self) -> Any:
        """The packed params in the graph of the parameters: autograd passes their gradients on."""
        self.refresh()
        return _converted(self._stock, self.params, lambda data, stock: in_graph_of(data, *stock))

    def _record(self, data: Tensor, stock: Sequence[Tensor]) -> Tensor:
        self._stored.append(states_of(stock))
        return data


_lock = threading.Lock()  # of no object, so that these can be copied
States = list[tuple[int, int]]


def states_of(tensors: Iterable[Tensor]) -> States:
    """They change with every write that torch counts, and with an assignment to `tensor.data`."""
    return [(tensor._version, tensor.data_ptr()) for tensor in tensors]


def _converted(stock: Any, packed: Any, convert: _Convert) -> Any:
    """The packed params, or a part of them, with each tensor converted."""
    if packed is None:
        return None
    if isinstance(packed, Tensor):
        return convert(packed, stock if isinstance(stock, tuple) else (stock,))
    if isinstance(packed, NativeWeight):
        return packed._replace(data=convert(packed.data, (stock,)))
    if isinstance(packed, NativeExperts):
        return packed._replace(data=convert(packed.data, stock if isinstance(stock, tuple) else (stock,)))
    if isinstance(packed, LatentLinear):
        parts = zip(stock.parts, packed.parts, strict=True)
        weight = LatentWeight(*(_converted(*part, convert) for part in parts))
        return LatentLinear(weight, packed.num_heads, packed.key_dim, packed.value_dim)
    assert isinstance(packed, tuple), f"params are tuples; got {type(packed).__name__}"
    assert not isinstance(packed, ShortConv), "recurrent layers have no gradient"
    items = [_converted(*each, convert) for each in zip(stock, packed, strict=True)]
    return type(packed)(*items) if hasattr(packed, "_fields") else tuple(items)
