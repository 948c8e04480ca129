"""The forward of a pipeline: rank 0 begins and ends it, and the other ranks do their layers in between."""

import torch
from torch import Tensor

from onward.cache import PagedKVCache
from onward.distributed.follower import rows_of_table
from onward.distributed.forward import RanksForward, rank_run
from onward.distributed.group import Group
from onward.distributed.parts import Part, parts_of
from onward.distributed.stage import HeadParams, Stage, hidden_states
from onward.models import Embedding
from onward.models.blocks import DecoderParams


class PipelineForward(RanksForward):
    """The tokens of a forward go through the ranks in parts, so that a rank works on one while the next works on the
    part before. A row's bits do not depend on its neighbours nor on the chunk, so no bit depends on the parts.
    """

    def __init__(self, group: Group, stage: Stage, params: DecoderParams, compile: str) -> None:
        super().__init__(group)
        self._vocab_size = stage.vocab_size
        self._hidden = hidden_states(stage.hidden_size, group.dtype)
        self._front = rank_run(stage.hidden, params, stage.hidden_size, compile)
        ends = HeadParams(Embedding(self._hidden), params)
        self._back = rank_run(stage.head, ends, stage.vocab_size, compile, selects=False)

    def _run(self, whole: Part, cache: PagedKVCache) -> Tensor:
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

    def _end(self, part: Part) -> Tensor:
        """The logits of a part, when it has come back."""
        rows, each = part.wanted
        self.group.links.receive(self._hidden[: rows * each], self.group.links.world - 1)
        logits, _ = self._back(rows_of_table(rows, each), torch.zeros(rows, dtype=torch.int32), (), None)
        return logits
