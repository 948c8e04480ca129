"""Which layers each rank of a pipeline holds."""

from collections.abc import Sequence
from itertools import accumulate

from onward.errors import RequestError


def divide_layers(costs: Sequence[int], world: int, ends: int) -> list[range]:
    """Runs of layers, one for each rank, of which the most expensive costs as little as can be.

    costs: of each layer. ends: what rank 0 has to do besides: the head.

    Raises:
        RequestError: more ranks than layers.
    """
    count = len(costs)
    if world > count:
        raise RequestError(f"a pipeline of {world} ranks needs as many layers, and the model has {count}: give fewer")
    before = [0, *accumulate(costs)]
    # least[k] and first[rank][k]: the least cost of the dearest of so many ranks over the first k layers, and where
    # the last of them begins.
    least: list[float] = [float("inf"), *(ends + before[k] for k in range(1, count + 1))]
    begins: list[list[int]] = [[0] * (count + 1)]
    for rank in range(1, world):
        options = [
            min(((max(least[i], before[k] - before[i]), i) for i in range(rank, k)), default=(float("inf"), 0))
            for k in range(count + 1)
        ]
        least, begins = [cost for cost, _ in options], [*begins, [begin for _, begin in options]]
    ranges: list[range] = []
    end = count
    for begin_of in reversed(begins):
        ranges.append(range(begin_of[end], end))
        end = ranges[-1].start
    return ranges[::-1]
