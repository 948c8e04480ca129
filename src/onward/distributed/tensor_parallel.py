"""The forward of a tensor-parallel model: all ranks do the same layers, each with its heads and columns."""

from torch import Tensor

from onward.cache import PagedKVCache
from onward.distributed.follower import rows_of_table
from onward.distributed.forward import RanksForward, rank_run
from onward.distributed.group import Group
from onward.distributed.parts import Part
from onward.distributed.shard import Shard, ShardParams
from onward.distributed.stage import hidden_states
from onward.models import Embedding


class TensorForward(RanksForward):
    """Rank 0 looks the tokens up and sends what it finds to all; then all do the same program."""

    def __init__(self, group: Group, shard: Shard, params: ShardParams, compile: str) -> None:
        super().__init__(group)
        self._hidden = hidden_states(shard.hidden_size, group.dtype)
        self._front = rank_run(shard.embed, params, shard.hidden_size, compile, selects=False)
        body = params._replace(embed_tokens=Embedding(self._hidden))
        self._body = rank_run(shard.body, body, shard.vocab_size, compile)

    def _run(self, whole: Part, cache: PagedKVCache) -> Tensor:
        rows, count = whole.tokens.shape
        # What is wrong with the ids is found here, before anybody is told of them.
        x, _ = self._front(whole.tokens, whole.offsets, (), None)
        self._announce(whole, cache)
        for rank in self.group.others:
            self.group.links.send(x, rank)
        self._hidden[: rows * count] = x.view(rows * count, -1)
        table = rows_of_table(rows, count)
        logits, _ = self._body(table, whole.offsets, self._view(whole, cache), whole.at)
        self.group.links.settle()
        return logits
