"""`onward deploy`: replicas of a server on Ray, and an ingress whose clients do not notice when one is lost."""

import dataclasses
from typing import Annotated, Any

import typer

from onward.cli.flags import AdapterFlags, DraftFlags, LoadFlags, ServerEngineFlags, SourceArgument
from onward.cli.loading import find
from onward.cli.prompt import expanded, expanded_source
from onward.cli.serve import ServerFlags
from onward.cli.terminal import note, waiting
from onward.errors import RequestError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaFlags:
    """How many replicas there are, and where."""

    replicas: Annotated[int, typer.Option("--replicas", "-r", metavar="N", min=1, help="How many.")] = 2
    max_replicas: Annotated[
        int | None, typer.Option("--max-replicas", metavar="N", help="Up to so many when requests wait.")
    ] = None
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="HOST:PORT", help="A Ray cluster, or auto; else this machine alone."),
    ] = None
    cpus: Annotated[
        float, typer.Option("--cpus", metavar="N", help="Of a replica with all its ranks, in Ray's accounts.")
    ] = 1.0
    affinity: Annotated[
        bool,
        typer.Option("--affinity/--no-affinity", help="Send what begins alike to one replica, for its cache."),
    ] = True
    attempts: Annotated[
        int, typer.Option("--attempts", metavar="N", help="How often a request is tried when replicas are lost.")
    ] = 3
    silence: Annotated[
        float, typer.Option("--silence", metavar="SECONDS", help="After which a replica counts as lost.")
    ] = 5.0


def deploy(
    source: SourceArgument = None,
    *,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="That requests call the model by; else the source.")
    ] = None,
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
    with waiting("starting …"):
        package = _cluster_package()
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
        count = f"{options.replicas} replica{'s' if options.replicas > 1 else ''}"
        note(f"{options.name} at {url}/v1 · {count} · Ctrl-C ends it")
        package.until_signal()


def _cluster_package() -> Any:
    try:
        import onward.cluster.running
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("onward"):
            raise
        raise RequestError(f"a cluster needs the package {error.name}: pip install 'onward[cluster]'") from error
    return onward.cluster.running
