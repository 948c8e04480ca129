"""A model over several processes: rank 0 loads it and decodes. The other ranks own a part of the weights and caches,
and execute its messages."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onward import native
from onward.cache import CachePlan
from onward.checkpoint import GgufCheckpoint, open_checkpoint
from onward.distributed.group import RankGroup, RankRun, RankWorker, ShardedKVPool, new_cache, token_table
from onward.distributed.launchers import Processes, RankHandles, RayRanks, address_here, heartbeats
from onward.distributed.links import Links, await_all, is_loopback, meet
from onward.distributed.pipeline import PipelineForward, Stage, StageParams, stage_of
from onward.errors import RequestError
from onward.language_model.fingerprint import weights_fingerprint
from onward.language_model.weights import LayersInPlace, WeightsReader
from onward.models import Embedding, Model, read_config
from onward.models.architecture import cache_plan, num_parameters
from onward.ops.heads import BLOCK
from onward.ops.kv_format import checked_cache_format


@dataclass(frozen=True)
class Settings:
    """source: the checkpoint, a path from `find_folder`. dtype, quantize, cache_format, compile: as in `onward.load`.
    context: the maximum number of positions. threads: the kernel threads of each rank; None for its default."""

    source: str
    pipeline: int
    dtype: str | None
    quantize: str | None
    cache_format: str | None
    compile: str
    context: int
    threads: int | None

    @property
    def path(self) -> Path:
        return Path(self.source)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        assert dtype is None or isinstance(dtype, torch.dtype)
        return dtype


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WHY_EAGER = "it runs over several ranks, each with its own programs"


class RankParams(NamedTuple):
    """Rank 0's weights. digests: int64 [world - 1], of the other ranks' weights, for fingerprints."""

    own: Any
    digests: torch.Tensor


def load_ranks(settings: Settings, layers: Callable[[int], LayersInPlace], address: str | None) -> Model:
    """Load a model with this process as rank 0.

    Args:
        layers: creates the progress display for a number of layers.
        address: "host:port" where this rank listens for ranks that are started elsewhere (`run_rank`). None starts
            them on this host, "ray" on the Ray cluster of this process.

    Raises:
        RequestError: the model cannot be split this way. RankError: a rank does not connect, or fails.
    """
    checkpoint = open_checkpoint(settings.path)
    if isinstance(checkpoint, GgufCheckpoint):
        raise RequestError(f"a GGUF file cannot be split over ranks yet, and {settings.path} is one: give safetensors")
    architecture = read_config(checkpoint.config).serving(settings.context)
    world = settings.pipeline
    stages = [stage_of(architecture, rank, world) for rank in range(world)]
    store, own_address = meet(0, world, address_here() if address == "ray" else address)
    store.set("settings", json.dumps(asdict(settings)))
    processes: RankHandles | None = None  # started elsewhere
    if address is None:
        processes = Processes(world, own_address)
    elif address == "ray":
        processes = RayRanks(world, own_address, run_rank)
    try:
        await_all(store, world, lambda: None if processes is None else processes.check())
        links = Links(0, world, store, _interface(own_address))
        params = _read(settings, stages[0], layers)
        dtype = params.embed_tokens.weight.dtype
        links.send_ints([_DTYPES.index(dtype)], range(1, world))
        digests = [links.recv_ints(rank)[0] for rank in range(1, world)]  # the ranks are ready
    except BaseException:
        if processes is not None:
            processes.end()
        raise
    group = RankGroup(links, [_plan(settings, stage, dtype) for stage in stages], processes)
    return Model(
        forward=PipelineForward(group, stages, params, settings.compile),
        params=RankParams(params, torch.tensor(digests)),
        new_cache=partial(new_cache, group),
        vocab_size=architecture.vocab_size,
        max_seq_len=settings.context,
        num_parameters=num_parameters(architecture),
        compiles=False,
        why_eager=_WHY_EAGER,
        new_blocks=partial(ShardedKVPool, group),
    )


def run_rank(rank: int, world: int, address: str, source: str | Path | None = None) -> None:
    """Run a rank other than 0 until rank 0 ends: for a cluster, where each machine starts its own rank.

    Args:
        rank: 1 … world - 1.
        world: the number of ranks.
        address: "host:port" of rank 0, which calls `onward.load(source, pipeline=world, address=address)`.
        source: the checkpoint's folder on this machine; by default the same path as on rank 0.

    Raises:
        RankError: rank 0 cannot be reached, or ended before its model was freed.
    """
    if not 1 <= rank < world:
        raise RequestError(f"rank must be in 1 … {world - 1}; got {rank}")
    store, _ = meet(rank, world, address)
    settings = Settings(**json.loads(store.get("settings")))
    store.set(f"here/{rank}", "")
    links = Links(rank, world, store, _interface(address))
    with heartbeats(store, rank):
        try:
            _run_worker(settings if source is None else replace(settings, source=str(source)), links)
        except BaseException as error:
            links.fail(error)
            raise


def _run_worker(settings: Settings, links: Links) -> None:
    if settings.threads is not None:
        native.set_num_threads(settings.threads)
        torch.set_num_threads(settings.threads)
    architecture = read_config(open_checkpoint(settings.path).config).serving(settings.context)
    stage = stage_of(architecture, links.rank, settings.pipeline)
    params = _read(settings, stage)
    dtype = _DTYPES[links.recv_ints()[0]]
    if _dtype_of(params) != dtype:  # this rank's first tensor has another dtype than the model's
        params = _read(replace(settings, dtype=str(dtype).removeprefix("torch.")), stage)
    hidden = token_table(stage.hidden_size, dtype)
    params = params._replace(embed_tokens=Embedding(hidden))
    run = RankRun(stage.hidden, params, hidden, stage.hidden_size, settings.compile)
    links.send_ints([_digest(run.plain.model)], [0])
    to = (links.rank + 1) % links.world
    plan = _plan(settings, stage, dtype)
    RankWorker(links, run, stage.numbers, plan, -(-settings.context // BLOCK), to).serve()


def _plan(settings: Settings, stage: Stage, dtype: torch.dtype) -> CachePlan:
    return cache_plan(stage, dtype, format=checked_cache_format(settings.cache_format)).without_windows()


def _read(settings: Settings, stage: Stage, layers: Callable[[int], LayersInPlace] | None = None) -> Any:
    """Read the weights of a stage without touching pages of other stages. layers: as in `load_ranks`."""
    checkpoint, count = open_checkpoint(settings.path), len(stage.layers)
    with LayersInPlace(count, False, None) if layers is None else layers(count) as display:
        reader = partial(WeightsReader, checkpoint, stage, settings.torch_dtype, torch.device("cpu"))
        kv_format = checked_cache_format(settings.cache_format)
        return reader(
            format=settings.quantize, name_map=None, adapter=None, layers=display, cache_format=kv_format
        ).read()


def _digest(model: Model) -> int:
    """A digest of all bytes of a rank's weights."""
    weights = json.dumps(weights_fingerprint(model), sort_keys=True)
    return int.from_bytes(hashlib.blake2b(weights.encode(), digest_size=7).digest(), "little")


def _dtype_of(params: StageParams) -> torch.dtype:
    """The dtype of the first norm."""
    first = params.layers[0]
    norms = first.mixer_norm, first.mixer_post_norm, first.feed_forward_norm, first.feed_forward_post_norm
    return next(norm.dtype for norm in norms if norm is not None)


def _interface(address: str) -> str | None:
    """The loopback interface for ranks on one host; None lets gloo choose one."""
    host = address.rpartition(":")[0]
    return host if is_loopback(host) else None
