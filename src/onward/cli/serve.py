"""`onward serve`: models behind OpenAI's protocol, over HTTP."""

import dataclasses
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import onward
from onward.cli.flags import (
    AdapterFlags,
    DraftFlags,
    LoadFlags,
    ModelFlags,
    ServerEngineFlags,
    SourceArgument,
    TemplateFlags,
)
from onward.cli.help import LENGTH, MODEL
from onward.cli.loading import load_model
from onward.cli.prompt import expanded
from onward.cli.template import template_variables
from onward.cli.terminal import note, waiting
from onward.errors import RequestError, warn
from onward.text_input import TextError, read_text_file

_length, _model = (partial(typer.Option, rich_help_panel=group) for group in (LENGTH, MODEL))

# What a page of a stranger's cannot call this machine.
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """Where a server listens, and whom it serves how."""

    host: Annotated[str, typer.Option("--host", metavar="NAME", help="Where to listen; 0.0.0.0 is everywhere.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free one.")] = 8000
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", metavar="KEY", envvar="ONWARD_API_KEY", help="Ask for this key. Repeatable."),
    ] = None
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="Ask for one of these keys, a line each.")
    ] = None
    drain: Annotated[
        float, typer.Option("--drain", metavar="SECONDS", help="What running requests get after SIGTERM.")
    ] = 30.0
    keep_alive: Annotated[
        float, typer.Option("--keep-alive", metavar="SECONDS", help="Silence after which a stream gets a comment.")
    ] = 10.0
    idempotency_seconds: Annotated[
        float,
        typer.Option("--idempotency-seconds", metavar="SECONDS", help="How long an Idempotency-Key is remembered."),
    ] = 600.0
    max_body: Annotated[float, typer.Option("--max-body", metavar="MIB", help="The most MiB of a request.")] = 8.0
    max_requests: Annotated[
        int, typer.Option("--max-requests", metavar="N", help="The most requests at once, waiting ones too.")
    ] = 4096
    allow_origin: Annotated[
        list[str] | None,
        typer.Option("--allow-origin", metavar="URL", help="Let this site's pages call; * for any. Repeatable."),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="Answer to this name (Host) too. Repeatable."),
    ] = None
    access_log: Annotated[
        bool, typer.Option("--access-log/--no-access-log", help="A line of JSON on stderr for each request.")
    ] = True
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write the requests' bodies into those lines.")] = (
        False
    )

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
    model: Annotated[
        list[str] | None,
        _model(
            "--model",
            "-m",
            metavar="[NAME=]SOURCE",
            help="A model under a name; after commas options of its own, such as SOURCE,quantize=int8. Repeatable.",
        ),
    ] = None,
    server: ServerFlags,
    engine: ServerEngineFlags,
    max_new_tokens: Annotated[
        int | None,
        _length("--max-new-tokens", "-n", metavar="N", help="Of requests without max_tokens; else what fits."),
    ] = None,
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
    with waiting("starting …"):
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
    from onward.native.machine_memory import memory_limit

    return max(1, (memory_limit() // 4 if cache_memory is None else cache_memory) // count)


def _server_package() -> Any:
    try:
        import onward.server
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("onward"):
            raise
        raise RequestError(f"a server needs the package {error.name}: pip install 'onward[serve]'") from error
    return onward.server
