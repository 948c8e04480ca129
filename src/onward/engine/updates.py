"""New weights for a running engine: what happens to its requests, and when the update applies."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal, get_args

from onward.decoding import CacheManager
from onward.engine.request import EngineRequest
from onward.engine.scheduler import Scheduler
from onward.errors import EngineError, OptionError, RequestError, one_line
from onward.language_model import LanguageModel
from onward.language_model.new_weights import WeightsUpdate
from onward.models import Run
from onward.models.adapters import TrainedAdapter
from onward.models.model import computation

InFlight = Literal["finish", "recompute", "keep"]


def checked_in_flight(in_flight: InFlight) -> InFlight:
    if in_flight not in (names := get_args(InFlight)):
        raise OptionError("in_flight", f"must be one of {', '.join(names)}; got {in_flight!r}")
    return in_flight


def served(lm: LanguageModel) -> LanguageModel:
    """The model that an engine serves: of a trained one a copy of its packed weights, with its adapters, so that a step
    of the optimizer changes no text halfway."""
    model = lm.model
    if model.trainable is None:
        return lm
    sources = lm.adapters.sources()
    if trained := [name for name, source in sources.items() if isinstance(source, TrainedAdapter)]:
        raise RequestError(
            f"an engine serves a copy of a trained model, and the adapter {trained[0]!r} is trained too: save it, and "
            "load it in its place"
        )
    model.refresh()
    with model.weights_lock.reading():
        own = model.with_params(model.params, model.weights_version)
    copied = lm.with_model(own)
    copied.source = lm.source
    copied.add_adapters(sources)
    copied.adapters.control_vectors = lm.adapters.control_vectors
    return copied


class PendingUpdate:
    """An update that the engine's thread will apply. version: of its weights, once it has; error: why it has not."""

    def __init__(self, update: WeightsUpdate, in_flight: InFlight) -> None:
        self.update, self.in_flight = update, in_flight
        self.version: int | None = None
        self.error: EngineError | None = None
        self.ended = threading.Event()

    def result(self) -> int:
        """Wait for the version."""
        self.ended.wait()
        if self.error is not None:
            raise self.error
        assert self.version is not None, "it was applied"
        return self.version


class Updates:
    """The updates of an engine, in order. The engine's lock guards them; its thread applies them between two steps.

    preempt: releases the slots of a request that the scheduler has preempted. pending: those not yet applied.
    """

    def __init__(
        self,
        run: Run,
        slots: CacheManager,
        scheduler: Scheduler[EngineRequest],
        preempt: Callable[[EngineRequest], None],
    ) -> None:
        self._run, self._slots, self._scheduler, self._preempt = run, slots, scheduler, preempt
        self.pending: deque[PendingUpdate] = deque()

    def add(self, pending: PendingUpdate) -> None:
        self.pending.append(pending)

    def withdraw(self, pending: PendingUpdate) -> None:
        """Forget an update for which nobody waits any more, unless it was applied."""
        if pending in self.pending:
            self.pending.remove(pending)

    def apply(self, requests: Iterable[EngineRequest]) -> bool:
        """Apply the updates that are due, and return whether another waits for requests that have started: until they
        end, no others start. requests: all that have not ended."""
        while self.pending:
            pending = self.pending[0]
            if pending.in_flight == "finish":
                if any(request.generation.started is not None for request in requests):
                    return True
            else:
                recomputed = [each for each in self._scheduler.running if pending.in_flight != "keep" or not each.keeps]
                for request in self._scheduler.preempt_all(recomputed):
                    self._preempt(request)
            try:
                pending.version = pending.update.apply()
                self._slots.set_weights_version(computation(self._run.model))
            except OptionError as error:  # another update has had the version
                pending.error = EngineError(one_line(error))
            self.pending.popleft()
            pending.ended.set()
        return False

    def end(self, failure: BaseException | None) -> None:
        """Fail the updates with the engine."""
        for pending in self.pending:
            reason = "was closed" if failure is None else f"has failed: {one_line(failure)}"
            pending.error = EngineError(f"the engine {reason} before the update of its weights")
            pending.error.__cause__ = failure
            pending.ended.set()
        self.pending.clear()
