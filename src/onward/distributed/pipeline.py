"""The forward of a pipeline: rank 0 begins and ends it, and the other ranks do their layers in between."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.cache import PagedKVCache
from onward.distributed.group import RankGroup, Tables
from onward.distributed.links import Forward, Kind
from onward.distributed.stage import MOST_TOKENS, HeadParams, Stage, hidden_states, rows_of_table
from onward.errors import RequestError
from onward.models import Embedding, Model, ModelRun
from onward.models.blocks import DecoderParams
from onward.ops.kv_write import BLOCK

# The fewest tokens of a prompt, and the fewest rows, of which a part pays: each part reads all weights of a rank. Eight
# rows of a 0.6B model in two parts took twice as long as in one process (benchmarks/LOG.md).
_LEAST_TOKENS = 32
_LEAST_ROWS = 16


class Microbatch(NamedTuple):
    """Some rows of a forward, or some tokens of its only row.

    tokens: int32 [B, T]. offsets: int32 [B]. table: int32 [B, M]. at: int64 [R, N], the positions
    whose logits are wanted; None: all.
    """

    tokens: Tensor
    offsets: Tensor
    table: Tensor
    at: Tensor | None

    @property
    def wanted(self) -> tuple[int, int]:
        """The shape of the positions whose logits come back."""
        shape = self.tokens.shape if self.at is None else self.at.shape
        return shape[0], shape[1]

    @property
    def has_result(self) -> bool:
        return self.at is None or self.at.numel() > 0


def parts_of(whole: Microbatch, most: int) -> list[Microbatch]:
    """At most `most` parts, which together are the forward. Their results in order are its logits.

    A row that another row reads goes with it: a layer stores the keys and values of all rows before it reads any.
    """
    tokens, offsets, table, at = whole
    rows, count = tokens.shape
    if rows == 1 and at is not None and at.shape[0] == 1 and count >= 2 * _LEAST_TOKENS:
        return _of_tokens(whole, min(most, count // _LEAST_TOKENS))
    if (
        rows < 2 * _LEAST_ROWS
        or (count == 1 and _share_blocks(offsets, table))
        or (at is not None and at.shape[0] != rows)
    ):
        return [whole]
    most = min(most, rows // _LEAST_ROWS)
    cuts = [rows * index // most for index in range(most + 1)]
    return [
        Microbatch(tokens[a:b], offsets[a:b], table[a:b], None if at is None else at[a:b])
        for a, b in itertools.pairwise(cuts)
    ]


def _of_tokens(whole: Microbatch, most: int) -> list[Microbatch]:
    """The tokens of a row cut into runs. The positions that are wanted must lie in the last one."""
    count = whole.tokens.shape[1]
    cuts = [count * index // most for index in range(most + 1)]
    assert whole.at is not None
    if whole.at.numel() and int(whole.at.min()) < cuts[-2]:
        return [whole]
    nothing = whole.at[:0]
    return [
        whole._replace(
            tokens=whole.tokens[:, a:b], offsets=whole.offsets + a, at=whole.at - a if b == count else nothing
        )
        for a, b in itertools.pairwise(cuts)
    ]


def _share_blocks(offsets: Tensor, table: Tensor) -> bool:
    """Whether a row may read what another row writes: a block where some row's token goes is in another row's table."""
    at = (offsets // BLOCK).long()
    written = table.gather(1, at.unsqueeze(1)).squeeze(1)
    if len(set(written.tolist())) < len(written):
        return True
    used = torch.arange(table.shape[1]) <= at.unsqueeze(1)
    read = torch.where(used, table, -1)
    return any(int((read == block).any(1).sum()) > 1 for block in written)


class PipelineForward:
    """Callable as the contract of `onward.models.model` says; runs over all ranks of a group.

    The tokens of a forward go through the ranks in parts, so that a rank works on one while the next works on the part
    before. A row's bits do not depend on its neighbours nor on the chunk, so no bit depends on the parts.
    """

    def __init__(self, group: RankGroup, stage: Stage, params: DecoderParams, compile: str) -> None:
        self.group = group
        self._tables = Tables()
        self._begun = False
        # In a thread of its own: an interrupt of the caller's does not cut short what the ranks are in the midst of.
        self._thread = ThreadPoolExecutor(1, "onward-ranks")
        self._vocab_size = stage.vocab_size
        self._hidden = hidden_states(stage.hidden_size, group.dtype)
        self._front = rank_run(stage.hidden, params, stage.hidden_size, compile)
        ends = HeadParams(Embedding(self._hidden), params)
        self._back = rank_run(stage.head, ends, stage.vocab_size, compile, selects=False)

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Any, params: Any, *, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        if not isinstance(cache, PagedKVCache) or cache.keys[0].data_ptr() not in self.group.memories:
            raise RequestError(
                "a model over several ranks keeps its caches itself, and takes no cache=: use onward.Session to go on "
                "with a text"
            )
        if tokens.numel() > MOST_TOKENS:
            raise RequestError(
                f"a model over several ranks takes {MOST_TOKENS} tokens at once; got {list(tokens.shape)}: lower "
                "prefill_chunk"
            )
        self.group.check()
        # The caller may write the table again after an interrupt.
        whole = Microbatch(tokens, offsets, cache.table.clone(), logits_at)
        return self._thread.submit(self._checked, whole, cache).result(), cache

    @torch.no_grad()
    def _checked(self, whole: Microbatch, cache: PagedKVCache) -> Tensor:
        with self.group.exchanging():
            self._begun = False
            try:
                return self._run(whole, cache)
            except BaseException as error:
                if self._begun:
                    self.group.broke(f"the ranks are out of step since a forward failed ({error}): reload the model")
                raise

    def _run(self, whole: Microbatch, cache: PagedKVCache) -> Tensor:
        parts = parts_of(whole, self.group.links.world)
        for place, part in enumerate(parts):
            # What is wrong with the ids is found here, before anybody is told of them.
            x, _ = self._front(part.tokens, part.offsets, self._view(part, cache, place), None)
            self._announce(part, cache)
            self.group.links.send(x, 1)
        logits = [self._end(part) for part in parts if part.has_result]
        if not logits:
            return torch.empty(*whole.wanted, self._vocab_size, dtype=self.group.dtype)
        self.group.links.settle()
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _end(self, part: Microbatch) -> Tensor:
        """The logits of a part, when it has come back."""
        rows, each = part.wanted
        self.group.links.receive(self._hidden[: rows * each], self.group.links.world - 1)
        logits, _ = self._back(rows_of_table(rows, each), torch.zeros(rows, dtype=torch.int32), (), None)
        return logits

    def _view(self, part: Microbatch, cache: PagedKVCache, place: int) -> PagedKVCache:
        """Rank 0's cache of a part's rows."""
        return cache._replace(table=self._tables.filled(part.table, part.table.shape[1], place))

    def _announce(self, part: Microbatch, cache: PagedKVCache) -> None:
        """Tell the others of a forward."""
        count = part.tokens.shape[1]
        used = (int(part.offsets.max()) + count - 1) // BLOCK + 1
        number = self.group.memories[cache.keys[0].data_ptr()]
        given = Forward(number, count, part.offsets, part.table[:, :used], part.at)
        self.group.tell(Kind.FORWARD, *given.numbers())
        self._begun = True


def rank_run(forward: Any, params: Any, width: int, compile: str, *, selects: bool = True) -> ModelRun:
    """A part of a model as the loop of its rank calls it. width: of what it returns."""
    return ModelRun(Model(partial(forward), params, _no_cache, width, selects_logits=selects), compile)


def _no_cache(batch: int, max_len: int) -> Any:
    raise AssertionError("a rank's caches are views of its blocks")
