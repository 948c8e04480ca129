"""`onward serve` and `onward deploy`: an OpenAI-compatible HTTP server, in one process or with Ray replicas."""

import dataclasses
import os
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onward
from onward.cli.flags import (
    MODEL,
    AdapterFlags,
    DraftFlags,
    LoadFlags,
    ModelFlags,
    ServerEngineFlags,
    SourceArgument,
    TemplateFlags,
    flag,
)
from onward.cli.inputs import expanded, named_limits
from onward.cli.loading import find, importing, load_model, load_options, template_variables
from onward.cli.terminal import count, note, waiting
from onward.errors import RequestError, warn
from onward.util.api_keys import ApiKeys
from onward.util.options import LENGTH
from onward.util.text_input import TextError, read_text_file

# Host names of this machine that another site cannot use.
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_KEY_VARIABLE = "ONWARD_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """The HTTP settings of a server."""

    host: str = flag("Address to listen on; 0.0.0.0: all interfaces.", default="127.0.0.1", metavar="NAME")
    port: int = flag("Port to listen on; 0: any free port.", default=8000, min=0, max=65535)
    api_key: list[str] | None = flag("Require this API key.", metavar="KEY", envvar=_KEY_VARIABLE, is_secret=True)
    api_key_file: Path | None = flag("Require one of the API keys in FILE, one per line.")
    drain: float = flag("Time for running requests to finish after SIGTERM.", default=30.0, metavar="SECONDS")
    keep_alive: float = flag("Interval of keep-alive comments in idle streams.", default=10.0, metavar="SECONDS")
    idempotency_seconds: float = flag("Lifetime of an Idempotency-Key.", default=600.0, metavar="SECONDS")
    max_body: float = flag("Maximum size of a request body in MiB.", default=8.0, metavar="MIB")
    max_requests: int = flag("Maximum number of running and waiting requests.", default=4096)
    limit: list[str] | None = flag("Change a limit of request bodies, such as n=16.", metavar="NAME=N")
    ignore_unsupported: bool = flag("Drop unsupported hints that do not constrain the output.", default=False)
    request_memory: float = flag("Maximum memory of requests and answers in MiB.", default=256.0, metavar="MIB")
    allow_origin: list[str] | None = flag("Allow CORS requests from this origin; *: any.", metavar="URL")
    allow_host: list[str] | None = flag("Accept this Host header.", metavar="NAME")
    access_log: bool = flag("Log each request to stderr as JSON.", default=True)
    log_prompts: bool = flag("Include request bodies in the access log.", default=False)

    def _keys(self) -> ApiKeys:
        keys = list(self.api_key or ())
        os.environ.pop(_KEY_VARIABLE, None)  # child processes don't need it
        if self.api_key_file is not None:
            try:
                lines = read_text_file(expanded(self.api_key_file)).splitlines()
            except (OSError, TextError) as error:
                reason = getattr(error, "strerror", None) or error
                raise RequestError(f"the keys in {str(self.api_key_file)!r} cannot be read: {reason}") from error
            file_keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            if not file_keys:
                raise RequestError(f"there is no key in {str(self.api_key_file)!r}: write one per line")
            keys += file_keys
        return ApiKeys(dict.fromkeys(keys))

    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments of `onward.server.Settings`."""
        keys, names = self._keys(), tuple(self.allow_host or ())
        is_local = self.host in _LOOPBACK
        if not is_local and not keys:
            warn(f"anyone who can reach {self.host} can use this server: require a key with --api-key-file")
        same = ("max_requests", "ignore_unsupported", "keep_alive", "idempotency_seconds", "drain", "access_log")
        return {name: getattr(self, name) for name in same} | {
            "api_keys": keys,
            "max_body": int(self.max_body * 2**20),
            "limits": named_limits(self.limit),
            "log_prompts": self.log_prompts,
            "request_memory": int(self.request_memory * 2**20),
            "cors_origins": tuple(self.allow_origin or ()),
            # A local server without keys accepts only local names; others accept any name, or those of --allow-host.
            "hosts": (*_LOOPBACK, *names) if is_local and not keys else names,
        }


def serve(
    source: SourceArgument = None,
    *,
    model: list[str] | None = flag(
        "Serve SOURCE as NAME; append options as SOURCE,quantize=int8,….", "-m", group=MODEL, metavar="[NAME=]SOURCE"
    ),
    server: ServerFlags,
    engine: ServerEngineFlags,
    max_new_tokens: int | None = flag(
        "Maximum number of tokens for requests without max_tokens.", "-n", group=LENGTH, show_default="what fits"
    ),
    template: TemplateFlags,
    loading: LoadFlags,
    drafting: DraftFlags,
    adapting: AdapterFlags,
) -> None:
    """Serve models through an OpenAI-compatible HTTP API.

    The server supports chat completions, completions and responses, with or
    without streaming. Requests are batched, and each gets the same text as if
    it ran alone. An adapter is served as a model of its name. Unsupported
    fields are rejected by name. SIGTERM stops the server after the running
    requests; a second SIGTERM stops it immediately.
    """
    texts = [*([source] if source else []), *(model or [])] or ["demo"]
    models = [_parse_model(text, loading, drafting, adapting) for text in texts]
    names = [name for name, *_ in models]
    if len(set(names)) < len(names):
        raise RequestError(f"model names must be unique; got {', '.join(names)}")
    limits = engine.limits()
    package = _server_package()
    settings = package.Settings(max_new_tokens=max_new_tokens, **server.settings())
    if len(models) > 1:
        from onward.native.machine import memory_limit

        limits["cache_memory"] = max(1, limits.get("cache_memory", memory_limit() // 4) // len(models))
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
        app = package.create_app(engines, dataclasses.replace(settings, variables=variables))
        package.log_to_stderr()
        package.run(app, address, lambda url: note(f"{', '.join(names)} at {url}/v1 · Ctrl-C stops it"))


def _parse_model(
    text: str, loading: LoadFlags, drafting: DraftFlags, adapting: AdapterFlags
) -> tuple[str, ModelFlags, DraftFlags, AdapterFlags]:
    """Parse [NAME=]SOURCE[,OPTION=VALUE…] as a name and flags; other options come from the given flags."""
    first, *others = text.split(",")
    name, equals, source = first.partition("=")
    if not equals:
        source = name
    if not name or not source:
        raise RequestError(f"--model takes [NAME=]SOURCE, such as small=Qwen/Qwen3-0.6B; got {text!r}")
    options: dict[str, Any] = dataclasses.asdict(loading)
    draft, adapters = drafting.draft, list(adapting.adapter or ())
    known = {*options, "draft", "adapter"} - {"threads"}
    for other in others:
        option, equals, value = other.partition("=")
        option = option.strip().replace("-", "_")
        if not equals or option not in known:
            names = ", ".join(sorted(known))
            raise RequestError(f"--model {text}: expected OPTION=VALUE, with one of {names}; got {other!r}")
        if option == "draft":
            draft = value
        elif option == "adapter":
            adapters.append(value)
        elif option not in ("max_seq_len", "pipeline"):
            options[option] = Path(value) if option == "name_map" else value
        elif value.isascii() and value.isdigit():
            options[option] = int(value)
        else:
            raise RequestError(f"--model {text}: {option} must be an integer; got {value!r}")
    return name, ModelFlags(model=source, **options), DraftFlags(draft=draft), AdapterFlags(adapter=adapters)


@dataclass(frozen=True, kw_only=True)
class ReplicaFlags:
    """The number of replicas, and their placement."""

    replicas: int = flag("Number of replicas.", "-r", default=2, min=1)
    max_replicas: int | None = flag("Scale up to N replicas while requests wait.")
    address: str | None = flag("Ray cluster, or auto.", metavar="HOST:PORT", show_default="this machine")
    cpus: float = flag("CPUs that Ray reserves per replica, for all its ranks.", default=1.0, metavar="N")
    affinity: bool = flag("Route prompts with a common prefix to the same replica.", default=True)
    attempts: int = flag("Number of attempts per request when replicas are lost.", default=3)
    silence: float = flag("Time without a heartbeat until a replica is lost.", default=5.0, metavar="SECONDS")


def deploy(
    source: SourceArgument = None,
    *,
    name: str | None = flag("Model name in requests.", metavar="NAME", show_default="the source"),
    replicas: ReplicaFlags,
    server: ServerFlags,
    engine: ServerEngineFlags,
    loading: LoadFlags,
    drafting: DraftFlags,
    adapting: AdapterFlags,
) -> None:
    """Serve a model with several replicas on Ray.

    Like serve, on one or more machines. If a replica dies, hangs or is
    removed during a request, another replica continues it: the client gets
    every token exactly once, and the same text. Ctrl-C stops it.
    """
    with importing("a cluster needs", "cluster"):
        import onward.cluster.launch as package
    chosen = source or "demo"
    options = package.DeployOptions(
        source=str(find(chosen)) if replicas.address is None else chosen,
        name=name or chosen,
        load=load_options(loading, drafting, adapting),
        engine=engine.limits(),
        settings=server.settings(),
        replicas=replicas.replicas,
        max_replicas=replicas.max_replicas,
        cpus=replicas.cpus,
        threads=loading.threads,
        retries={"attempts": replicas.attempts, "silence": replicas.silence},
        affinity=replicas.affinity,
    )
    package.log_to_stderr()
    with package.running(options, server.host, server.port, replicas.address) as url:
        note(f"{options.name} at {url}/v1 · {count(options.replicas, 'replica')} · Ctrl-C stops it")
        package.until_signal()


def _server_package() -> Any:
    with importing("a server needs", "serve"):
        import onward.server
    return onward.server
