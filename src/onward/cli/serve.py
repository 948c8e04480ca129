"""`onward serve` and `onward deploy`: OpenAI's protocol over HTTP, from one process or from replicas on Ray."""

import dataclasses
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onward
from onward.cli.flags import (
    LENGTH,
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
from onward.cli.inputs import expanded, expanded_source
from onward.cli.loading import find, importing, load_model, template_variables
from onward.cli.terminal import count, note, waiting
from onward.errors import RequestError, warn
from onward.util.text_input import TextError, read_text_file

# Names of this machine that no other site's page can have.
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """Where a server listens, and whom it serves how."""

    host: str = flag("Address to listen on; 0.0.0.0: all.", default="127.0.0.1", metavar="NAME")
    port: int = flag("0 takes a free one.", default=8000, min=0, max=65535)
    api_key: list[str] | None = flag("Ask for this key.", metavar="KEY", envvar="ONWARD_API_KEY")
    api_key_file: Path | None = flag("Ask for one of these keys, a line each.")
    drain: float = flag("Time for running requests after SIGTERM.", default=30.0, metavar="SECONDS")
    keep_alive: float = flag("Silence after which a stream gets a comment.", default=10.0, metavar="SECONDS")
    idempotency_seconds: float = flag("How long an Idempotency-Key is remembered.", default=600.0, metavar="SECONDS")
    max_body: float = flag("Maximum size of a request in MiB.", default=8.0, metavar="MIB")
    max_requests: int = flag("Maximum number of requests at once, waiting ones too.", default=4096)
    allow_origin: list[str] | None = flag("Let this site's pages call; * for any.", metavar="URL")
    allow_host: list[str] | None = flag("Answer to this name (Host) too.", metavar="NAME")
    access_log: bool = flag("A line of JSON on stderr for each request.", default=True)
    log_prompts: bool = flag("Write the requests' bodies into those lines.", default=False)

    def keys(self) -> tuple[str, ...]:
        """All API keys.

        Raises:
            RequestError: the file cannot be read, or has none.
        """
        keys = list(self.api_key or ())
        if self.api_key_file is not None:
            try:
                lines = read_text_file(expanded(self.api_key_file)).splitlines()
            except (OSError, TextError) as error:
                reason = getattr(error, "strerror", None) or error
                raise RequestError(f"the keys in {str(self.api_key_file)!r} cannot be read: {reason}") from error
            of_file = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            if not of_file:
                raise RequestError(f"there is no key in {str(self.api_key_file)!r}: write one on each line")
            keys += of_file
        return tuple(dict.fromkeys(keys))

    def settings(self) -> dict[str, Any]:
        """As keyword arguments of `onward.server.Settings`.

        Raises:
            RequestError: no keys in the file of keys.
        """
        keys, names = self.keys(), tuple(self.allow_host or ())
        is_local = self.host in _LOOPBACK
        if not is_local and not keys:
            warn(f"anybody who reaches {self.host} may use this server: ask for a key with --api-key-file")
        return {
            "api_keys": keys,
            "max_body": int(self.max_body * 2**20),
            "max_requests": self.max_requests,
            "keep_alive": self.keep_alive,
            "idempotency_seconds": self.idempotency_seconds,
            "drain": self.drain,
            "cors_origins": tuple(self.allow_origin or ()),
            # A server of this machine alone, without keys, has only its names; others have any, or those given.
            "hosts": (*_LOOPBACK, *names) if is_local and not keys else names,
            "access_log": self.access_log,
            "log_prompts": self.log_prompts,
        }


def serve(
    source: SourceArgument = None,
    *,
    model: list[str] | None = flag(
        "A model under a name; after commas options of its own, such as SOURCE,quantize=int8.",
        "-m",
        group=MODEL,
        metavar="[NAME=]SOURCE",
    ),
    server: ServerFlags,
    engine: ServerEngineFlags,
    max_new_tokens: int | None = flag("Of requests without max_tokens; else what fits.", "-n", group=LENGTH),
    template: TemplateFlags,
    loading: LoadFlags,
    drafting: DraftFlags,
    adapting: AdapterFlags,
) -> None:
    """Serve models over HTTP as OpenAI's API does.

    Chats, completions and responses, whole or as streams, for any number of
    clients at once: each gets the text that it would get alone. The name of
    an adapter calls the model with it. What is not served is refused by its
    name. SIGTERM ends it when running requests have ended; a second one at
    once.
    """
    specs = [_Spec.parse(text, loading, drafting, adapting) for text in ([source] if source else []) + (model or [])]
    specs = specs or [_Spec.parse("demo", loading, drafting, adapting)]
    if len({spec.name for spec in specs}) < len(specs):
        raise RequestError(f"models need names of their own; got {', '.join(spec.name for spec in specs)}")
    limits = engine.limits()
    package = _server_package()
    settings = package.Settings(max_new_tokens=max_new_tokens, **server.settings())
    if len(specs) > 1:
        limits["cache_memory"] = _share(limits.get("cache_memory"), len(specs))
    # What is wrong with the address is told before models are loaded for nothing.
    with closing(package.bound(server.host, server.port)) as address, ExitStack() as stack:
        engines: dict[str, Any] = {}
        variables: dict[str, Any] = {}
        for spec in specs:
            lm = load_model(spec.model, spec.draft, spec.adapters)
            if template.is_set:
                variables[spec.name] = template_variables(template, lm, spec.name)
            engines[spec.name] = onward.Engine(lm, **limits)
            stack.callback(engines[spec.name].close, drain=False)
            with waiting("reading weights …"):  # now, and not before the first token of the first stream
                engines[spec.name].fingerprint_with(None)
        app = package.create_app(engines, dataclasses.replace(settings, variables=variables))
        package.log_to_stderr()
        names = ", ".join(engines)
        package.run(app, address, lambda url: note(f"{names} at {url}/v1 · Ctrl-C ends it"))


@dataclass(frozen=True)
class _Spec:
    """A model to serve."""

    name: str
    model: ModelFlags
    draft: DraftFlags
    adapters: AdapterFlags

    @classmethod
    def parse(cls, text: str, loading: LoadFlags, drafting: DraftFlags, adapting: AdapterFlags) -> "_Spec":
        """[NAME=]SOURCE[,OPTION=VALUE…]; what it leaves open is as the flags have it.

        Raises:
            RequestError: no source, an unknown option, a value of a wrong type.
        """
        first, *others = text.split(",")
        name, equals, source = first.partition("=")
        if not equals:
            source = name
        if not name or not source:
            raise RequestError(f"--model wants [NAME=]SOURCE, such as small=Qwen/Qwen3-0.6B; got {text!r}")
        options: dict[str, Any] = dataclasses.asdict(loading)
        draft, adapters = drafting.draft, list(adapting.adapter or ())
        for other in others:
            option, equals, value = other.partition("=")
            option = option.strip().replace("-", "_")
            if not equals or option not in {*options, "draft", "adapter"} - {"threads"}:
                known = ", ".join(sorted({*options, "draft", "adapter"} - {"threads"}))
                raise RequestError(f"--model {text}: after a comma comes OPTION=VALUE, of {known}; got {other!r}")
            if option == "draft":
                draft = value
            elif option == "adapter":
                adapters.append(value)
            elif option in ("max_seq_len", "pipeline"):
                if not value.isascii() or not value.isdigit():
                    raise RequestError(f"--model {text}: {option} must be a whole number; got {value!r}")
                options[option] = int(value)
            else:
                options[option] = Path(value) if option == "name_map" else value
        return cls(name, ModelFlags(model=source, **options), DraftFlags(draft=draft), AdapterFlags(adapter=adapters))


def _share(cache_memory: int | None, count: int) -> int:
    """Bytes of cache for each of several engines. cache_memory: for all of them; None for a quarter of the memory."""
    from onward.native.machine import memory_limit

    return max(1, (memory_limit() // 4 if cache_memory is None else cache_memory) // count)


@dataclass(frozen=True, kw_only=True)
class ReplicaFlags:
    """How many replicas there are, and where."""

    replicas: int = flag("Number of replicas.", "-r", default=2, min=1)
    max_replicas: int | None = flag("Up to N replicas when requests wait.")
    address: str | None = flag("A Ray cluster, or auto; else this machine alone.", metavar="HOST:PORT")
    cpus: float = flag("CPUs of a replica with all its ranks, in Ray's accounts.", default=1.0, metavar="N")
    affinity: bool = flag("Send prompts that begin alike to one replica, for its cache.", default=True)
    attempts: int = flag("How often a request is tried when replicas are lost.", default=3)
    silence: float = flag("Time after which a silent replica counts as lost.", default=5.0, metavar="SECONDS")


def deploy(
    source: SourceArgument = None,
    *,
    name: str | None = flag("Name of the model in requests; else the source.", metavar="NAME"),
    replicas: ReplicaFlags,
    server: ServerFlags,
    engine: ServerEngineFlags,
    loading: LoadFlags,
    drafting: DraftFlags,
    adapting: AdapterFlags,
) -> None:
    """Serve a model from several processes or machines, on Ray.

    As serve, and when a replica dies, hangs or leaves in the middle of a
    text, another one goes on with it: clients get every token once, and the
    bits that they would have got. Ctrl-C ends it.
    """
    with importing("a cluster needs", "cluster"):
        import onward.cluster.launch as package
    chosen = source or "demo"
    load = {key: value for key, value in dataclasses.asdict(loading).items() if value is not None}
    threads = load.pop("threads", None)
    if "name_map" in load:
        load["name_map"] = str(expanded(load["name_map"]))
    if "merge" in load:
        load["merge"] = expanded_source(load["merge"])
    if drafting.draft is not None:
        load["draft"] = expanded_source(drafting.draft)
    if adapters := adapting.sources():
        load["adapters"] = {adapter: expanded_source(where) for adapter, where in adapters.items()}
    options = package.DeployOptions(
        source=str(find(chosen)) if replicas.address is None else chosen,
        name=name or chosen,
        load=load,
        engine=engine.limits(),
        settings=server.settings(),
        replicas=replicas.replicas,
        max_replicas=replicas.max_replicas,
        cpus=replicas.cpus,
        threads=threads,
        retries={"attempts": replicas.attempts, "silence": replicas.silence},
        affinity=replicas.affinity,
    )
    package.log_to_stderr()
    with package.running(options, server.host, server.port, replicas.address) as url:
        note(f"{options.name} at {url}/v1 · {count(options.replicas, 'replica')} · Ctrl-C ends it")
        package.until_signal()


def _server_package() -> Any:
    with importing("a server needs", "serve"):
        import onward.server
    return onward.server
