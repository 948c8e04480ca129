"""`onward serve` and `onward deploy`: an OpenAI-compatible HTTP server, in one process or with Ray replicas."""

import dataclasses
import os
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onward
from onward.cli.flags import (
    AUTHENTICATION,
    FILES,
    LIMITS,
    LOGGING,
    MODEL,
    NETWORK,
    ON_DEMAND,
    RAY_ADDRESS,
    REPLICAS,
    REQUESTS,
    BodyFlags,
    DraftFlags,
    LoadFlags,
    ModelFlags,
    ServedAdapterFlags,
    ServerEngineFlags,
    SourceArgument,
    TemplateFlags,
    bytes_of,
    flag,
    with_source,
)
from onward.cli.inputs import expanded, find, importing, load_model, load_options, set_threads, template_variables
from onward.cli.terminal import count, note, waiting
from onward.errors import RequestError, warn
from onward.util.api_keys import ApiKeys
from onward.util.option_names import meant
from onward.util.text_input import TextError, read_text_file

# Host names of this machine that another site cannot use.
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_KEY_VARIABLE = "ONWARD_API_KEY"

# The size of quantized weights, of which some stay floats, relative to those in 16 bits.
_QUANTIZED = {"int8": 0.55, "int4": 0.35, "iq4_nl": 0.35}

_network, _keys, _limit, _log, _replicas, _on_demand, _files = (
    partial(flag, group=group) for group in (NETWORK, AUTHENTICATION, LIMITS, LOGGING, REPLICAS, ON_DEMAND, FILES)
)


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """The HTTP settings of a server."""

    host: str = _network("Address to listen on; 0.0.0.0: all interfaces.", default="127.0.0.1", metavar="NAME")
    port: int = _network("Port to listen on; 0: any free port.", default=8000, low=0, high=65535)
    allow_host: list[str] | None = _network("Accept this name in the Host header.", metavar="NAME")
    allow_origin: list[str] | None = _network("Allow CORS requests from this origin; *: any.", metavar="URL")
    keep_alive: float = _network(
        "Interval of keep-alive comments in idle streams.", default=10.0, metavar="SECONDS", low=0
    )
    drain: float = _network("Time to finish requests after SIGTERM.", default=30.0, metavar="SECONDS", low=0)
    api_key: list[str] | None = _keys(
        f"Require this API key; or set {_KEY_VARIABLE}.", metavar="KEY", envvar=_KEY_VARIABLE, is_secret=True
    )
    api_key_file: Path | None = _keys("Require one of the API keys in FILE, one per line.")
    max_requests: int = _limit("Maximum number of open requests; further ones get 503.", default=4096, low=1)
    max_body: float = _limit("Maximum size of a request body in MiB.", default=8.0, metavar="MIB", low=0)
    request_memory: float = _limit("Memory for requests and responses in MiB.", default=256.0, metavar="MIB", low=0)
    idempotency_seconds: float = _limit(
        "Lifetime of responses to an Idempotency-Key.", default=600.0, metavar="SECONDS", low=0
    )
    response_store: Path | None = _limit(
        "Store responses and conversations in this SQLite file.", show_default="serve: in memory; deploy: none"
    )
    response_store_size: float = _limit("Maximum size of stored responses in MiB.", default=64.0, metavar="MIB", low=0)
    response_lifetime: float = _limit(
        "Lifetime of stored responses after their last use.",
        default=30 * 86400.0,
        show_default="30 days",
        metavar="SECONDS",
        low=0,
    )
    access_log: bool = _log("Log each request to stderr as a line of JSON.", default=True)
    log_prompts: bool = _log("Include request bodies in the access log.", default=False)
    otlp_endpoint: str | None = _log(
        "Send OpenTelemetry traces to this OTLP/HTTP collector.", metavar="URL", show_default="from OTEL_* variables"
    )

    def _api_keys(self) -> ApiKeys:
        keys = list(self.api_key or ())
        os.environ.pop(_KEY_VARIABLE, None)  # child processes don't need it
        if self.api_key_file is not None:
            try:
                lines = read_text_file(expanded(self.api_key_file)).splitlines()
            except (OSError, TextError) as error:
                reason = getattr(error, "strerror", None) or error
                raise RequestError(f"the API keys in {str(self.api_key_file)!r} cannot be read: {reason}") from error
            file_keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            if not file_keys:
                raise RequestError(f"{str(self.api_key_file)!r} contains no API key: write one per line")
            keys += file_keys
        return ApiKeys(dict.fromkeys(keys))

    def settings(self, body: BodyFlags) -> dict[str, Any]:
        """Return the keyword arguments of `onward.server.Settings`."""
        from onward.server.tracing import endpoint_of_environment

        keys, names = self._api_keys(), tuple(self.allow_host or ())
        is_local = self.host in _LOOPBACK
        if not is_local and not keys:
            warn(f"anyone who can reach {self.host} can use this server: require a key with --api-key-file")
        same = ("max_requests", "keep_alive", "idempotency_seconds", "response_lifetime", "drain", "access_log")
        store = None if self.response_store is None else str(expanded(self.response_store).absolute())
        return {name: getattr(self, name) for name in (*same, "log_prompts")} | {
            **({} if store is None else {"response_store": store}),
            "response_store_bytes": max(1, int(self.response_store_size * 2**20)),
            "limits": body.limits(),
            "ignore_unsupported": body.ignore_unsupported,
            "api_keys": keys,
            "otlp_endpoint": self.otlp_endpoint or endpoint_of_environment(),
            "max_body": int(self.max_body * 2**20),
            "request_memory": int(self.request_memory * 2**20),
            "cors_origins": tuple(self.allow_origin or ()),
            # A local server without keys accepts only local names; others accept any name, or those of --allow-host.
            "hosts": (*_LOOPBACK, *names) if is_local and not keys else names,
        }


@dataclass(frozen=True, kw_only=True)
class OnDemandFlags:
    """Models that are loaded when requests name them, and the endpoints that load and unload."""

    models_dir: Path | None = _on_demand("Serve each model in DIR; load it at its first request.", metavar="DIR")
    models_max: int | None = _on_demand("Maximum number of these models in memory.", show_default="4", low=1)
    models_ttl: float | None = _on_demand(
        "Unload a model after this idle time; inf: never.", show_default="3600", metavar="SECONDS", low=0
    )
    models_memory: float | None = _on_demand(
        "Memory for weights and KV caches of all models.", metavar="GIB", show_default="3/4 of the memory"
    )
    adapters_dir: Path | None = _on_demand("Let requests load adapters from folders in DIR.", metavar="DIR")
    weights_dir: Path | None = _on_demand("Let requests update weights from folders in DIR.", metavar="DIR")
    management: bool | None = _on_demand(
        "Let requests load and unload models and adapters.", show_default="if API keys are required"
    )

    def settings(self, *, has_keys: bool) -> dict[str, Any]:
        """Return keyword arguments of `onward.server.Settings`."""
        management = has_keys if self.management is None else self.management
        if management and not has_keys:
            warn("anyone who can reach this server can load and unload models: require a key with --api-key-file")
        folders = {"adapters_dir": self.adapters_dir, "weights_dir": self.weights_dir}
        return {
            "management": management,
            **{name: None if folder is None else expanded(folder) for name, folder in folders.items()},
        }

    def options(self) -> dict[str, Any]:
        """Return keyword arguments of `onward.server.OnDemand`; empty without a folder."""
        flags = {"max_models": self.models_max, "ttl": self.models_ttl, "memory": self.models_memory}
        options: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
        if self.models_dir is None:
            if options:
                raise RequestError("--models-max, --models-ttl and --models-memory need --models-dir")
            return {}
        if self.models_memory is not None:
            options["memory"] = bytes_of("--models-memory", self.models_memory)
        return {"folder": expanded(self.models_dir), **options}


@dataclass(frozen=True, kw_only=True)
class FileFlags:
    """Uploaded files, and the batches that run them."""

    files_dir: Path | None = _files("Store files and batches in DIR, so that they survive a restart.", metavar="DIR")
    max_file: float = _files("Maximum size of an uploaded file in MiB.", default=200.0, metavar="MIB", low=0)
    files_space: float = _files("Disk space for files in MiB.", default=2048.0, metavar="MIB", low=0)
    batch_share: float = _files(
        "Share of the sequences for batches while no other requests run.", default=0.5, metavar="SHARE", low=0, high=1
    )

    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments of `onward.server.Settings`."""
        return {
            "files_dir": None if self.files_dir is None else expanded(self.files_dir),
            "max_file": int(self.max_file * 2**20),
            "files_space": int(self.files_space * 2**20),
            "batch_share": self.batch_share,
        }


def serve(
    source: SourceArgument = None,
    *,
    model: list[str] | None = flag(
        "Serve SOURCE as NAME; add options as SOURCE,quantize=int8.", "-m", group=MODEL, metavar="[NAME=]SOURCE"
    ),
    server: ServerFlags,
    on_demand: OnDemandFlags,
    files: FileFlags,
    engine: ServerEngineFlags,
    max_new_tokens: int | None = flag(
        "Default max_tokens of requests.", "-n", group=REQUESTS, show_default="rest of the context", low=0
    ),
    body: BodyFlags,
    template: TemplateFlags,
    loading: LoadFlags,
    drafting: DraftFlags,
    adapting: ServedAdapterFlags,
) -> None:
    """Serve models through an OpenAI-compatible HTTP API.

    The server supports chat completions, completions and responses, with or
    without streaming. Requests are batched, and each gets the same text as if
    it ran alone. Each adapter is served as a model with its name. Unsupported
    fields are refused with an error that names them. With --models-dir, models
    are loaded when requests name them, and unloaded when memory is needed.

    SIGTERM stops the server once the running requests have finished; a second
    SIGTERM stops it immediately.
    """
    folder = on_demand.options()
    texts = [*([source] if source else []), *(model or [])] or ([] if folder else ["demo"])
    if not texts and adapting.adapter:
        raise RequestError("--adapter is for a model on the command line, and there is none: see --adapters-dir")
    if not texts and adapting.control_vector:
        raise RequestError("--control-vector is for a model on the command line, and there is none")
    if folder and (loading.merge or loading.name_map or loading.pipeline > 1):
        message = "--merge, --name-map and --pipeline are for one model, not for those of --models-dir"
        raise RequestError(f"{message}: write --model SOURCE,merge=ADAPTER")
    models = [_parse_model(text, loading, drafting, adapting) for text in texts]
    names = [name for name, *_ in models]
    if len(set(names)) < len(names):
        raise RequestError(f"models need different names; got {', '.join(names)}: write --model NAME=SOURCE")
    limits = engine.limits()
    package = _server_package()
    common = server.settings(body)
    common |= files.settings()
    common |= on_demand.settings(has_keys=bool(common["api_keys"]))
    settings = package.Settings(max_new_tokens=max_new_tokens, **common)
    at_once = len(models) + (folder.setdefault("max_models", 4) if folder else 0)
    if at_once > 1 or folder:
        from onward.native.machine import memory_limit

        limits["cache_memory"] = max(1, limits.get("cache_memory", memory_limit() // 4) // at_once)
    if folder:
        set_threads(loading)
        folder |= {"open": _opener(loading, drafting, template, limits), "cache_memory": limits["cache_memory"]}
        folder["weight_ratio"] = _QUANTIZED.get(loading.quantize or "", 1.0)
    extra = {"on_demand": package.OnDemand(**folder)} if folder else {}
    package.check_response_store(settings)
    # Bind first: a bad address fails before any model is loaded.
    with closing(package.bound(server.host, server.port)) as address, ExitStack() as stack:
        engines: dict[str, Any] = {}
        variables: dict[str, Any] = {}
        for name, flags, draft, adapters in models:
            lm = load_model(flags, draft, adapters)
            if template.is_set:
                variables[name] = template_variables(template, lm, name)
            engines[name] = onward.Engine(lm, **limits)
            stack.callback(engines[name].close, drain=False)
            with waiting("reading weights …"):  # now, not in the first request
                engines[name].fingerprint_with(None)
        app = package.create_app(engines, dataclasses.replace(settings, variables=variables), **extra)
        shown = ", ".join([*names, *([f"the models in {on_demand.models_dir}"] if folder else [])])
        package.log_to_stderr()
        package.run(app, address, lambda url: note(f"{shown} at {url}/v1 · Ctrl-C stops it"))


def _opener(loading: LoadFlags, drafting: DraftFlags, template: TemplateFlags, limits: dict[str, Any]) -> Any:
    """Return a function that loads a model on demand (`onward.server.OnDemand.open`)."""
    options = load_options(loading, drafting, None)

    def open_model(name: str, path: Path, progress: Any) -> tuple[Any, dict[str, Any]]:
        lm = onward.load(path, progress=progress, **options)
        variables = template_variables(template, lm, name) if template.is_set else {}
        engine = onward.Engine(lm, **limits)
        try:
            engine.fingerprint_with(None)  # reads the weights: now, not in the first request
        except BaseException:
            engine.close(drain=False)
            raise
        return engine, variables

    return open_model


def _parse_model(
    text: str, loading: LoadFlags, drafting: DraftFlags, adapting: ServedAdapterFlags
) -> tuple[str, ModelFlags, DraftFlags, ServedAdapterFlags]:
    """Parse [NAME=]SOURCE[,OPTION=VALUE…] as a name and flags; other options come from the given flags."""
    first, *others = text.split(",")
    name, equals, source = first.partition("=")
    if not equals:
        source = name
    if not name or not source:
        raise RequestError(f"--model must be [NAME=]SOURCE, such as small=Qwen/Qwen3-0.6B; got {text!r}")
    options: dict[str, Any] = dataclasses.asdict(loading)
    draft, adapters, vectors = drafting.draft, list(adapting.adapter or ()), list(adapting.control_vector or ())
    known = {*options, "draft", "adapter", "control_vector"} - {"threads", "prefix_cache_dir", "prefix_cache_disk"}
    for other in others:
        option, equals, value = other.partition("=")
        option = option.strip().replace("-", "_")
        if not equals or option not in known:
            names = ", ".join(sorted(known))
            near = f"; did you mean {hint}?" if equals and (hint := meant(option, known)) else ""
            raise RequestError(f"--model {text}: {other!r} must be OPTION=VALUE with one of {names}{near}")
        if option == "draft":
            draft = value
        elif option == "adapter":
            adapters.append(value)
        elif option == "control_vector":
            vectors.append(value)
        elif option not in ("max_seq_len", "pipeline"):
            options[option] = Path(value) if option == "name_map" else value
        elif value.isascii() and value.isdigit():
            options[option] = int(value)
        else:
            raise RequestError(f"--model {text}: {option} must be a whole number; got {value!r}")
    named = ServedAdapterFlags(adapter=adapters, control_vector=vectors)
    return name, ModelFlags(model=source, **options), DraftFlags(draft=draft), named


@dataclass(frozen=True, kw_only=True)
class ReplicaFlags:
    """The number of replicas, and their placement."""

    replicas: int = _replicas("Number of replicas.", "-r", default=2, low=1)
    max_replicas: int | None = _replicas("Add up to N replicas while requests wait.", low=1)
    address: str | None = RAY_ADDRESS
    cpus: float = _replicas("CPUs that Ray reserves per replica.", default=1.0, metavar="N", low=0)
    affinity: bool = _replicas("Send prompts with a common prefix to the same replica.", default=True)
    attempts: int = _replicas("Attempts per request when replicas are lost.", default=3, low=1)
    silence: float = _replicas(
        "Time without a heartbeat until a replica is lost.", default=5.0, metavar="SECONDS", low=0
    )


def deploy(
    source: SourceArgument = None,
    *,
    name: str | None = flag("Model name in requests.", group=REQUESTS, metavar="NAME", show_default="same as SOURCE"),
    replicas: ReplicaFlags,
    server: ServerFlags,
    engine: ServerEngineFlags,
    body: BodyFlags,
    model: ModelFlags,
    drafting: DraftFlags,
    adapting: ServedAdapterFlags,
) -> None:
    """Serve a model with several replicas on Ray.

    This is onward serve with replicas on one or more machines. If a replica
    dies, hangs or is removed during a request, another replica continues it:
    the client gets every token exactly once, and the same text. Ctrl-C stops
    the server.
    """
    with importing("onward deploy needs", "cluster"):
        import onward.cluster.deployment as package
    model = with_source(model, source)
    if server.response_store is not None and replicas.address is not None:
        raise RequestError("--response-store works on one machine: remove it, or remove --address")
    options = package.DeployOptions(
        source=str(find(model.model)) if replicas.address is None else model.model,
        name=name or model.model,
        load=load_options(model, drafting, adapting),
        engine=engine.limits(),
        settings=server.settings(body),
        replicas=replicas.replicas,
        max_replicas=replicas.max_replicas,
        cpus=replicas.cpus,
        threads=model.threads,
        retries={"attempts": replicas.attempts, "silence": replicas.silence},
        affinity=replicas.affinity,
    )
    package.log_to_stderr()
    with package.running(options, server.host, server.port, replicas.address) as url:
        note(f"{options.name} at {url}/v1 · {count(options.replicas, 'replica')} · Ctrl-C stops it")
        package.until_signal()


def _server_package() -> Any:
    with importing("onward serve needs", "serve"):
        import onward.server
    return onward.server
