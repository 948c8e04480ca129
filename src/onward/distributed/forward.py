"""What the forwards of rank 0 have in common."""

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onward.cache import PagedKVCache
from onward.distributed.group import Group
from onward.distributed.memory import Tables
from onward.distributed.messages import Forward, Kind
from onward.distributed.parts import Part
from onward.distributed.stage import MOST_TOKENS
from onward.errors import RequestError
from onward.models import Model, ModelRun
from onward.ops.blocks import BLOCK


class RanksForward(ABC):
    """Callable as the contract of `onward.models.model` says; runs over all ranks of a group."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._tables = Tables()
        self._begun = False
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
        if tokens.numel() > MOST_TOKENS:
            raise RequestError(
                f"a model over several ranks takes {MOST_TOKENS} tokens at once; got {list(tokens.shape)}: lower "
                "prefill_chunk"
            )
        self.group.check()
        # The caller may write the table again after an interrupt.
        whole = Part(tokens, offsets, cache.table.clone(), logits_at)
        return self._thread.submit(self._checked, whole, cache).result(), cache

    @torch.no_grad()
    def _checked(self, whole: Part, cache: PagedKVCache) -> Tensor:
        with self.group.exchanging():
            self._begun = False
            try:
                return self._run(whole, cache)
            except BaseException as error:
                if self._begun:
                    self.group.broke(f"the ranks are out of step since a forward failed ({error}): load the model anew")
                raise

    @abstractmethod
    def _run(self, whole: Part, cache: PagedKVCache) -> Tensor:
        """The logits of a forward."""

    def _view(self, part: Part, cache: PagedKVCache, place: int = 0) -> PagedKVCache:
        """Rank 0's cache of a part's rows."""
        return cache._replace(table=self._tables.filled(part.table, part.table.shape[1], place))

    def _announce(self, part: Part, cache: PagedKVCache) -> None:
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
