"""The requests of clients and their times: lists that each contender answers in its own process."""

import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Request:
    """One text that a client asks for.

    after, tokens: it is sent once request number `after` has `tokens` tokens; None: when the measurement begins.
    delay: seconds later than that.
    """

    ids: list[int]
    new_tokens: int
    after: int | None = None
    tokens: int = 0
    delay: float = 0.0


@dataclass
class Record:
    """When a request was sent and when each of its tokens came, in seconds since the measurement began.

    first: the first token, which is the same for all who run the same model.
    """

    sent: float = 0.0
    tokens: list[float] = field(default_factory=list)
    first: int | None = None


def followers(requests: Sequence[Request]) -> dict[tuple[int, int], list[int]]:
    """The numbers of the requests that are sent when request number k has its nth token, by (k, n)."""
    numbers = defaultdict(list)
    for number, request in enumerate(requests):
        if request.after is not None:
            numbers[request.after, request.tokens].append(number)
    return dict(numbers)


def closed_loop(prompts: Sequence[list[int]], new_tokens: Sequence[int], clients: int) -> list[Request]:
    """Clients that send their next request when their last has ended: request k follows request k - clients."""
    requests = [Request(ids, count) for ids, count in zip(prompts[:clients], new_tokens, strict=False)]
    for number in range(clients, len(prompts)):
        before = number - clients
        requests.append(Request(prompts[number], new_tokens[number], after=before, tokens=new_tokens[before]))
    return requests


def poisson(
    prompts: Sequence[list[int]], new_tokens: Sequence[int], rate: float, generator: random.Random
) -> list[Request]:
    """Requests at `rate` a second in the mean, each at a time that does not depend on the others'."""
    times = itertools.accumulate(generator.expovariate(rate) for _ in prompts)
    return [Request(ids, count, delay=at) for ids, count, at in zip(prompts, new_tokens, times, strict=True)]


def log_uniform(low: int, high: int, generator: random.Random) -> int:
    """A whole number; as often between n and 2n as between 2n and 4n."""
    return round(low * (high / low) ** generator.random())
