"""The models that a server has."""

import time
from collections.abc import Mapping
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

    def listed(self) -> dict[str, Any]:
        """As /v1/models has it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "onward",
            "max_model_len": self.max_model_len,
        }


class ServedModels:
    """All models of a server. What they share is the process alone."""

    def __init__(self, engines: Mapping[str, Engine], settings: Settings) -> None:
        if not engines:
            raise RequestError("a server needs a model, at least one")
        self._models = {name: _served(name, engine, settings) for name, engine in engines.items()}

    def __iter__(self) -> Any:
        return iter(self._models.values())

    def find(self, name: object) -> ServedModel:
        """The model of that name; where there is one alone, a request may leave the name out.

        Raises:
            BodyError: no name, or an unknown one.
        """
        if name is None and len(self._models) == 1:
            return next(iter(self._models.values()))
        known = " and ".join(map(repr, self._models)) if len(self._models) < 3 else ", ".join(map(repr, self._models))
        if name is None:
            message = f"this server has several models, {known}: say which"
            raise BodyError(message, "model", "missing_required_parameter")
        if not isinstance(name, str):
            raise BodyError(f"model must be a text; got {name!r}", "model", "invalid_type")
        if name not in self._models:
            raise BodyError(f"there is no model {name!r} here; there is {known}", "model", "model_not_found", 404)
        return self._models[name]


def _served(name: str, engine: Engine, settings: Settings) -> ServedModel:
    lm = engine.lm
    needed_tokenizer(lm.tokenizer, "a server")
    options: dict[str, Any] = {}
    if settings.max_new_tokens is not None or lm.model.max_seq_len is not None:
        options["max_new_tokens"] = settings.max_new_tokens
    lm.defaults.replace(**options)  # which checks them
    variables = settings.variables.get(name, {})
    return ServedModel(name, engine, BodyReader(lm, name, options, variables, streams=True))
