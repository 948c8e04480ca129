"""The stages of a pipeline, each the layers of one rank as a model that reads no other weights, and its forward: rank 0
runs the first layers and the head, and the other ranks the layers in between."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.cache import PagedKVCache
from onward.cache.plan import lazy_zeros
from onward.distributed.group import RankGroup, Tables, layer_tap, rows_of_table
from onward.distributed.links import ForwardMessage, Kind
from onward.errors import RequestError
from onward.models import Architecture, Embedding, Model, Run, WeightScope
from onward.models.architecture import parameter_shapes
from onward.models.blocks import Decoder, DecoderParams, LayerParams
from onward.models.contract import take_positions
from onward.models.model import DividedForward, TapValues
from onward.ops.heads import BLOCK
from onward.ops.tap import is_read, report, tap
from onward.program import ForwardBatch, StepResult


def divide_layers(costs: Sequence[int], world: int, ends: int) -> list[range]:
    """Divide layers into one range per rank, minimizing the cost of the most expensive rank.

    costs: the cost of each layer. ends: the cost of the head, for rank 0.

    Raises:
        RequestError: more ranks than layers.
    """
    count = len(costs)
    if world > count:
        raise RequestError(f"a pipeline of {world} ranks needs as many layers, and the model has {count}: use fewer")
    total = [0, *accumulate(costs)]
    # By the number k of layers: the minimal cost of the most expensive of the first ranks, and for each of these ranks
    # its first layer.
    best: list[float] = [float("inf"), *(ends + total[k] for k in range(1, count + 1))]
    starts: list[list[int]] = [[0] * (count + 1)]
    for rank in range(1, world):
        options = [
            min(((max(best[i], total[k] - total[i]), i) for i in range(rank, k)), default=(float("inf"), 0))
            for k in range(count + 1)
        ]
        best = [cost for cost, _ in options]
        starts.append([start for _, start in options])
    ranges: list[range] = []
    end = count
    for first_layer in reversed(starts):
        ranges.append(range(first_layer[end], end))
        end = ranges[-1].start
    return ranges[::-1]


# The maximum number of tokens of one forward.
MAX_TOKENS = 2**15


class StageParams(NamedTuple):
    """The layer weights of a rank other than 0.

    embed_tokens: the hidden states of the previous rank, as a lookup table; set after reading.
    """

    embed_tokens: Embedding | None
    layers: tuple[LayerParams, ...]


class HeadParams(NamedTuple):
    """hidden: the hidden states of the last rank, as a table. rest: rank 0's weights, with the norm and the head."""

    hidden: Embedding
    rest: DecoderParams


@dataclass(frozen=True)
class Stage(Decoder):
    """Some layers of a decoder. Rank 0's stage also has the embedding, the final norm and the head.

    Hidden states are passed in as rows of a lookup table and returned in place of logits, so a stage is traced and run
    like any model.

    first: the index of its first layer.
    """

    first: int = 0

    @property
    def numbers(self) -> range:
        """The numbers of its layers among all."""
        return range(self.first, self.first + len(self.layers))

    def read(self, scope: WeightScope, each_layer: Callable[[LayerParams], LayerParams] = lambda layer: layer) -> Any:
        if self.first == 0:
            return super().read(scope, each_layer)
        below = scope.under(self.names.layers)
        layers = [each_layer(layer.read(below.under(self.first + i))) for i, layer in enumerate(self.layers)]
        return StageParams(None, tuple(layers))

    def hidden(
        self, tokens: Tensor, offsets: Tensor, cache: Any, params: Any, *, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Hidden states for the next rank, float [B, T, D] or [R, N, D]. tokens: rows of the table on later ranks."""
        x_BTD, positions, _ = self.embedded(tokens, offsets, params)
        each = zip(self.numbers, self.layers, params.layers, self.places(), strict=True)
        for number, layer, layer_params, index in each:
            x_BTD = tap(layer(layer_params, x_BTD, positions, cache, index), layer_tap(number))
        return x_BTD if logits_at is None else take_positions(x_BTD, logits_at), cache

    def head(
        self, tokens: Tensor, offsets: Tensor, cache: Any, params: HeadParams, *, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """The logits of rows [B, T] of the table."""
        return self.logits(params.rest, self.normed(params.rest, params.hidden(tokens), logits_at)), cache


def stage_of(architecture: Architecture, rank: int, world: int) -> Stage:
    """The stage of a rank. Raises `RequestError`: a family that cannot be split between layers, or more ranks than
    layers."""
    if not isinstance(architecture, Decoder):
        raise RequestError(
            f"pipeline= cannot split a {type(architecture).__name__}, only decoders made of the common blocks"
        )
    decoder = architecture
    if decoder.states:
        mixers = [layer.mixer for layer in decoder.layers if layer.mixer is not None]
        kinds = ", ".join(sorted({type(mixer).__name__ for mixer in mixers}))
        raise RequestError(f"pipeline= cannot split a model with recurrent layers ({kinds}) yet")
    if decoder.layer_embeddings is not None or decoder.sharing:
        raise RequestError(
            "pipeline= cannot split a model whose layers share keys, values or embeddings (Gemma 3n and 4)"
        )
    sizes = {name: torch.Size(shape).numel() for name, shape in parameter_shapes(decoder).items()}
    prefixes = [f"{decoder.names.layers}.{index}." for index in range(len(decoder.layers))]
    costs = [sum(size for name, size in sizes.items() if name.startswith(prefix)) for prefix in prefixes]
    own = divide_layers(costs, world, ends=decoder.vocab_size * decoder.hidden_size)[rank]
    names = decoder.names
    others = [prefix for index, prefix in enumerate(prefixes) if index not in own]
    others += [f"{name}." for name in (names.embed_tokens, names.norm, names.lm_head) if rank > 0]
    options = {field.name: getattr(decoder, field.name) for field in fields(Decoder)}
    options |= {"layers": decoder.layers[own.start : own.stop], "unread": (*decoder.unread, *others)}
    if rank > 0:
        options["embedding_multiplier"] = 1.0
    return Stage(**options, first=own.start)


def hidden_states(width: int, dtype: torch.dtype) -> Tensor:
    """A table for the hidden states of a forward's tokens, whose memory is allocated when it is written."""
    return lazy_zeros((MAX_TOKENS, width), dtype, torch.device("cpu"))


# The minimum tokens of a prompt, and the minimum rows, of a microbatch: each microbatch reads all weights of a rank.
# Eight rows of a 0.6B model in two microbatches took twice as long as in one process (benchmarks/LOG.md).
_MIN_TOKENS = 32
_MIN_ROWS = 16


class Microbatch(NamedTuple):
    """Some rows of a forward, or some tokens of its only row.

    tokens: int32 [B, T]. offsets: int32 [B]. table: int32 [B, M]. logits_at: int64 [R, N], the positions to return
    logits for; None for all.
    """

    tokens: Tensor
    offsets: Tensor
    table: Tensor
    logits_at: Tensor | None

    @property
    def logits_shape(self) -> torch.Size:
        """[R, N]."""
        return self.tokens.shape if self.logits_at is None else self.logits_at.shape

    @property
    def has_result(self) -> bool:
        return self.logits_shape.numel() > 0


def microbatches(whole: Microbatch, count: int) -> list[Microbatch]:
    """Split a forward into at most `count` microbatches. Their concatenated results are its logits.

    A row stays with the rows that it reads: a layer stores the keys and values of all rows before it reads any.
    """
    tokens, offsets, table, logits_at = whole
    rows, num_tokens = tokens.shape
    if rows == 1 and logits_at is not None and logits_at.shape[0] == 1 and num_tokens >= 2 * _MIN_TOKENS:
        return _split_tokens(whole, logits_at, min(count, num_tokens // _MIN_TOKENS))
    if (
        rows < 2 * _MIN_ROWS
        or (num_tokens == 1 and _share_blocks(offsets, table))
        or (logits_at is not None and logits_at.shape[0] != rows)
    ):
        return [whole]
    return [
        Microbatch(tokens[a:b], offsets[a:b], table[a:b], None if logits_at is None else logits_at[a:b])
        for a, b in _cuts(rows, min(count, rows // _MIN_ROWS))
    ]


def _split_tokens(whole: Microbatch, logits_at: Tensor, count: int) -> list[Microbatch]:
    """Split the tokens of a row. The positions in `logits_at` must be in the last microbatch."""
    cuts = _cuts(whole.tokens.shape[1], count)
    if logits_at.numel() and int(logits_at.min()) < cuts[-1][0]:
        return [whole]
    return [
        Microbatch(
            whole.tokens[:, a:b], whole.offsets + a, whole.table, logits_at - a if (a, b) == cuts[-1] else logits_at[:0]
        )
        for a, b in cuts
    ]


def _cuts(size: int, count: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise(size * index // count for index in range(count + 1)))


def _share_blocks(offsets: Tensor, table: Tensor) -> bool:
    """Whether a row may read what another row writes: the block of a row's token is in another row's table."""
    last = (offsets // BLOCK).long()
    written = table.gather(1, last.unsqueeze(1)).squeeze(1)
    if len(set(written.tolist())) < len(written):
        return True
    used = torch.arange(table.shape[1]) <= last.unsqueeze(1)
    read = torch.where(used, table, -1)
    return any(int((read == block).any(1).sum()) > 1 for block in written)


Taps = dict[str, Tensor]  # values by name
NORM = "norm"  # the tap that rank 0 serves with the head


class PipelineForward(DividedForward):
    """A forward with the contract of `onward.models.model` that runs over all ranks of a group.

    Microbatches go through the ranks one after the other, so that ranks work on different ones at the same time. The
    split doesn't change results, because a row's bits depend neither on other rows nor on the prefill chunk.

    stages: of all ranks. params: of rank 0.
    """

    def __init__(self, group: RankGroup, stages: Sequence[Stage], params: DecoderParams, compile: str) -> None:
        self.group, self._stages, stage = group, stages, stages[0]
        self._tables = Tables()
        self._has_sent = False
        # A separate thread, so that an interrupt of the caller doesn't interrupt the exchange between ranks.
        self._thread = ThreadPoolExecutor(1, "onward-ranks")
        self._vocab_size = stage.vocab_size
        self._hidden = hidden_states(stage.hidden_size, group.plans[0].dtype)
        self._first_layers = rank_run(stage.hidden, params, stage.hidden_size, compile)
        head_params = HeadParams(Embedding(self._hidden), params)
        self._head = rank_run(stage.head, head_params, stage.vocab_size, compile)

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Any, params: Any, *, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        if not isinstance(cache, PagedKVCache) or cache.keys[0].data_ptr() not in self.group.pools:
            raise RequestError(
                "a model over several ranks manages its own caches, and takes no cache=: use onward.Session to "
                "continue a text"
            )
        if tokens.numel() > MAX_TOKENS:
            raise RequestError(
                f"a model over several ranks takes at most {MAX_TOKENS} tokens per step; got {list(tokens.shape)}: "
                "lower prefill_chunk"
            )
        self.group.check()
        # The caller may overwrite the table after an interrupt.
        whole = Microbatch(tokens, offsets, cache.table.clone(), logits_at)
        taps = tuple(name for name in self.taps if is_read(name))
        logits, values = self._thread.submit(self._exchange, whole, cache, taps).result()
        for name in taps:
            report(name, values[name])
        return logits, cache

    @cached_property
    def taps(self) -> dict[str, TapValues]:
        layers = (layer_tap(number) for stage in self._stages for number in stage.numbers)
        return dict.fromkeys(("embedding", *layers, NORM), TapValues((self._hidden.shape[1],), self._hidden.dtype))

    def own_part(self, params: Any) -> tuple[Stage, DecoderParams]:
        return self._stages[0], params.own

    @torch.no_grad()
    def _exchange(self, whole: Microbatch, cache: PagedKVCache, taps: tuple[str, ...]) -> tuple[Tensor, Taps]:
        with self.group.exchanging():
            self._has_sent = False
            try:
                return self._run(whole, cache, taps)
            except BaseException as error:
                if self._has_sent:
                    self.group.abort(f"the ranks are out of sync since a forward failed ({error}): reload the model")
                raise

    def _run(self, whole: Microbatch, cache: PagedKVCache, taps: tuple[str, ...]) -> tuple[Tensor, Taps]:
        links = self.group.links
        batches = microbatches(whole, links.world)
        layers = [[number for number in stage.numbers if layer_tap(number) in taps] for stage in self._stages]
        own = tuple(name for name in taps if name == "embedding" or name in map(layer_tap, layers[0]))
        others = list(itertools.chain(*layers[1:]))
        read: list[dict[str, Tensor]] = []
        for index, batch in enumerate(batches):
            view = cache._replace(table=self._tables.filled(batch.table, batch.table.shape[1], index))
            # Errors in the ids are raised here, before anything is sent.
            result = self._first_layers.step(ForwardBatch(batch.tokens, batch.offsets, view, taps=own))
            read.append(dict(result.taps))
            self.group.broadcast(Kind.FORWARD, *self._message(batch, cache, others, NORM in taps).numbers())
            self._has_sent = True
            links.send(1, result.logits)
        logits: list[Tensor] = []
        for batch, found in zip(batches, read, strict=True):
            for rank, numbers in enumerate(layers[1:], start=1):
                for number in numbers:
                    found[layer_tap(number)] = self._hidden.new_empty(*batch.tokens.shape, self._hidden.shape[1])
                    links.receive(rank, found[layer_tap(number)])
            if batch.has_result or NORM in taps:
                result = self._head_step(batch, (NORM,) if NORM in taps else ())
                logits += [result.logits] if batch.has_result else []
                found |= result.taps
        values = {name: torch.cat([each[name] for each in read], dim=int(len(whole.tokens) == 1)) for name in taps}
        if not logits:
            return torch.empty(*whole.logits_shape, self._vocab_size, dtype=self.group.plans[0].dtype), values
        links.settle()
        return logits[0] if len(logits) == 1 else torch.cat(logits), values

    def _head_step(self, batch: Microbatch, taps: tuple[str, ...]) -> StepResult:
        """Wait for the hidden states of a microbatch and compute their logits. With a tap, of all its positions."""
        rows, per_row = batch.tokens.shape if taps else batch.logits_shape
        table_rows = rows_of_table(rows, per_row)
        self.group.links.receive(self.group.links.world - 1, self._hidden[: table_rows.numel()])
        none = torch.zeros(rows, 0, dtype=torch.int64)
        logits_at = None if not taps else batch.logits_at if batch.has_result else none
        return self._head.step(ForwardBatch(table_rows, torch.zeros(rows, dtype=torch.int32), (), logits_at, taps))

    def _message(
        self, batch: Microbatch, cache: PagedKVCache, layers: Sequence[int], needs_all: bool
    ) -> ForwardMessage:
        """layers: that are read. needs_all: rank 0 needs the hidden states of all positions."""
        num_tokens = batch.tokens.shape[1]
        used = (int(batch.offsets.max()) + num_tokens - 1) // BLOCK + 1
        pool = self.group.pools[cache.keys[0].data_ptr()]
        logits_at = None if needs_all else batch.logits_at
        return ForwardMessage(pool, num_tokens, batch.offsets, batch.table[:, :used], logits_at, tuple(layers))


def rank_run(forward: Any, params: Any, width: int, compile: str) -> Run:
    """A rank's part of a model. width: the last dimension of its result."""
    return Run(Model(forward, params, _no_cache, width), compile)


def _no_cache(batch: int, max_len: int) -> Any:
    raise AssertionError("a rank's caches are views of its blocks")
