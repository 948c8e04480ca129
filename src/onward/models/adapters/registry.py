"""The adapters that requests can name, loaded and dropped at runtime, or trained."""

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onward.errors import OptionError, RequestError
from onward.models.adapters.forward import LoraUpdate, row_updates, with_slots
from onward.models.adapters.merge import Adapter
from onward.models.adapters.stacks import AdapterCapacity, AdapterSlots
from onward.models.adapters.steering import Steer, Steering
from onward.models.adapters.trained import TrainedAdapter
from onward.models.live_weights import States
from onward.models.run import Run
from onward.util.process import renew_in_forks
from onward.util.text import described


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter that rows can use; its slot, `index`, is freed when no request uses it. digest: of its contents.
    folder: where it was read from; None for steering and for one that is trained."""

    name: str
    index: int
    digest: str
    folder: Path | None


class Adapters(Mapping[str, LoadedAdapter]):
    """The adapters of a model by name. run: the model; its `adapted`, set here, computes rows with adapters.
    control_vectors: by name too."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.control_vectors: dict[str, Steering] = {}
        self._by_name: dict[str, LoadedAdapter] = {}
        self._steered: weakref.WeakValueDictionary[str, LoadedAdapter] = weakref.WeakValueDictionary()  # by digest
        self._stacks: AdapterSlots | None = None
        self._free: list[int] = []
        self._freed: deque[int] = deque()  # since the last change; the garbage collector may add to it at any time
        self._max_index = 0  # ever used
        self._trained: dict[str, tuple[TrainedAdapter, States]] = {}  # and the states that are loaded
        self._lock = threading.Lock()
        renew_in_forks(self)

    def __repr__(self) -> str:
        return described(self, *self._by_name)

    # Compared by identity, like models.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> LoadedAdapter:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str | None) -> LoadedAdapter | None:
        """The adapter with this name; None for None.

        Raises:
            RequestError: there is none.
        """
        if name is None:
            return None
        loaded = self._by_name.get(name) if isinstance(name, str) else None
        if loaded is not None and name in self._trained:
            trained, states = self._trained[name]
            if trained.states() != states:
                return self.load(name, trained, loaded.folder)
        if loaded is None:
            known = ", ".join(map(repr, self._by_name)) or "none"
            raise RequestError(f"there is no adapter {name!r}; loaded: {known} (lm.load_adapter loads one)")
        return loaded

    def by_digest(self, digest: str) -> LoadedAdapter | None:
        """An adapter with this digest, if loaded. Of steering only the digest, which its keys and values are found
        by: a request brings the vectors."""
        base, steer, _ = digest.partition("steer ")
        loaded = next((each for each in self._by_name.values() if each.digest == base.rstrip()), None)
        if steer and (loaded is not None or not base):
            return LoadedAdapter("", 0, digest, None)
        return loaded

    def trained(self, name: str) -> TrainedAdapter:
        """Raises `RequestError` unless an adapter of this name is trained."""
        self.find(name)
        if (trained := self._trained_as(name)) is None:
            raise RequestError(f"the adapter {name!r} was loaded from a folder: lm.new_adapter makes one to train")
        return trained

    def sources(self) -> dict[str, LoadedAdapter | TrainedAdapter]:
        """Where a copy of the model gets its adapters from, by name (`Trained.add_adapters`)."""
        return {name: self._trained_as(name) or loaded for name, loaded in self._by_name.items()}

    def params_of(self, name: str, params: Any, rows: int) -> Any:
        """The model's params with an adapter for all of `rows` rows: in the graph of its parameters if it is trained,
        beside the same `params`."""
        loaded, trained = self.find(name), self._trained_as(name)
        if trained is not None:
            return trained.in_graph(params)
        assert loaded is not None, "find has found it"
        assert self._stacks is not None, "it has a slot"
        return with_slots(self._stacks.params, torch.full((rows,), loaded.index, dtype=torch.int32))

    def _trained_as(self, name: str) -> TrainedAdapter | None:
        return self._trained[name][0] if name in self._trained else None

    def load(self, name: str, source: Adapter | TrainedAdapter, folder: Path | None = None) -> LoadedAdapter:
        """Load an adapter, or the current values of one that is trained, which may replace its older ones; `find`
        brings it up to date. Running requests are not disturbed: they keep the older values.

        Raises:
            CheckpointError: it is for another model.
            RequestError: the name is taken, or the adapter cannot run beside this model's weights.
        """
        if not isinstance(name, str) or not name:
            raise RequestError(f"the name of an adapter must be a non-empty string; got {name!r}")
        trained = source if isinstance(source, TrainedAdapter) else None
        states = [] if trained is None else trained.states()  # before the values, which may change
        adapter = source.adapter() if isinstance(source, TrainedAdapter) else source
        updates = row_updates(self._run.model, adapter)
        with self._lock:
            if name in self._by_name and (trained is None or self._trained_as(name) is not trained):
                raise RequestError(f"an adapter named {name!r} is already loaded: drop it first, or use another name")
            loaded = self._fill(name, adapter.digest, folder, updates, {})
            self._by_name = {**self._by_name, name: loaded}
            if trained is not None:
                self._trained[name] = trained, states
            return loaded

    def steered(self, name: str | None, steering: Steering | None) -> LoadedAdapter | None:
        """The adapter with this name, with this steering of a request. The slot of a steering is freed with its last
        request.

        Raises:
            RequestError: there is no such adapter.
        """
        adapter = self.find(name)
        if steering is None:
            return adapter
        digest = steering.digest if adapter is None else f"{adapter.digest} {steering.digest}"
        with self._lock:
            loaded = self._steered.get(digest)
            if loaded is None:
                loaded = self._fill("", digest, None, {}, steering.steers, 0 if adapter is None else adapter.index)
                self._steered[digest] = loaded
            return loaded

    def add_control_vector(self, name: str, steers: Mapping[str, Steer]) -> None:
        """Add a control vector, in place of an earlier one of this name. Raises `RequestError` if it is for another
        model."""
        if not isinstance(name, str) or not name:
            raise RequestError(f"the name of a control vector must be a non-empty string; got {name!r}")
        steering = Steering(steers, option=f"the control vector {name!r}")
        steering.check(self._run.model)
        self.control_vectors = {**self.control_vectors, name: steering}

    def control_vector(self, name: str) -> Mapping[str, Steer]:
        """The steers of a control vector. Raises `OptionError` if there is none of this name."""
        if name not in self.control_vectors:
            known = ", ".join(map(repr, self.control_vectors)) or "none"
            raise OptionError("steer", f"names no loaded control vector: {name!r}; loaded: {known}")
        return self.control_vectors[name].steers

    def _fill(
        self,
        name: str,
        digest: str,
        folder: Path | None,
        updates: Mapping[str, LoraUpdate],
        steers: Mapping[str, Steer],
        base: int = 0,
    ) -> LoadedAdapter:
        """Fill an unused slot, as `AdapterSlots.put`. The caller holds the lock."""
        self._free += [self._freed.popleft() for _ in range(len(self._freed))]
        index = self._free[-1] if self._free else self._max_index + 1
        stacks = self._stacks
        capacity = (AdapterCapacity() if stacks is None else stacks.capacity).including(index, updates, steers)
        if stacks is None or capacity != stacks.capacity:
            larger = AdapterSlots(self._run.model, capacity)
            if stacks is not None:
                larger.copy(stacks, [used for used in range(1, self._max_index + 1) if used not in self._free])
            stacks = larger
        stacks.put(index, updates, steers, base)
        if stacks is not self._stacks:
            self._stacks = stacks
            # torch.compile removes taps from a forward.
            is_compiled_by_torch = self._run.compile == "inductor" and stacks.capacity.vectors
            self._run.adapted = Run(stacks.model, "eager" if is_compiled_by_torch else self._run.compile)
        loaded = LoadedAdapter(name, index, digest, folder)
        self._free, self._max_index = self._free[:-1], max(index, self._max_index)
        weakref.finalize(loaded, self._freed.append, index).atexit = False
        return loaded

    def drop(self, name: str) -> None:
        """Reject further requests for this adapter. Running requests are not affected.

        Raises:
            RequestError: there is no adapter with this name.
        """
        self.find(name)
        with self._lock:
            self._by_name = {other: loaded for other, loaded in self._by_name.items() if other != name}
            self._trained.pop(name, None)

    def renew(self) -> None:
        """In a forked child: create a new lock. A load that another thread had started is lost here."""
        self._lock = threading.Lock()
