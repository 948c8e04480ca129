"""Loads and unloads models on demand, as `Residency` decides."""

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from onward.engine import Engine
from onward.errors import EngineError, OnwardError, RequestError, one_line
from onward.native.machine import memory_limit, trim_memory
from onward.protocols import BodyError
from onward.server.errors import DEFECT
from onward.server.log import log, log_defect
from onward.server.on_demand import ModelFile, OnDemand, models_in
from onward.server.residency import Residency
from onward.server.served import Lease, ServedModel
from onward.util.lanes import Lane
from onward.util.text import in_bytes

_FAILURE_SECONDS = 5.0  # in which a load that failed is not tried again, unless the files change


@dataclass
class _Slot:
    """A model on demand. served: while it is loaded. progress: of its load. nbytes: of the weights and the cache, once
    it has been loaded. adapters: to load with it. failure: of the last load, if it failed: when, why and of which file.
    """

    file: ModelFile
    served: ServedModel | None = None
    progress: float = 0.0
    nbytes: int = 0
    adapters: dict[str, Path] = field(default_factory=dict)
    failure: tuple[float, OnwardError, ModelFile] | None = None
    leases: list[Lease] = field(default_factory=list)  # of waiting requests
    unloading: "Future[None]" = field(default_factory=Future)

    @property
    def adapter_names(self) -> list[str]:
        return list(self.adapters if self.served is None else self.served.engine.lm.adapters)

    def begin(self) -> None:
        """Let the waiting requests use the loaded model."""
        assert self.served is not None, "it is loaded"
        leases, self.leases = self.leases, []
        for lease in leases:
            lease.begin(self.served)


class ModelLoader:
    """Loads and unloads the models of a folder. Its methods may be called in any thread.

    serve: makes a served model from its name, its engine and the variables of its chat template. fixed: bytes of the
    models that are always loaded; reserved: their names.
    """

    def __init__(
        self,
        options: OnDemand,
        serve: Callable[[str, Engine, Mapping[str, Any]], ServedModel],
        fixed: int,
        reserved: frozenset[str],
    ) -> None:
        self._options, self._serve, self._reserved = options, serve, reserved
        self._residency = Residency(
            options.max_models, options.bytes_allowed, options.ttl, fixed, is_working=self._is_working
        )
        self._lock = threading.RLock()
        self._lane = Lane("loader", 1)
        self._slots: dict[str, _Slot] = {}
        self._closed = False
        self._counts: dict[str, Counter[str]] = {}  # of closed engines, by model
        self._loads: Counter[tuple[str, str]] = Counter()  # by model and result
        self.scan()

    def scan(self) -> None:
        """Notice models that were added, replaced or removed on disk."""
        found = models_in(self._options.folder)
        with self._lock:
            for name, file in found.items():
                if name in self._reserved:
                    continue
                slot = self._slots.setdefault(name, _Slot(file))
                if slot.served is None and name not in self._residency.residents:
                    if slot.file != file:
                        slot.nbytes = 0
                    slot.file = file
            gone = [name for name in self._slots if name not in found and not self._is_in_use(name)]
            for name in gone:
                del self._slots[name]

    def _is_in_use(self, name: str) -> bool:
        return name in self._residency.residents or name in self._residency.queue

    def names(self) -> list[str]:
        with self._lock:
            return list(self._slots)

    def owner(self, name: str) -> str | None:
        """The model of that name, or that has an adapter of that name. Raises `BodyError`: several have one."""
        with self._lock:
            if name in self._slots:
                return name
            owners = [each for each, slot in self._slots.items() if name in slot.adapter_names]
        if len(owners) > 1:
            raise ambiguous(name, owners)
        return owners[0] if owners else None

    def loaded(self) -> dict[str, ServedModel]:
        with self._lock:
            return {name: slot.served for name, slot in self._slots.items() if slot.served is not None}

    def counts(self) -> tuple[dict[str, Engine], dict[str, Counter[str]], dict[tuple[str, str], int]]:
        """The loaded engines, the `EngineStats.counts` of the engines before them, and the number of loads by model and
        result."""
        with self._lock:
            engines = {name: served.engine for name, served in self.loaded().items()}
            return engines, {name: Counter(each) for name, each in self._counts.items()}, dict(self._loads)

    def states(self) -> dict[str, str]:
        """Of each model: "loaded", "loading" or "unloaded"."""
        with self._lock:
            return {name: self._state(name) for name in self._slots}

    def _state(self, name: str) -> str:
        resident = self._residency.residents.get(name)
        if resident is None:
            return "loading" if name in self._residency.queue else "unloaded"
        return resident.status if resident.status != "unloading" else "unloaded"

    def listed(self) -> list[dict[str, Any]]:
        """The entries of /v1/models."""
        with self._lock:
            slots = [(name, slot, self._state(name), slot.served) for name, slot in self._slots.items()]
        entries: list[dict[str, Any]] = []
        for name, slot, state, served in slots:
            own = {"created": slot.file.created, "status": state, "size_bytes": slot.file.nbytes}
            if served is not None:
                entries += [{**fields, **own} for fields in served.listed()]
            else:
                fields = {"id": name, "object": "model", "owned_by": "onward", **own}
                entries += [fields, *({**fields, "id": each, "parent": name} for each in slot.adapter_names)]
        return entries

    def acquire(self, name: str) -> Lease:
        """Hold a model, and load it if it isn't. Raises `BodyError`: its load has just failed."""
        with self._lock:
            self._check_open()
            slot, now = self._slots[name], time.monotonic()
            if slot.failure is not None and slot.served is None:
                since, error, file = slot.failure
                if now - since < _FAILURE_SECONDS and not file.has_changed():
                    raise copy(error)  # each traceback would be added to it
                slot.failure = None
            lease = Lease(name, partial(self._progress, name, slot))
            if self._residency.request(name, slot.nbytes or self._estimate(slot.file), now):
                assert slot.served is not None, "it is loaded"
                lease.begin(slot.served)
            else:
                slot.leases.append(lease)
            self._advance()
            return lease

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the server is shutting down and loads no more models")

    def _estimate(self, file: ModelFile) -> int:
        return int(file.nbytes * self._options.weight_ratio) + self._options.cache_memory

    def _progress(self, name: str, slot: _Slot) -> str:
        """A text for those who wait."""
        with self._lock:
            resident = self._residency.residents.get(name)
            if resident is None or resident.status != "loading":
                return f"waiting to load {name}"
            return f"loading {name}" + (f" {100 * slot.progress:.0f} %" if slot.progress else "")

    def release(self, lease: Lease) -> None:
        """A request has ended, or its client has left."""
        with self._lock:
            slot = self._slots.get(lease.name)
            if slot is None:
                return
            if lease in slot.leases:
                slot.leases.remove(lease)
                self._residency.leave(lease.name)
            elif lease.served is not None and slot.served is lease.served:
                self._residency.finish(lease.name, time.monotonic())
            self._advance()

    def tick(self) -> None:
        """Unload what has been idle for long or has failed, and end requests that have waited too long. Call it about
        once a second."""
        with self._lock:
            now = time.monotonic()
            for name, served in self.loaded().items():
                try:
                    served.engine.check_open()
                except EngineError:
                    if self._residency.residents[name].status == "loaded":
                        self._residency.broken(name)
                        self._start_unload(name, "failed")
            for name, slot in self._slots.items():
                if name not in self._residency.residents:
                    late = [lease for lease in slot.leases if now - lease.since > self._options.wait]
                    self._fail(name, late, busy(name))
            self._advance()

    def unload(self, name: str) -> "Future[None]":
        """Unload a model. Returns a future of its end. Raises `BodyError`: it serves requests."""
        with self._lock:
            slot, resident = self._slots[name], self._residency.residents.get(name)
            if resident is None and name not in self._residency.queue:
                return _done()
            if resident is not None and resident.status == "unloading":
                return slot.unloading
            if not self._residency.evict(name):
                message = f"the model {name!r} is loading or serves requests: unload it when they have finished"
                raise BodyError(message, "model", "model_busy", 409)
            self._start_unload(name, "request")
            return slot.unloading

    def add_adapter(self, model: str, name: str, folder: Path) -> None:
        """Remember an adapter of a model, to load it again with the model."""
        with self._lock:
            self._slots[model].adapters[name] = folder

    def drop_adapter(self, model: str, name: str) -> None:
        with self._lock:
            self._slots[model].adapters.pop(name, None)

    def close(self) -> None:
        """Close all engines. Requests that wait for a model fail."""
        with self._lock:
            self.cancel_waiting()
            self._closed = True
            models = self.loaded()
        for model in models.values():
            model.engine.close(drain=False)

    def cancel_waiting(self) -> None:
        """End the requests that wait for a model: the server is shutting down."""
        with self._lock:
            for name, slot in self._slots.items():
                self._fail(name, list(slot.leases), EngineError("the server is shutting down"))

    def _fail(self, name: str, leases: list[Lease], error: OnwardError) -> None:
        """Fail waiting requests of a model."""
        for lease in leases:
            self._slots[name].leases.remove(lease)
            self._residency.leave(name)
            lease.fail(copy(error))

    def _advance(self) -> None:
        """Do what the policy decides. The caller holds the lock."""
        if self._closed:
            return
        step = self._residency.step(time.monotonic())
        for name, reason in step.unload:
            self._start_unload(name, reason)
        if step.load is not None:
            self._slots[step.load].progress = 0.0
            self._lane.submit(partial(self._load, step.load))
        for name in step.ready:
            self._slots[name].begin()

    def _is_working(self, name: str) -> bool:
        served = self._slots[name].served
        stats = None if served is None else served.engine.stats()
        return stats is not None and bool(stats.waiting or stats.running)

    def _start_unload(self, name: str, reason: str) -> None:
        self._slots[name].unloading = Future()
        self._lane.submit(partial(self._unload, name, reason))

    def _load(self, name: str) -> None:
        slot, began = self._slots[name], time.perf_counter()
        self.scan()
        slot.file = file = slot.file.current()
        log("loads", model=name, path=str(file.path), size_bytes=file.nbytes)
        try:
            served = self._opened(name, slot)
        except Exception as error:
            self._note_failure(name, slot, error)
            served = None
        if served is None:
            _free_memory()
            with self._lock:
                self._residency.failed(name)
                self._advance()
            return
        seconds = round(time.perf_counter() - began, 2)
        with self._lock:
            self._loads[name, "loaded"] += 1
            slot.nbytes = served.engine.memory
            if self._closed:
                served.engine.close(drain=False)
                return
            slot.served = served
            self._residency.loaded(name, slot.nbytes, time.monotonic())
            slot.begin()
            log("loaded", model=name, seconds=seconds, memory_bytes=slot.nbytes)
            self._advance()

    def _note_failure(self, name: str, slot: _Slot, error: Exception) -> None:
        """Report to the log and to those who wait that a load has failed."""
        log("load failed", model=name, error=one_line(error))
        if not isinstance(error, OnwardError):
            log_defect(error, model=name)
        shown = _load_error(name, error, slot.file)
        with self._lock:
            self._loads[name, "failed"] += 1
            slot.failure = time.monotonic(), shown, slot.file
            self._fail(name, list(slot.leases), shown)

    def _opened(self, name: str, slot: _Slot) -> ServedModel:
        needs, limit = self._estimate(slot.file), memory_limit()
        if needs > limit:
            raise RequestError(f"the model needs about {in_bytes(needs)}, and this machine has {in_bytes(limit)}")

        def progress(fraction: float) -> None:
            slot.progress = fraction

        engine, variables = self._options.open(name, slot.file.path, progress)
        try:
            for adapter, folder in list(slot.adapters.items()):
                try:
                    if adapter not in engine.lm.adapters:
                        engine.lm.load_adapter(adapter, folder)
                except OnwardError as error:  # the model works without it
                    log("load failed", model=name, adapter=adapter, error=one_line(error))
            slot.adapters = {each: loaded.folder for each, loaded in engine.lm.adapters.items() if loaded.folder}
            return self._serve(name, engine, variables)
        except BaseException:
            engine.close(drain=False)
            raise

    def _unload(self, name: str, reason: str) -> None:
        slot = self._slots[name]
        assert slot.served is not None, "it is loaded"
        engine, done = slot.served.engine, slot.unloading
        engine.close()
        with self._lock:
            self._counts.setdefault(name, Counter()).update(engine.stats().counts)
            slot.served = None
        del engine
        _free_memory()
        with self._lock:
            self._residency.unloaded(name)
            log("unloads", model=name, reason=reason)
            self._advance()
        done.set_result(None)


def _done() -> "Future[None]":
    done: Future[None] = Future()
    done.set_result(None)
    return done


def ambiguous(name: str, models: list[str]) -> BodyError:
    named = " and ".join(map(repr, models))
    return BodyError(f"the adapter name {name!r} is ambiguous: {named} each have one; rename them", "model")


def busy(name: str) -> BodyError:
    message = f"there is no room for the model {name!r}: all others are busy; try again later"
    return BodyError(message, "model", "models_busy", 503)


def _load_error(name: str, error: Exception, file: ModelFile) -> BodyError:
    """The error for those who waited. It names no path of the server."""
    reason = one_line(error) if isinstance(error, OnwardError) else DEFECT
    for path, shown in ((str(file.path), file.path.name), (f"{file.path.parent}/", "")):
        reason = reason.replace(path, shown)
    return BodyError(f"the model {name!r} cannot be loaded: {reason}", "model", "model_load_failed", 503)


def _free_memory() -> None:
    """Return the memory of what is no longer used to the system."""
    gc.collect()
    trim_memory()
