"""Prefix reuse: a cache of one row that remembers the ids whose keys and values it holds.

Entries at or past a row's offset are never read. So an edited text keeps its ids up to the edit, and only the ids after
it are processed again. Nothing is cleared: a lower number of ids takes the others back.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from onward.cache.positions import copy_positions, position_dims
from onward.checks import check_whole
from onward.decoding.loop import Emission
from onward.errors import RequestError
from onward.models import Cache, Model, padded_length
from onward.models.weights_version import WeightsVersion


class HeldCache(NamedTuple):
    """A cache of one row and how many positions it has room for."""

    cache: Cache
    capacity: int


class PrefixCache:
    """The cache of one text, from request to request.

    A prompt is compared with the ids that the cache holds, and their common prefix is not processed again. Another
    model or changed weights make it forget all ids.
    """

    def __init__(self) -> None:
        self._held: HeldCache | None = None
        self._tokens: list[int] = []
        self._weights: WeightsVersion | None = None
        self._turns = 0

    @property
    def tokens(self) -> list[int]:
        """The ids whose keys and values the cache holds, in order of position."""
        return list(self._tokens)

    @property
    def held(self) -> HeldCache | None:
        """The cache itself; None before there is one."""
        return self._held

    def is_of(self, model: Model) -> bool:
        """Whether this model filled the cache, with the weights that it has now."""
        return self._weights is not None and self._weights == WeightsVersion(model)

    def adopt(self, model: Model, held: HeldCache, tokens: Sequence[int]) -> None:
        """Go on with a cache of `model` that holds `tokens`."""
        self._turns += 1
        self._tokens = []
        self._held, self._weights = held, WeightsVersion(model)
        self._tokens = list(tokens)

    def truncate(self, length: int) -> None:
        """Forget the ids from position `length` on; nothing is moved or cleared.

        Raises:
            RequestError: a length below 0 or above what is held.
        """
        check_whole("length", length, low=0)
        if length > len(self._tokens):
            raise RequestError(f"{len(self._tokens)} ids are held; to forget those from {length} on there must be more")
        self._turns += 1
        del self._tokens[length:]

    def begin(self, model: Model, prompt: Sequence[int], length: int) -> "PrefixTurn":
        """Prepare for a prompt (of one id at least) in a text of at most `length` positions.

        The ids past the common prefix are forgotten: the request's own keys and values will take their place.
        """
        weights = WeightsVersion(model)
        # The last id is always processed, for the model predicts the next one from it.
        kept = min(common_prefix(self._tokens, prompt), len(prompt) - 1) if weights == self._weights else 0
        held, kept = self._with_room(model, length, kept)
        self._turns += 1
        # The ids are dropped before the cache is replaced: an interrupt must not leave more ids than the cache holds.
        del self._tokens[kept:]
        self._held, self._weights = held, weights
        return PrefixTurn(self, held.cache, kept, prompt, self._turns)

    def _with_room(self, model: Model, length: int, kept: int) -> tuple[HeldCache, int]:
        """A cache of `length` positions or more, and how many of the first `kept` ids it holds."""
        held = self._held if self._weights is not None and self._weights.is_of(model) else None
        if held is not None and held.capacity >= length:
            return held, kept
        capacity = padded_length(length, model)
        if held is None:
            return HeldCache(model.new_cache(1, capacity), capacity), 0
        # The capacity at least doubles. So a text that grows is copied less than twice altogether.
        doubled = 2 * held.capacity if model.max_seq_len is None else min(2 * held.capacity, model.max_seq_len)
        capacity = max(capacity, doubled)
        cache = model.new_cache(1, capacity)
        dims = position_dims(held.cache, held.capacity, cache, capacity)
        if dims is None:  # the cache does not show which dimension its positions are in, so it is filled anew
            return HeldCache(cache, capacity), 0
        copy_positions(held.cache, cache, dims, kept)
        return HeldCache(cache, capacity), kept


class PrefixTurn:
    """One request over a `PrefixCache`.

    cache: the cache to decode in. kept: how many ids of the prompt it holds.
    """

    def __init__(self, prefix: PrefixCache, cache: Cache, kept: int, prompt: Sequence[int], number: int) -> None:
        self.cache = cache
        self.kept = kept
        self._prefix = prefix
        self._text = list(prompt)
        self._number = number

    def follow(self, emissions: Iterator[Emission]) -> Iterator[Emission]:
        """Hand on the emissions of the loop, and note each one first, for the caller may leave the loop after any.

        Raises:
            RequestError: another request has begun since, in the same cache.
        """
        for emission in emissions:
            self._note(emission)
            yield emission
            if self._prefix._turns != self._number:
                raise RequestError(
                    "this stream cannot go on: its session has begun another request since, or was truncated; a "
                    "session decodes one text at a time"
                )

    def _note(self, emission: Emission) -> None:
        state, prefix = emission.state, self._prefix
        self._text.extend(token for _, token, _ in emission.pieces)
        held = prefix._held
        assert held is not None, "begin made one"
        if state.cache is not held.cache:
            prefix._held = held._replace(cache=state.cache)
        # After a step the cache holds the ids before the pending ones. Where the text ended within a draft, the row may
        # have taken fewer ids than that; the slice then ends with the text.
        prefix._tokens.extend(self._text[len(prefix._tokens) : state.offsets[0]])


def common_prefix(ids: Sequence[int], others: Sequence[int]) -> int:
    """The length of the longest common prefix of two texts."""
    length = min(len(ids), len(others))
    # Most often one text continues the other, and comparing whole lists is fast.
    if list(ids[:length]) == list(others[:length]):
        return length
    return next(index for index in range(length) if ids[index] != others[index])
