"""The forward of a pipeline: rank 0 begins and ends it, and the other ranks do their layers in between."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onward.cache import PagedKVCache
from onward.distributed.follower import rows_of_table
from onward.distributed.group import Group
from onward.distributed.memory import Tables
from onward.distributed.messages import Forward, Kind
from onward.distributed.parts import Part, parts_of
from onward.distributed.stage import HeadParams, Stage, hidden_states
from onward.errors import RequestError
from onward.models import Embedding, Model, ModelRun
from onward.models.blocks import DecoderParams
from onward.ops.blocks import BLOCK


class PipelineForward:
    """Callable as the contract of `onward.models.model` says.

    The tokens of a forward go through the ranks in parts, so that a rank works on one while the next works on the part
    before. A row's bits do not depend on its neighbours nor on the chunk, so no bit depends on the parts.
    """

    def __init__(self, group: Group, stage: Stage, params: DecoderParams, compile: str) -> None:
        self.group = group
        self._stage = stage
        self._front = stage_run(stage, params, compile)
        self._hidden = hidden_states(stage.hidden_size, group.dtype)
        self._back = ModelRun(
            Model(partial(stage.head), HeadParams(Embedding(self._hidden), params), _no_cache, stage.vocab_size),
            compile,
        )
        self._tables = Tables()
        # In a thread of its own: an interrupt of the caller's does not cut short what the ranks are in the midst of.
        self._thread = ThreadPoolExecutor(1, "onward-ranks")

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Any, params: Any, *, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        if not isinstance(cache, PagedKVCache) or cache.keys[0].data_ptr() not in self.group.memories:
            raise RequestError(
                "a model over several ranks keeps its caches itself, and takes no cache=: use onward.Session to go on "
                "with a text"
            )
        # The caller may write the table again after an interrupt.
        parts = parts_of(tokens, offsets, cache.table.clone(), logits_at, self.group.links.world)
        return self._thread.submit(self._forward, parts, cache).result(), cache

    @torch.no_grad()
    def _forward(self, parts: Sequence[Part], cache: PagedKVCache) -> Tensor:
        group, begun = self.group, 0
        with group.lock:
            try:
                for place, part in enumerate(parts):
                    self._begin(part, cache, place)
                    begun += 1
                logits = [self._end(part) for part in parts if part.has_result]
                if logits:
                    group.links.settle()
            except BaseException as error:
                if begun:
                    group.broke(f"the ranks are out of step since a forward failed ({error}): load the model anew")
                raise
        if not logits:
            return torch.empty(*parts[-1].wanted, self._stage.vocab_size, dtype=group.dtype)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _begin(self, part: Part, cache: PagedKVCache, place: int) -> None:
        """Do rank 0's layers and send what comes of it on its way. What is wrong with the ids is found here, before
        anybody is told of them."""
        count = part.tokens.shape[1]
        view = cache._replace(table=self._tables.filled(part.table, part.table.shape[1], place))
        x, _ = self._front(part.tokens, part.offsets, view, None)
        used = (int(part.offsets.max()) + count - 1) // BLOCK + 1
        number = self.group.memories[cache.keys[0].data_ptr()]
        given = Forward(number, count, part.offsets, part.table[:, :used], part.at)
        self.group.tell(Kind.FORWARD, *given.numbers())
        self.group.links.send(x, 1)

    def _end(self, part: Part) -> Tensor:
        """The logits of a part, when it has come back."""
        rows, each = part.wanted
        self.group.links.receive(self._hidden[: rows * each], self.group.links.world - 1)
        logits, _ = self._back(rows_of_table(rows, each), torch.zeros(rows, dtype=torch.int32), (), None)
        return logits


def stage_run(stage: Stage, params: Any, compile: str) -> ModelRun:
    """A stage as the loop of its rank calls it."""
    return ModelRun(Model(partial(stage.hidden), params, _no_cache, stage.hidden_size, selects_logits=True), compile)


def _no_cache(batch: int, max_len: int) -> Any:
    raise AssertionError("a stage's caches are views of its rank's blocks")
