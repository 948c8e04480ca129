"""All models of a server: those that are always loaded, and those on demand."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from onward.engine import Engine
from onward.errors import RequestError
from onward.protocols import BodyError
from onward.server.client import Leases
from onward.server.loader import ModelLoader, ambiguous
from onward.server.on_demand import OnDemand
from onward.server.served import ModelPending, ServedModel
from onward.server.settings import Settings

_Result = TypeVar("_Result")
_MAX_NAMES = 20  # in an error message
# The leases of the request that this thread works for.
_leases: ContextVar[Leases | None] = ContextVar("leases", default=None)


class EngineCounts(NamedTuple):
    """engines: that are loaded, by model. counts: of the engines before them, by model. loads: by model and result."""

    engines: Mapping[str, Engine]
    counts: Mapping[str, Mapping[str, float]]
    loads: Mapping[tuple[str, str], int]


class ServedModels:
    """All models of a server, by name. on_demand: loads further ones."""

    def __init__(self, engines: Mapping[str, Engine], settings: Settings, on_demand: OnDemand | None = None) -> None:
        if not engines and on_demand is None:
            raise RequestError("a server needs at least one model")

        def serve(name: str, engine: Engine, variables: Mapping[str, Any]) -> ServedModel:
            return ServedModel.of(name, engine, settings, variables)

        variables = settings.variables
        self._fixed = {name: serve(name, engine, variables.get(name, {})) for name, engine in engines.items()}
        self._loader: ModelLoader | None = None
        if on_demand is not None:
            memory = sum(engine.memory for engine in engines.values())
            self._loader = ModelLoader(on_demand, serve, memory, frozenset(engines))

    @property
    def are_fixed(self) -> bool:
        """Whether all models are always loaded."""
        return self._loader is None

    def __iter__(self) -> Iterator[ServedModel]:
        """The loaded models."""
        yield from self._fixed.values()
        if self._loader is not None:
            yield from self._loader.loaded().values()

    def names(self) -> list[str]:
        """The names of all models, loaded or not, without adapters."""
        return [*self._fixed, *([] if self._loader is None else self._loader.names())]

    def unloaded(self) -> dict[str, str]:
        """The other models on demand: "loading" or "unloaded"."""
        states = {} if self._loader is None else self._loader.states()
        return {name: state for name, state in states.items() if state != "loaded"}

    def listed(self) -> list[dict[str, Any]]:
        """The entries of /v1/models. Reads the folder of models, if there is one."""
        entries = [fields for model in self._fixed.values() for fields in model.listed()]
        if self._loader is not None:
            self._loader.scan()
            entries += self._loader.listed()
        return entries

    def entry(self, name: object) -> dict[str, Any]:
        """The entry of a model or an adapter. Raises `BodyError`: there is none."""
        for fields in self.listed():
            if fields["id"] == name:
                return fields
        raise self._unknown(name)

    def find(self, name: object, check: Callable[[], object] | None = None) -> ServedModel:
        """The model of that name, or with an adapter of that name. If there is only one model, the name may be None.

        check: called before a model is loaded; raises if the body is invalid.

        Raises:
            BodyError: no name, an unknown name, an adapter name of several models, or the model's load has just failed.
            ModelPending: the model is not loaded yet, which has begun or is queued.
        """
        owner = self.owner(name)
        if owner in self._fixed:
            return self._fixed[owner]
        loader, leases = self._loader, _leases.get()
        assert loader is not None, "the model is on demand"
        if check is not None and owner not in loader.loaded():
            check()
        assert leases is not None, "the caller is inside `leasing`"
        lease = leases.of(owner, lambda: loader.acquire(owner), loader.release)
        if not lease.future.done():
            raise ModelPending(lease)
        lease.future.result()  # raises the load's error
        assert lease.served is not None, "it is loaded"
        return lease.served

    @contextmanager
    def holding(self, name: object) -> Iterator[ServedModel]:
        """Use a model without a request, in a thread: wait until it is loaded, and keep it loaded inside. Raises
        `BodyError`, as `find`."""
        leases = Leases()
        try:
            while True:
                try:
                    served = self.leasing(leases, partial(self.find, name))
                    break
                except ModelPending as pending:
                    lease = pending.lease
                lease.future.result()
            yield served
        finally:
            leases.close()

    def owner(self, name: object, param: str = "model") -> str:
        """The name of the model that serves requests for this name. param: the field that has the name. Raises
        `BodyError`, as `find`."""
        if name is None and len(names := self.names()) == 1:
            return names[0]
        if name is None:
            message = f"{param} is required: this server has {self._known()}"
            raise BodyError(message, param, "missing_required_parameter")
        if not isinstance(name, str):
            raise BodyError(f"{param} must be a string; got {name!r}", param, "invalid_type")
        if (owner := self._owner(name)) is None and self._loader is not None:
            self._loader.scan()
            owner = self._owner(name)
        if owner is None:
            raise self._unknown(name, param)
        return owner

    def _owner(self, name: str) -> str | None:
        if name in self._fixed:
            return name
        owners = [model.name for model in self._fixed.values() if name in model.engine.lm.adapters]
        if self._loader is not None and (other := self._loader.owner(name)) is not None:
            if other == name:
                return name
            owners.append(other)
        if len(owners) > 1:
            raise ambiguous(name, owners)
        return owners[0] if owners else None

    def _known(self) -> str:
        names = list(dict.fromkeys(fields["id"] for fields in self.listed()))
        if len(names) > _MAX_NAMES:
            return f"{', '.join(map(repr, names[:_MAX_NAMES]))} and {len(names) - _MAX_NAMES} more (GET /v1/models)"
        return " and ".join(map(repr, names)) if len(names) < 3 else ", ".join(map(repr, names))

    def _unknown(self, name: object, param: str = "model") -> BodyError:
        return BodyError(f"no model {name!r}; available: {self._known()}", param, "model_not_found", 404)

    def unload(self, name: object) -> None:
        """Unload a model on demand, and wait until its memory is free. Raises `BodyError`: it serves requests, or is
        always loaded."""
        owner = self.owner(name)
        if owner != name or self._loader is None or owner in self._fixed:
            message = f"{name!r} is not a model on demand: only models in the folder of --models-dir can be unloaded"
            raise BodyError(message, "model", "unsupported_value")
        self._loader.unload(owner).result()

    def load_adapter(self, model: object, name: str, folder: Path) -> None:
        """Load an adapter, also whenever its model is loaded again. model: None if there is only one. Raises
        `OnwardError`: it cannot be loaded, or its name is taken. Raises `ModelPending`, as `find`."""
        if any(name == fields["id"] for fields in self.listed()):
            raise BodyError(f"the name {name!r} is taken: unload it first, or choose another one", "lora_name")
        served = self.find(self.owner(model, "base_model_name"))
        served.engine.lm.load_adapter(name, folder)
        if self._loader is not None and served.name not in self._fixed:
            self._loader.add_adapter(served.name, name, folder)

    def drop_adapter(self, name: str) -> None:
        """Unload an adapter; its running requests finish. Raises `BodyError`: there is none."""
        owner = self.owner(name, "lora_name")
        if owner == name:
            raise BodyError(f"{name!r} is a model, not an adapter", "lora_name")
        for model in self:
            if model.name == owner:
                model.engine.lm.drop_adapter(name)
        if self._loader is not None and owner not in self._fixed:
            self._loader.drop_adapter(owner, name)

    def tick(self) -> None:
        """Unload idle models. Call it about once a second."""
        if self._loader is not None:
            self._loader.tick()

    def cancel_waiting(self) -> None:
        """End the requests that wait for a model: the server is shutting down."""
        if self._loader is not None:
            self._loader.cancel_waiting()

    def close(self) -> None:
        """Unload all models on demand."""
        if self._loader is not None:
            self._loader.close()

    def leasing(self, leases: Leases, function: Callable[[], _Result]) -> _Result:
        """Call a function whose `find` holds models on demand until `leases` are closed."""
        token = _leases.set(leases)
        try:
            return function()
        finally:
            _leases.reset(token)

    def counts(self) -> EngineCounts:
        """What the metrics show."""
        engines = {name: model.engine for name, model in self._fixed.items()}
        if self._loader is None:
            return EngineCounts(engines, {}, {})
        loaded, counts, loads = self._loader.counts()
        return EngineCounts(engines | loaded, counts, loads)
