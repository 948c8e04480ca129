"""A model over several processes: rank 0 loads it and decodes, the others follow."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onward import native
from onward.cache.kinds import without_windows
from onward.checkpoint import GgufCheckpoint, open_checkpoint
from onward.distributed.follower import RankWorker
from onward.distributed.group import RankGroup, new_blocks, new_cache
from onward.distributed.launchers import Processes, beating
from onward.distributed.links import Links, await_all, meet
from onward.distributed.pipeline import PipelineForward, rank_run
from onward.distributed.ray import RankHandles, RayRanks, address_here
from onward.distributed.stage import Stage, StageParams, hidden_states, stage_of
from onward.errors import RequestError
from onward.language_model.session_fingerprint import fingerprint
from onward.language_model.weights import LayersInPlace, WeightsReader
from onward.models import Embedding, Model, read_config
from onward.models.architecture import num_parameters
from onward.ops.kv_write import BLOCK


@dataclass(frozen=True)
class Settings:
    """source: the checkpoint, a path of `find_folder`. dtype, quantize, compile: as `onward.load` takes them. context:
    the most positions of a text. threads: of each rank's kernels; None: its own default."""

    source: str
    pipeline: int
    dtype: str | None
    quantize: str | None
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


_CPU = torch.device("cpu")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WHY_EAGER = "it runs over several ranks, each with programs of its own"


class RankParams(NamedTuple):
    """What rank 0 has of the weights. digests: int64 [world - 1], of the others', so that fingerprints tell them."""

    own: Any
    digests: torch.Tensor


def load_ranks(settings: Settings, layers: Callable[[int], LayersInPlace], address: str | None) -> Model:
    """The model of which this process is rank 0.

    Args:
        layers: the display of so many layers.
        address: "host:port" where the other ranks, which somebody else starts, find this one (`run_rank`). None starts
            them on this host, "ray" on the Ray cluster that this process is in.

    Raises:
        RequestError: the model cannot be split so. RankError: a rank does not come, or fails.
    """
    checkpoint = open_checkpoint(settings.path)
    if isinstance(checkpoint, GgufCheckpoint):
        raise RequestError(f"a GGUF file cannot be split over ranks yet, and {settings.path} is one: give safetensors")
    architecture = read_config(checkpoint.config).serving(settings.context)
    shapes = [
        without_windows(stage_of(architecture, rank, settings.pipeline).cached) for rank in range(settings.pipeline)
    ]
    store, where = meet(0, settings.pipeline, address_here() if address == "ray" else address)
    store.set("settings", json.dumps(asdict(settings)))
    processes: RankHandles | None = None  # somebody else starts them
    if address is None:
        processes = Processes(settings.pipeline, where)
    elif address == "ray":
        processes = RayRanks(settings.pipeline, where, run_rank)
    try:
        await_all(store, settings.pipeline, lambda: None if processes is None else processes.check())
        links = Links(0, settings.pipeline, store, _interface(where))
        stage = stage_of(architecture, 0, settings.pipeline)
        params = _read(settings, stage, layers)
        dtype = params.embed_tokens.weight.dtype
        links.send_ints([_DTYPES.index(dtype)], range(1, settings.pipeline))
        digests = [links.recv_ints(rank)[0] for rank in range(1, settings.pipeline)]  # they are ready
    except BaseException:
        if processes is not None:
            processes.end()
        raise
    group = RankGroup(links, shapes, dtype, processes)
    return Model(
        forward=PipelineForward(group, stage, params, settings.compile),
        params=RankParams(params, torch.tensor(digests)),
        new_cache=partial(new_cache, group),
        vocab_size=architecture.vocab_size,
        max_seq_len=settings.context,
        selects_logits=True,
        num_parameters=num_parameters(architecture),
        compiles=False,
        why_eager=_WHY_EAGER,
        new_blocks=partial(new_blocks, group),
    )


def run_rank(rank: int, world: int, address: str, source: str | Path | None = None) -> None:
    """Be a rank other than 0 until rank 0 ends: for a cluster, where each machine starts its own.

    Args:
        rank: 1 … world - 1.
        world: how many ranks there are.
        address: "host:port" of rank 0, which calls `onward.load(source, pipeline=world, address=address)`.
        source: the checkpoint's folder on this machine; by default the path that rank 0 has.

    Raises:
        RankError: rank 0 is not there, or has ended before its model was given up.
    """
    if not 1 <= rank < world:
        raise RequestError(f"a rank that follows is in 1 … {world - 1}; got {rank}")
    store, _ = meet(rank, world, address)
    settings = Settings(**json.loads(store.get("settings")))
    store.set(f"here/{rank}", "")
    links = Links(rank, world, store, _interface(address))
    with beating(store, rank):
        try:
            _follow(settings if source is None else replace(settings, source=str(source)), links)
        except BaseException as error:
            links.fail(error)
            raise


def _follow(settings: Settings, links: Links) -> None:
    if settings.threads is not None:
        native.set_num_threads(settings.threads)
        torch.set_num_threads(settings.threads)
    architecture = read_config(open_checkpoint(settings.path).config).serving(settings.context)
    stage = stage_of(architecture, links.rank, settings.pipeline)
    params = _read(settings, stage, _unseen)
    dtype = _DTYPES[links.recv_ints()[0]]
    if _dtype_of(params) != dtype:  # this rank's part begins with a tensor of another dtype than the model
        params = _read(replace(settings, dtype=str(dtype).removeprefix("torch.")), stage, _unseen)
    hidden = hidden_states(stage.hidden_size, dtype)
    run = rank_run(stage.hidden, params._replace(embed_tokens=Embedding(hidden)), stage.hidden_size, settings.compile)
    links.send_ints([_digest(run.model)], [0])
    to = (links.rank + 1) % links.world
    RankWorker(links, run, hidden, without_windows(stage.cached), -(-settings.context // BLOCK), to).serve()


def _read(settings: Settings, stage: Stage, layers: Callable[[int], LayersInPlace]) -> Any:
    """The weights of a stage, which touch no page of another's."""
    checkpoint = open_checkpoint(settings.path)
    with layers(len(stage.layers)) as display:
        return WeightsReader(
            checkpoint,
            stage,
            settings.torch_dtype,
            _CPU,
            format=settings.quantize,
            name_map=None,
            adapter=None,
            layers=display,
        ).read()


def _digest(model: Model) -> int:
    """A number that tells a rank's weights from others: of all their bytes."""
    described = json.dumps(fingerprint(model)["weights"], sort_keys=True)
    return int.from_bytes(hashlib.blake2b(described.encode(), digest_size=7).digest(), "little")


def _unseen(count: int) -> LayersInPlace:
    return LayersInPlace(count, False, None)


def _dtype_of(params: StageParams) -> torch.dtype:
    """That of the first norm."""
    first = params.layers[0]
    norms = first.mixer_norm, first.mixer_post_norm, first.feed_forward_norm, first.feed_forward_post_norm
    return next(norm.dtype for norm in norms if norm is not None)


def _interface(address: str) -> str | None:
    """The network interface's name for ranks of one host; None lets gloo find one."""
    host = address.rpartition(":")[0]
    return host if host in ("127.0.0.1", "localhost") else None
