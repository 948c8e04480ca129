"""The models that a server has."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from onward.engine import Engine
from onward.errors import RequestError
from onward.openai import BodyError, BodyReader
from onward.requests.request import needed_tokenizer
from onward.server.settings import Settings


@dataclass(frozen=True)
class ServedModel:
    """A model with its engine, under the name that requests call it by."""

    name: str
    engine: Engine
    reader: BodyReader
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_model_len(self) -> int | None:
        """How many tokens a prompt and its answer may have together."""
        return self.engine.lm.model.max_seq_len

    def listed(self) -> list[dict[str, Any]]:
        """As /v1/models has it: the model, and each of its adapters, whose `parent` it is."""
        fields = {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "onward",
            "max_model_len": self.max_model_len,
        }
        return [fields, *({**fields, "id": name, "parent": self.name} for name in self.engine.lm.adapters)]


class ServedModels:
    """All models of a server. What they share is the process alone."""

    def __init__(self, engines: Mapping[str, Engine], settings: Settings) -> None:
        if not engines:
            raise RequestError("a server needs a model, at least one")
        self._models = {name: _served(name, engine, settings) for name, engine in engines.items()}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def listed(self) -> list[dict[str, Any]]:
        """All names that requests may call, as /v1/models has them."""
        return [fields for model in self for fields in model.listed()]

    def find(self, name: object) -> ServedModel:
        """The model of that name, or with an adapter of that name; where there is one model alone, a request may leave
        the name out.

        Raises:
            BodyError: no name, an unknown one, or the name of adapters of several models.
        """
        if name is None and len(self._models) == 1:
            return next(iter(self._models.values()))
        names = list(dict.fromkeys(fields["id"] for fields in self.listed()))
        known = " and ".join(map(repr, names)) if len(names) < 3 else ", ".join(map(repr, names))
        if name is None:
            message = f"this server has several models, {known}: say which"
            raise BodyError(message, "model", "missing_required_parameter")
        if not isinstance(name, str):
            raise BodyError(f"model must be a text; got {name!r}", "model", "invalid_type")
        if name in self._models:
            return self._models[name]
        adapted = [model for model in self if name in model.engine.lm.adapters]
        if not adapted:
            raise BodyError(f"there is no model {name!r} here; there is {known}", "model", "model_not_found", 404)
        if len(adapted) > 1:
            of = " and ".join(repr(model.name) for model in adapted)
            raise BodyError(f"{of} each have an adapter {name!r}: give them names of their own", "model")
        return adapted[0]


def _served(name: str, engine: Engine, settings: Settings) -> ServedModel:
    lm = engine.lm
    needed_tokenizer(lm.tokenizer, "a server")
    options: dict[str, Any] = {}
    if settings.max_new_tokens is not None or lm.model.max_seq_len is not None:
        options["max_new_tokens"] = settings.max_new_tokens
    lm.defaults.replace(**options)  # which checks them
    variables = settings.variables.get(name, {})
    return ServedModel(name, engine, BodyReader(lm, name, options, variables, streams=True))
