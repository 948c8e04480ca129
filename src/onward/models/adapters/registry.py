"""The adapters that requests of a model name: loaded and dropped while it runs."""

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
from onward.models.run import ModelRun
from onward.util.process import renew_in_forks
from onward.util.text import described


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter that rows may have; its slot, `index`, is free when no text holds it. digest: of its content. folder:
    where it was read from."""

    name: str
    index: int
    digest: str
    folder: Path


class Adapters(Mapping[str, LoadedAdapter]):
    """The adapters of one model by name. run: the model; rows with adapters are computed by its `adapted`, set here."""

    def __init__(self, run: ModelRun) -> None:
        self._run = run
        self._by_name: dict[str, LoadedAdapter] = {}
        self._stacks: AdapterSlots | None = None
        self._free: list[int] = []
        self._freed: deque[int] = deque()  # since the last change; the collector may add to it at any time
        self._most = 0  # the highest slot that was ever used
        self._lock = threading.Lock()
        renew_in_forks(self)

    def __repr__(self) -> str:
        return described(self, *self._by_name)

    # Two are told apart by identity, as models are.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> LoadedAdapter:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str | None) -> LoadedAdapter | None:
        """The adapter of that name; None for None.

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
        """An adapter of that content, if one is loaded."""
        return next((loaded for loaded in self._by_name.values() if loaded.digest == digest), None)

    def load(self, name: str, adapter: Adapter, folder: Path) -> LoadedAdapter:
        """Let requests name an adapter. Requests that run are not disturbed.

        Raises:
            CheckpointError: it is for another model.
            RequestError: the name is taken, or the adapter cannot be run beside the weights of this model.
        """
        if not isinstance(name, str) or not name:
            raise RequestError(f"the name of an adapter must be a text that is not empty; got {name!r}")
        updates = row_updates(self._run.model, adapter)
        digest = adapter.digest
        with self._lock:
            if name in self._by_name:
                raise RequestError(f"there is an adapter {name!r} already: drop it first, or give another name")
            self._free += [self._freed.popleft() for _ in range(len(self._freed))]
            index = self._free[-1] if self._free else self._most + 1
            stacks = self._stacks
            room = (AdapterCapacity() if stacks is None else stacks.room).holding(index, updates)
            if stacks is None or room != stacks.room:
                larger = AdapterSlots(self._run.model, room)
                if stacks is not None:
                    larger.take(stacks, (used for used in range(1, self._most + 1) if used not in self._free))
                stacks = larger
            stacks.put(index, updates)
            if stacks is not self._stacks:
                self._stacks = stacks
                self._run.adapted = ModelRun(stacks.model, self._run.compile)
            loaded = LoadedAdapter(name, index, digest, folder)
            self._free, self._most = self._free[:-1], max(index, self._most)
            weakref.finalize(loaded, self._freed.append, index).atexit = False
            self._by_name = {**self._by_name, name: loaded}
            return loaded

    def drop(self, name: str) -> None:
        """Refuse requests that name it from now on. Those that run end as they would.

        Raises:
            RequestError: there is none of that name.
        """
        with self._lock:
            self.find(name)
            self._by_name = {other: loaded for other, loaded in self._by_name.items() if other != name}

    def renew(self) -> None:
        """In a forked child: a new lock. A load that another thread had begun is not known here."""
        self._lock = threading.Lock()
