"""Which replica gets a request, and how many there should be.

Nothing here knows Ray, a clock or a model, so simulations run the same code.
"""

import bisect
import hashlib
import itertools
import json
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from onward.util.text_input import TextError, parse_json

if TYPE_CHECKING:
    from onward.engine.stats import EngineStats

# The routers of this process by their deployments. Ray copies the module of a router into each process, so they cannot
# be kept there.
ROUTERS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
# The load that a replica reports, and the seconds for which prompts may wait: those that take as long fill a replica.
LOAD, _WAIT = "load", 10.0
# Places of each replica on the ring: with 64 the largest share of keys is some 1.3 times the mean.
_PLACES = 64
# What the keys of sessions begin with. Their replica is passed over only where it has this many times the mean load.
_SESSION, _SESSION_BOUND = "session ", 1.25
# Of a prompt: enough for several blocks of the cache, and less than long conversations of one beginning differ by.
_CHARACTERS = 2048
_IDS = 512


class HashRing:
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, arXiv 1608.01350).

    From the place of a key on, the first replica that is not passed over is the best. So a key has the same ones as
    long as these are there, and only the keys of a replica that leaves move.
    """

    def __init__(self) -> None:
        self.replicas: frozenset[str] = frozenset()  # those that there are
        self._hashes: dict[str, list[int]] = {}
        self._places: list[tuple[int, str]] = []
        self._turn = 0

    def update(self, replicas: Collection[str]) -> None:
        """Say which replicas there are."""
        if self.replicas != set(replicas):
            self.replicas = frozenset(replicas)
            known, self._hashes = self._hashes, {}
            for replica in self.replicas:
                self._hashes[replica] = known.get(replica) or [_hash(f"{replica} {at}") for at in range(_PLACES)]
            self._places = sorted((place, replica) for replica, places in self._hashes.items() for place in places)

    def order(
        self, key: str | None, load: Callable[[str], float], avoid: Collection[str] = (), *, affinity: bool = True
    ) -> Iterator[str]:
        """All replicas, the best for a request first. They are looked for one by one: the first cost little.

        Args:
            key: what `routing_key` made of the request; None: it has none, and the least loaded is the best.
            load: requests that a replica has now.
            avoid: those that have failed the request; they come last.
            affinity: False: the least loaded is the best for every request.
        """
        loads = {replica: load(replica) for replica in self.replicas}
        if key is None or not affinity:
            order, bound = self._least_loaded_first(loads), math.inf
        else:
            order, bound = self._around(key), _bound(key, loads)
        later: list[str] = []
        for replica in order:
            if replica in avoid or loads[replica] >= bound:
                later.append(replica)
            else:
                yield replica
        yield from sorted(later, key=lambda replica: (replica in avoid, loads[replica] >= bound))

    def _least_loaded_first(self, loads: Mapping[str, float]) -> Iterator[str]:
        """Equal loads take turns."""
        self._turn += 1
        names = sorted(loads)
        first = self._turn % max(1, len(names))
        return iter(sorted([*names[first:], *names[:first]], key=loads.__getitem__))

    def _around(self, key: str) -> Iterator[str]:
        """The replicas in the order of their places from that of the key on."""
        first = bisect.bisect(self._places, (_hash(key), ""))
        seen = set()
        for at in itertools.chain(range(first, len(self._places)), range(first)):
            _, replica = self._places[at]
            if replica not in seen:
                seen.add(replica)
                yield replica
            if len(seen) == len(self.replicas):
                return


def _bound(key: str, loads: Mapping[str, float]) -> float:
    """The load from which on a replica is passed over; in any case there is one below.

    As long as a replica has nothing to do, a beginning in the cache saves less than company costs. Where all have
    something, those that have the mean are passed over (benchmarks/results/2026-11-23-fleet.md). A session is worth
    more: all of its text is in the cache of one replica.
    """
    mean = (sum(loads.values()) + 1) / max(1, len(loads))
    if key.startswith(_SESSION):
        return math.ceil(_SESSION_BOUND * mean)
    return mean if all(loads.values()) else 1.0


def routing_key(headers: Mapping[str, str], body: bytes) -> str | None:
    """What a request has in common with those that share a session or the beginning of a prompt; None where nothing is.

    That is the header x-session-id, or the model and how the prompt begins: of a chat its messages up to the first of
    the user, which later turns repeat.
    """
    session = headers.get("x-session-id")
    if session:
        return f"{_SESSION}{session}"
    try:
        fields = parse_json(body)
    except TextError:
        return None
    if not isinstance(fields, dict):
        return None
    beginning = _beginning(fields)
    return None if not beginning else f"{fields.get('model')} {_text(beginning)}"


def _beginning(fields: Mapping[str, Any]) -> Any:
    prompt = fields.get("prompt", fields.get("input"))
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(part, int) for part in prompt):
        return prompt[:_IDS]
    messages = fields.get("messages", prompt)
    if not isinstance(messages, list):
        return None
    users = (at for at, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "user")
    return messages[: next(users, len(messages)) + 1]


def _text(beginning: Any) -> str:
    text = beginning if isinstance(beginning, str) else json.dumps(beginning, ensure_ascii=False)
    return text[:_CHARACTERS]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def load_of(stats: "EngineStats", max_sequences: int) -> float:
    """How full a replica is: 1 where it runs as much as it can at once, or has prompts to process for `_WAIT` seconds.

    Requests that wait count as those that run. max_sequences: the most texts that it runs at once.
    """
    requests = (stats.running + stats.waiting) / max_sequences
    speed = stats.prompt_tokens_per_second
    prompts = stats.waiting_tokens / speed / _WAIT if speed > 0 else 0.0
    return max(requests, stats.running / max_sequences + prompts)


def wanted_replicas(context: Any) -> tuple[float, dict[str, Any]]:
    """A policy of Ray Serve's: how many replicas what all have would fill. Ray rounds it up and keeps its bounds."""
    return sum(context.aggregated_metrics.get(LOAD, {}).values()), {}
