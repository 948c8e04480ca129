"""Deployment options."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from onward.cluster.ingress import RetryOptions
from onward.errors import OptionError, RequestError
from onward.server import Settings
from onward.util.api_keys import ApiKeys
from onward.util.checks import check_whole, is_finite
from onward.util.option_names import REMOVED, check_option_names
from onward.util.text_input import TextError, parse_json


@dataclass(frozen=True, kw_only=True)
class DeployOptions:
    """The options of a deployment. All values are JSON, as `serve build` writes them.

    source: for `onward.load`. name: the model's name in requests; None: the source.
    load: options of `onward.load`. engine: options of `onward.Engine`. settings: options of `onward.server.Settings`;
        API keys are stored as digests.
    replicas: the number of replicas; with max_replicas the minimum, from which Ray scales up with the load.
    cpus: CPUs that Ray reserves for a replica with all its ranks. threads: of a replica's kernels; None: as many as
        cpus.
    retries: options of `RetryOptions`. affinity: whether to route requests with a common prefix to one replica.

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
        for name, low in (("replicas", 1), ("max_replicas", self.replicas), ("threads", 1)):
            value = getattr(self, name)
            if value is not None:
                check_whole(name, value, low=low)
        if not (is_finite(self.cpus) and self.cpus > 0):
            raise RequestError(f"cpus must be a number above 0; got {self.cpus!r}")
        if not isinstance(self.affinity, bool):
            raise RequestError(f"affinity must be true or false; got {self.affinity!r}")
        for name in ("load", "engine", "settings", "retries"):
            if not isinstance(value := getattr(self, name), Mapping):
                got = f"one {type(value).__name__}" if name == "settings" else repr(value)  # it may contain keys
                raise RequestError(f"{name} must be a mapping of options; got {got}")
        check_option_names(self.settings, [each.name for each in fields(Settings)])
        check_option_names(self.retries, [each.name for each in fields(RetryOptions)])
        settings = Settings(**{"response_store": None, **self.settings})
        paths = {"response_store": settings.response_store, "prefix_cache_dir": self.load.get("prefix_cache_dir")}
        for name, path in paths.items():
            if path is not None and not os.path.isabs(str(path)):
                message = f"{name} must be an absolute path, since replicas are processes with folders of their own"
                raise RequestError(f"{message}; got {path!r}")
        if "api_keys" in self.settings:
            object.__setattr__(self, "settings", {**self.settings, "api_keys": settings.api_keys})
        RetryOptions(**self.retries)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "DeployOptions":
        """Make options from a mapping, such as the `args` of a Serve config file. Strings from a command line are
        parsed as JSON. Raises `RequestError`: an unknown option, a value outside its range, or an API key that is not a
        digest, since Ray stores and shows such a mapping."""
        known = {each.name: each.type for each in fields(cls)}
        if removed := sorted(set(options) & set(REMOVED)):
            raise RequestError(f"{removed[0]!r} is not a deployment option: {REMOVED[removed[0]]}")
        if unknown := sorted(set(options) - set(known)):
            raise RequestError(f"{unknown[0]!r} is not a deployment option; the options are {', '.join(known)}")
        values = dict(options)
        for name, value in options.items():
            if isinstance(value, str) and known[name] not in (str, str | None):
                with contextlib.suppress(TextError):
                    values[name] = parse_json(value)
        settings = values.get("settings")
        if isinstance(settings, Mapping) and not ApiKeys.are_digests(settings.get("api_keys", ())):
            problem = "must be a list of digests, since Ray stores and shows them: write sha256:DIGEST"
            raise OptionError("api_keys", f"{problem} (printf %s KEY | sha256sum)")
        return cls(**values)
