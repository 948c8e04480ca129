"""The adapters that requests can name, loaded and dropped at runtime."""

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from onward.errors import RequestError
from onward.models.adapters.adapter import Adapter
from onward.models.adapters.forward import row_updates
from onward.models.adapters.slots import AdapterCapacity, AdapterSlots
from onward.models.run import Run
from onward.util.process import renew_in_forks
from onward.util.text import described


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter that rows can use; its slot, `index`, is freed when no request uses it. digest: of its contents.
    folder: where it was read from."""

    name: str
    index: int
    digest: str
    folder: Path


class Adapters(Mapping[str, LoadedAdapter]):
    """The adapters of a model by name. run: the model; its `adapted`, set here, computes rows with adapters."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._by_name: dict[str, LoadedAdapter] = {}
        self._stacks: AdapterSlots | None = None
        self._free: list[int] = []
        self._freed: deque[int] = deque()  # since the last change; the garbage collector may add to it at any time
        self._max_index = 0  # ever used
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
        if loaded is None:
            known = ", ".join(map(repr, self._by_name)) or "none"
            raise RequestError(f"there is no adapter {name!r}; loaded: {known} (lm.load_adapter loads one)")
        return loaded

    def by_digest(self, digest: str) -> LoadedAdapter | None:
        """An adapter with this digest, if loaded."""
        return next((loaded for loaded in self._by_name.values() if loaded.digest == digest), None)

    def load(self, name: str, adapter: Adapter, folder: Path) -> LoadedAdapter:
        """Load an adapter, without disturbing running requests.

        Raises:
            CheckpointError: it is for another model.
            RequestError: the name is taken, or the adapter cannot run beside this model's weights.
        """
        if not isinstance(name, str) or not name:
            raise RequestError(f"the name of an adapter must be a non-empty string; got {name!r}")
        updates = row_updates(self._run.model, adapter)
        digest = adapter.digest
        with self._lock:
            if name in self._by_name:
                raise RequestError(f"an adapter named {name!r} is already loaded: drop it first, or use another name")
            self._free += [self._freed.popleft() for _ in range(len(self._freed))]
            index = self._free[-1] if self._free else self._max_index + 1
            stacks = self._stacks
            capacity = (AdapterCapacity() if stacks is None else stacks.capacity).including(index, updates)
            if stacks is None or capacity != stacks.capacity:
                larger = AdapterSlots(self._run.model, capacity)
                if stacks is not None:
                    larger.copy(stacks, (used for used in range(1, self._max_index + 1) if used not in self._free))
                stacks = larger
            stacks.put(index, updates)
            if stacks is not self._stacks:
                self._stacks = stacks
                self._run.adapted = Run(stacks.model, self._run.compile)
            loaded = LoadedAdapter(name, index, digest, folder)
            self._free, self._max_index = self._free[:-1], max(index, self._max_index)
            weakref.finalize(loaded, self._freed.append, index).atexit = False
            self._by_name = {**self._by_name, name: loaded}
            return loaded

    def drop(self, name: str) -> None:
        """Reject further requests for this adapter. Running requests are not affected.

        Raises:
            RequestError: there is no adapter with this name.
        """
        with self._lock:
            self.find(name)
            self._by_name = {other: loaded for other, loaded in self._by_name.items() if other != name}

    def renew(self) -> None:
        """In a forked child: create a new lock. A load that another thread had started is lost here."""
        self._lock = threading.Lock()
