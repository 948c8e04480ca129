"""The forward of a pipeline: rank 0 runs the first layers and the head, and the other ranks the layers in between."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.cache import PagedKVCache
from onward.distributed.group import RankGroup, Tables
from onward.distributed.links import ForwardMessage, Kind
from onward.distributed.stage import MAX_TOKENS, HeadParams, Stage, hidden_states, rows_of_table
from onward.errors import RequestError
from onward.models import Embedding, Model, Run
from onward.models.blocks import DecoderParams
from onward.ops.heads import BLOCK
from onward.program import ForwardBatch

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


class PipelineForward:
    """A forward with the contract of `onward.models.model` that runs over all ranks of a group.

    Microbatches go through the ranks one after the other, so that ranks work on different ones at the same time. The
    split doesn't change results, because a row's bits depend neither on other rows nor on the prefill chunk.
    """

    def __init__(self, group: RankGroup, stage: Stage, params: DecoderParams, compile: str) -> None:
        self.group = group
        self._tables = Tables()
        self._has_sent = False
        # A separate thread, so that an interrupt of the caller doesn't interrupt the exchange between ranks.
        self._thread = ThreadPoolExecutor(1, "onward-ranks")
        self._vocab_size = stage.vocab_size
        self._hidden = hidden_states(stage.hidden_size, group.dtype)
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
        return self._thread.submit(self._exchange, whole, cache).result(), cache

    @torch.no_grad()
    def _exchange(self, whole: Microbatch, cache: PagedKVCache) -> Tensor:
        with self.group.exchanging():
            self._has_sent = False
            try:
                return self._run(whole, cache)
            except BaseException as error:
                if self._has_sent:
                    self.group.abort(f"the ranks are out of sync since a forward failed ({error}): reload the model")
                raise

    def _run(self, whole: Microbatch, cache: PagedKVCache) -> Tensor:
        links = self.group.links
        batches = microbatches(whole, links.world)
        for index, batch in enumerate(batches):
            view = cache._replace(table=self._tables.filled(batch.table, batch.table.shape[1], index))
            # Errors in the ids are raised here, before anything is sent.
            x = self._first_layers.step(ForwardBatch(batch.tokens, batch.offsets, view)).logits
            self.group.broadcast(Kind.FORWARD, *self._message(batch, cache).numbers())
            self._has_sent = True
            links.send(1, x)
        logits = [self._logits(*batch.logits_shape) for batch in batches if batch.has_result]
        if not logits:
            return torch.empty(*whole.logits_shape, self._vocab_size, dtype=self.group.dtype)
        links.settle()
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _logits(self, rows: int, per_row: int) -> Tensor:
        """Wait for the hidden states of a microbatch and compute their logits."""
        table_rows = rows_of_table(rows, per_row)
        self.group.links.receive(self.group.links.world - 1, self._hidden[: table_rows.numel()])
        return self._head.step(ForwardBatch(table_rows, torch.zeros(rows, dtype=torch.int32), ())).logits

    def _message(self, batch: Microbatch, cache: PagedKVCache) -> ForwardMessage:
        num_tokens = batch.tokens.shape[1]
        used = (int(batch.offsets.max()) + num_tokens - 1) // BLOCK + 1
        pool = self.group.pools[cache.keys[0].data_ptr()]
        return ForwardMessage(pool, num_tokens, batch.offsets, batch.table[:, :used], batch.logits_at)


def rank_run(forward: Any, params: Any, width: int, compile: str) -> Run:
    """A rank's part of a model. width: the last dimension of its result."""
    return Run(Model(forward, params, _no_cache, width), compile)


def _no_cache(batch: int, max_len: int) -> Any:
    raise AssertionError("a rank's caches are views of its blocks")
