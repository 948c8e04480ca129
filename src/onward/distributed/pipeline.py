"""The stages of a pipeline, each the layers of one rank as a model that reads no other weights, and its forward: rank 0
runs the first layers and the head, and the other ranks the layers in between."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.cache import PagedKVCache
from onward.distributed.group import MAX_TOKENS, RankGroup, RankRun, Tables, layer_tap, rows_of_table, token_table
from onward.distributed.links import ForwardMessage, Kind
from onward.errors import RequestError
from onward.models import Architecture, Embedding, WeightScope
from onward.models.adapters import RowSteers, TableUpdate
from onward.models.architecture import parameter_shapes
from onward.models.blocks import Decoder, DecoderParams, LayerParams
from onward.models.contract import NORM, take_positions
from onward.models.model import DividedForward, TapValues
from onward.ops.heads import BLOCK
from onward.ops.tap import active_updates, is_read, report, tap
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

    @cached_property
    def taps(self) -> tuple[str, ...]:
        """The taps of its hidden states."""
        return ("embedding",) * (self.first == 0) + tuple(map(layer_tap, self.numbers))

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


# The minimum tokens of a prompt, and the minimum rows, of a microbatch: each microbatch reads all weights of a rank.
# Eight rows of a 0.6B model in two microbatches took twice as long as in one process (benchmarks/LOG.md).
_MIN_TOKENS = 32
_MIN_ROWS = 16


class Microbatch(NamedTuple):
    """Some rows of a forward, or some tokens of its only row.

    tokens: int32 [B, T]. offsets: int32 [B]. table: int32 [B, M]. logits_at: int64 [R, N], the positions to return
    logits for; None for all. taps: to read. steers: the changes [B, T, …], by tap.
    """

    tokens: Tensor
    offsets: Tensor
    table: Tensor
    logits_at: Tensor | None
    taps: tuple[str, ...] = ()
    steers: Mapping[str, RowSteers] = MappingProxyType({})

    @property
    def logits_shape(self) -> torch.Size:
        """[R, N]."""
        return self.tokens.shape if self.logits_at is None else self.logits_at.shape

    @property
    def has_result(self) -> bool:
        return self.logits_shape.numel() > 0

    @property
    def needs_norm(self) -> bool:
        """Whether the final norm is computed: the ranks return hidden states."""
        return self.has_result or NORM in self.taps

    @property
    def num_hidden(self) -> int:
        """The number of hidden states that the last rank returns."""
        return (self.tokens if self.needs_all else self.logits_shape).numel()

    @property
    def needs_all(self) -> bool:
        """Whether the final norm is computed at all positions."""
        return NORM in self.taps or (self.has_result and NORM in self.steers)

    def part(self, rows: slice, tokens: slice, logits_at: Tensor | None) -> "Microbatch":
        return Microbatch(
            self.tokens[rows, tokens],
            self.offsets[rows] + (tokens.start or 0),
            self.table[rows],
            logits_at,
            self.taps,
            {name: steers.part(rows, tokens) for name, steers in self.steers.items()},
        )


def microbatches(whole: Microbatch, count: int) -> list[Microbatch]:
    """Split a forward into at most `count` microbatches. Their concatenated results are its logits.

    A row stays with the rows that it reads: a layer stores the keys and values of all rows before it reads any.
    """
    (rows, num_tokens), logits_at = whole.tokens.shape, whole.logits_at
    if rows == 1 and logits_at is not None and logits_at.shape[0] == 1 and num_tokens >= 2 * _MIN_TOKENS:
        return _split_tokens(whole, logits_at, min(count, num_tokens // _MIN_TOKENS))
    if (
        rows < 2 * _MIN_ROWS
        or (num_tokens == 1 and _share_blocks(whole.offsets, whole.table))
        or (logits_at is not None and logits_at.shape[0] != rows)
    ):
        return [whole]
    return [
        whole.part(slice(a, b), slice(None), None if logits_at is None else logits_at[a:b])
        for a, b in _cuts(rows, min(count, rows // _MIN_ROWS))
    ]


def _split_tokens(whole: Microbatch, logits_at: Tensor, count: int) -> list[Microbatch]:
    """Split the tokens of a row. The positions in `logits_at` must be in the last microbatch."""
    cuts = _cuts(whole.tokens.shape[1], count)
    if logits_at.numel() and int(logits_at.min()) < cuts[-1][0]:
        return [whole]
    return [
        whole.part(slice(None), slice(a, b), logits_at - a if (a, b) == cuts[-1] else logits_at[:0]) for a, b in cuts
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
        self._hidden = token_table(stage.hidden_size, group.plans[0].dtype)
        self._first_layers = RankRun(stage.hidden, params, self._hidden, stage.hidden_size, compile)
        head_params = HeadParams(Embedding(self._hidden), params)
        self._head = RankRun(stage.head, head_params, self._hidden, stage.vocab_size, compile)

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
        whole = Microbatch(
            tokens, offsets, cache.table.clone(), logits_at, tuple(filter(is_read, self.taps)), _steers()
        )
        logits, values = self._thread.submit(self._exchange, whole, cache).result()
        for name in whole.taps:
            report(name, values[name])
        return logits, cache

    @cached_property
    def taps(self) -> dict[str, TapValues]:
        names = [*itertools.chain(*(stage.taps for stage in self._stages)), NORM]
        return dict.fromkeys(names, TapValues((self._hidden.shape[1],), self._hidden.dtype))

    def own_part(self, params: Any) -> tuple[Stage, DecoderParams]:
        return self._stages[0], params.own

    @torch.no_grad()
    def _exchange(self, whole: Microbatch, cache: PagedKVCache) -> tuple[Tensor, dict[str, Tensor]]:
        with self.group.exchanging():
            self._has_sent = False
            try:
                return self._run(whole, cache)
            except BaseException as error:
                if self._has_sent:
                    self.group.abort(f"the ranks are out of sync since a forward failed ({error}): reload the model")
                raise

    def _run(self, whole: Microbatch, cache: PagedKVCache) -> tuple[Tensor, dict[str, Tensor]]:
        links = self.group.links
        batches = microbatches(whole, links.world)
        read, steered = self._by_rank(whole.taps), self._by_rank(whole.steers)
        values: list[dict[str, Tensor]] = []
        for index, batch in enumerate(batches):
            view = cache._replace(table=self._tables.filled(batch.table, batch.table.shape[1], index))
            # Errors in the ids are raised here, before anything is sent.
            inputs = ForwardBatch(batch.tokens, batch.offsets, view, taps=read[0])
            result = self._first_layers.step(inputs, {name: batch.steers[name] for name in steered[0]})
            values.append(dict(result.taps))
            self.group.broadcast(Kind.FORWARD, *self._message(batch, cache).numbers())
            self._has_sent = True
            for rank in self.group.others:
                links.send_together(rank, *itertools.chain(*(batch.steers[name] for name in steered[rank])))
            links.send(1, result.logits)
        logits: list[Tensor] = []
        for batch, own in zip(batches, values, strict=True):
            for rank in self.group.others:
                outs = {name: self._hidden.new_empty(*batch.tokens.shape, self._hidden.shape[1]) for name in read[rank]}
                own |= outs
                returns = batch.needs_norm and rank == links.world - 1
                links.receive_together(rank, *outs.values(), *[self._hidden[: batch.num_hidden]] * returns)
            if batch.needs_norm:
                result = self._head_step(batch)
                logits += [result.logits] if batch.has_result else []
                own |= result.taps
        if logits or whole.taps:
            links.settle()
        dim = 1 if len(whole.tokens) == 1 else 0
        taps = {name: torch.cat([own[name] for own in values], dim) for name in whole.taps}
        if not logits:
            return torch.empty(*whole.logits_shape, self._vocab_size, dtype=self._hidden.dtype), taps
        return logits[0] if len(logits) == 1 else torch.cat(logits), taps

    def _by_rank(self, names: Collection[str]) -> list[tuple[str, ...]]:
        """These taps of the layers, by rank; rank 0 has the embedding too."""
        return [tuple(name for name in stage.taps if name in names) for stage in self._stages]

    def _head_step(self, batch: Microbatch) -> StepResult:
        """Compute the logits of a microbatch's hidden states, which are in the table."""
        (rows, per_row), logits_at = batch.tokens.shape, batch.logits_at
        if not batch.needs_all:
            (rows, per_row), logits_at = batch.logits_shape, None
        elif not batch.has_result:
            logits_at = torch.zeros(rows, 0, dtype=torch.int64)
        table_rows = rows_of_table(rows, per_row)
        taps, steers = ({NORM} & {*names} for names in (batch.taps, batch.steers))
        inputs = ForwardBatch(table_rows, torch.zeros(rows, dtype=torch.int32), (), logits_at, tuple(taps))
        return self._head.step(inputs, {name: batch.steers[name] for name in steers})

    def _message(self, batch: Microbatch, cache: PagedKVCache) -> ForwardMessage:
        num_tokens = batch.tokens.shape[1]
        used = (int(batch.offsets.max()) + num_tokens - 1) // BLOCK + 1
        pool = self.group.pools[cache.keys[0].data_ptr()]
        logits_at = None if batch.needs_all else batch.logits_at
        taps, steers = (
            tuple(number for stage in self._stages[1:] for number in stage.numbers if layer_tap(number) in names)
            for names in (batch.taps, batch.steers)
        )
        return ForwardMessage(pool, num_tokens, batch.offsets, batch.table[:, :used], logits_at, taps, steers)


def _steers() -> dict[str, RowSteers]:
    """The changes that the caller makes at taps (`onward.models.adapters.steering`)."""
    rows = {}
    for name, update in active_updates().items():
        if not isinstance(update, TableUpdate):
            raise RequestError("a model over several ranks is steered by requests, not by functions of values")
        rows[name] = update.rows
    return {name: each for name, each in rows.items() if each.changes}
