"""Which replica gets a request, and how many replicas there should be.

Nothing here knows Ray, a clock or a model, so that simulations run the same code.
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
    from onward.engine import EngineStats

# The routers of this process, by deployment. Ray copies the module of a router class into each process, so they cannot
# be stored there. Access them through this module.
ROUTERS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
# The name of the load that a replica reports, and the seconds of waiting prompts that make it full.
LOAD, _FULL_SECONDS = "load", 10.0
# Points of each replica on the ring: with 64, the largest share of keys is about 1.3 times the mean.
_POINTS = 64
# The prefix of sessions' keys. Their replica is skipped only if it has this many times the mean load.
_SESSION, _SESSION_BOUND = "session ", 1.25
# The part of a prompt in its key: several cache blocks, but short enough for long conversations to share it.
_MAX_CHARACTERS, _MAX_IDS = 2048, 512


class HashRing:
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, arXiv 1608.01350). From a key's point
    on, the first replica that is not skipped is the best. So a key keeps its replicas as long as they exist, and only
    the keys of a replica that leaves move."""

    def __init__(self) -> None:
        self.replicas: frozenset[str] = frozenset()
        self._hashes: dict[str, list[int]] = {}
        self._points: list[tuple[int, str]] = []
        self._turn = 0

    def update(self, replicas: Collection[str]) -> None:
        if self.replicas != set(replicas):
            self.replicas = frozenset(replicas)
            known, self._hashes = self._hashes, {}
            for replica in self.replicas:
                self._hashes[replica] = known.get(replica) or [_hash(f"{replica} {at}") for at in range(_POINTS)]
            self._points = sorted((point, replica) for replica, points in self._hashes.items() for point in points)

    def order(
        self, key: str | None, load: Callable[[str], float], avoid: Collection[str] = (), *, affinity: bool = True
    ) -> Iterator[str]:
        """All replicas, the best for a request first. They are computed lazily: the first are cheap. key: from
        `routing_key`; None: prefer the least loaded. load: the number of requests that a replica has now. avoid:
        replicas that failed the request; they come last. affinity: if false, prefer the least loaded for every request.
        """
        loads = {replica: load(replica) for replica in self.replicas}
        if key is None or not affinity:
            order, bound = self._least_loaded_first(loads), math.inf
        else:
            order, bound = self._around(key), _bound(key, loads)
        rest: list[str] = []
        for replica in order:
            if replica in avoid or loads[replica] >= bound:
                rest.append(replica)
            else:
                yield replica
        yield from sorted(rest, key=lambda replica: (replica in avoid, loads[replica] >= bound))

    def _least_loaded_first(self, loads: Mapping[str, float]) -> Iterator[str]:
        """Equal loads take turns."""
        self._turn += 1
        names = sorted(loads)
        first = self._turn % max(1, len(names))
        return iter(sorted([*names[first:], *names[:first]], key=loads.__getitem__))

    def _around(self, key: str) -> Iterator[str]:
        """The replicas in the order of their points, from the key's point on."""
        first = bisect.bisect(self._points, (_hash(key), ""))
        seen = set()
        for at in itertools.chain(range(first, len(self._points)), range(first)):
            _, replica = self._points[at]
            if replica not in seen:
                seen.add(replica)
                yield replica
            if len(seen) == len(self.replicas):
                return


def _bound(key: str, loads: Mapping[str, float]) -> float:
    """The load at which a replica is skipped; at least one replica is below it. While some replica is idle, busy ones
    are skipped: a cached prefix saves less time than sharing a replica costs. Otherwise, replicas with at least the
    mean load are skipped (benchmarks/results/2026-11-23-fleet.md). Sessions tolerate more load, because their whole
    text is cached on one replica."""
    mean = (sum(loads.values()) + 1) / max(1, len(loads))
    if key.startswith(_SESSION):
        return math.ceil(_SESSION_BOUND * mean)
    return mean if all(loads.values()) else 1.0


def routing_key(headers: Mapping[str, str], body: bytes) -> str | None:
    """A key that is equal for requests that share a session or the start of a prompt; None without either. It is the
    header x-session-id, or the model and the start of the prompt: for a chat, its messages up to the first of the user,
    which later turns repeat."""
    session = headers.get("x-session-id")
    if session:
        return f"{_SESSION}{session}"
    try:
        fields = parse_json(body)
    except TextError:
        return None
    if not isinstance(fields, dict):
        return None
    if not (prefix := _prefix(fields)):
        return None
    text = prefix if isinstance(prefix, str) else json.dumps(prefix, ensure_ascii=False)
    return f"{fields.get('model')} {text[:_MAX_CHARACTERS]}"


def _prefix(fields: Mapping[str, Any]) -> Any:
    prompt = fields.get("prompt", fields.get("input"))
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(part, int) for part in prompt):
        return prompt[:_MAX_IDS]
    messages = fields.get("messages", prompt)
    if not isinstance(messages, list):
        return None
    users = (at for at, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "user")
    return messages[: next(users, len(messages)) + 1]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def load_of(stats: "EngineStats", max_sequences: int) -> float:
    """How full a replica is: 1 if it runs as much as it can at once, or has prompts for `_FULL_SECONDS` to process.
    Waiting requests count like running ones. max_sequences: the maximum that it runs at once."""
    requests = (stats.running + stats.waiting) / max_sequences
    speed = stats.prompt_tokens_per_second
    prompts = stats.waiting_tokens / speed / _FULL_SECONDS if speed > 0 else 0.0
    return max(requests, stats.running / max_sequences + prompts)


def desired_replicas(context: Any) -> tuple[float, dict[str, Any]]:
    """A Ray Serve autoscaling policy: how many replicas the total load would fill. Ray rounds it up, within its
    bounds."""
    return sum(context.aggregated_metrics.get(LOAD, {}).values()), {}
