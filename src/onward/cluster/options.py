"""What is deployed, and how."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from onward.cluster.ingress import RetryOptions
from onward.errors import RequestError
from onward.server import Settings
from onward.util.checks import check_whole, is_finite
from onward.util.option_names import REMOVED, check_option_names
from onward.util.text_input import TextError, parse_json

_TEXTS = (str, str | None)


def _read(value: Any) -> Any:
    """A text that is JSON as what it says."""
    if isinstance(value, str):
        with contextlib.suppress(TextError):
            return parse_json(value)
    return value


@dataclass(frozen=True, kw_only=True)
class DeployOptions:
    """What is deployed, and how. Everything in it is JSON, as `serve build` writes it.

    source: what `onward.load` takes. name: that requests call the model by; the source's by default. load: options of
    `onward.load`. engine: options of `onward.Engine`. settings: of `onward.server.Settings`.
    replicas: how many; with max_replicas the least, and as many more as waiting requests ask for.
    cpus: of a replica with all its ranks, in Ray's accounts. threads: of its kernels; None: as many as cpus.
    retries: see `RetryOptions`. affinity: whether requests of one beginning go to one replica.

    Raises:
        RequestError: an unknown option or a value outside its range.
    """

    source: str = "demo"
    name: str | None = None
    load: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    replicas: int = 2
    max_replicas: int | None = None
    cpus: float = 1.0
    threads: int | None = None
    retries: Mapping[str, Any] = field(default_factory=dict)
    affinity: bool = True

    def __post_init__(self) -> None:
        for name, least in (("replicas", 1), ("max_replicas", self.replicas), ("threads", 1)):
            value = getattr(self, name)
            if value is not None:
                check_whole(name, value, low=least)
        if not (is_finite(self.cpus) and self.cpus > 0):
            raise RequestError(f"cpus must be a number above 0; got {self.cpus!r}")
        if not isinstance(self.affinity, bool):
            raise RequestError(f"affinity must be true or false; got {self.affinity!r}")
        for name in ("load", "engine", "settings", "retries"):
            if not isinstance(getattr(self, name), Mapping):
                raise RequestError(f"{name} must be a mapping of options; got {getattr(self, name)!r}")
        check_option_names(self.settings, [each.name for each in fields(Settings)])
        check_option_names(self.retries, [each.name for each in fields(RetryOptions)])
        Settings(**self.settings)
        RetryOptions(**self.retries)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "DeployOptions":
        """The options of a mapping, such as the `args` of a Serve config file. A command line's are text.

        Raises:
            RequestError: an unknown one, or a value outside its range.
        """
        known = {each.name: each.type for each in fields(cls)}
        if removed := sorted(set(given) & set(REMOVED)):
            raise RequestError(f"{removed[0]!r} is no option of a deployment: {REMOVED[removed[0]]}")
        if unknown := sorted(set(given) - set(known)):
            raise RequestError(f"{unknown[0]!r} is no option of a deployment; they are {', '.join(known)}")
        return cls(**{name: _read(value) if known[name] not in _TEXTS else value for name, value in given.items()})
