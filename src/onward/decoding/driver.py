"""Decode with any forward: the loop without a checkpoint, a tokenizer or a `Model`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.cache import length_of
from onward.decoding.loop import decode_loop
from onward.decoding.row import Row
from onward.decoding.state import DecodeState
from onward.decoding.step import DecodeStep
from onward.errors import ContextOverflowError, RequestError
from onward.models import Cache, Forward, Model, Params, reused_run
from onward.sampling import Sampler, greedy
from onward.sampling.draw import GREEDY
from onward.sampling.params import check_whole


def stream(
    forward: Forward,
    *,
    cache: Cache,
    params: Params,
    first_token: int,
    max_new_tokens: int,
    offset: int = 0,
    eos: int | Sequence[int] = (),
    select: Callable[[Tensor], Tensor] | Sampler = greedy,
    on_token: Callable[[int], Any] | None = None,
    max_len: int | None = None,
    compile: str = "auto",
) -> Iterator[int]:
    """Decode one row with a forward of your own (the contract is in `onward.models.model`).

    `first_token` is processed first, at position `offset`, and is not among the ids given out; the id that
    stops is. Everything is checked before the first step, when `stream` is called.

    Args:
        forward: (tokens int32 [1, 1], offsets int32 [1], cache, params) -> (logits [1, 1, V], cache).
        cache: what `forward` takes; it holds the positions before `offset`.
        params: what `forward` takes.
        first_token: the id to start from, usually the last of a prompt.
        max_new_tokens: the most ids to give out; none if 0 or less.
        offset: absolute position of `first_token`.
        eos: an id or ids that stop.
        select: float [1, V] -> int [1]; or an `onward.Sampler`, which is also given the position.
        on_token: called with each id, the stopping one too, before it is given out.
        max_len: positions that the cache holds, where it has no `max_len` of its own.
        compile: "auto" traces the forward and runs it as one native call a token where it can (`onward.compile`;
            later calls with the same forward and params use the same trace), else as it is; a backend of
            `onward.compile` insists on it; "eager" calls the forward each time.

    Raises:
        ContextOverflowError: offset + max_new_tokens is more than the cache holds.
        RequestError: an argument outside its range, or a forward or select of another shape than the contract's.
    """
    check_whole("offset", offset, low=0)
    check_whole("first_token", first_token, low=0)
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool):
        raise RequestError(f"max_new_tokens must be a whole number; got {max_new_tokens!r}")
    stop_ids = frozenset((eos,) if isinstance(eos, int) else eos)
    _check_room(cache, max_len, offset, max_new_tokens)
    device = _device_of(cache, params)
    model = Model(forward, params, _no_cache, vocab_size=0, device=device)
    step = DecodeStep(reused_run(model, compile), positional(select))
    state = DecodeState.start([[first_token]], cache, device, offset)
    return _ids(step, state, Row(max_new_tokens, stop_ids), on_token)


def decode(forward: Forward, **options: Any) -> list[int]:
    """The ids of `stream` as a list; takes the same arguments."""
    return list(stream(forward, **options))


def _ids(step: DecodeStep, state: DecodeState, row: Row, on_token: Callable[[int], Any] | None) -> Iterator[int]:
    for emission in decode_loop(step, state, [row]):
        for _, token, _ in emission.pieces:
            if on_token is not None:
                on_token(token)
            yield token


def _no_cache(batch: int, max_len: int) -> Cache:
    raise AssertionError("the cache was given")


def positional(select: Callable[[Tensor], Tensor] | Sampler) -> Callable[[Tensor, Tensor], Tensor]:
    """A choice by logits alone as one that is given the positions too, as a `Sampler` is.

    Raises:
        RequestError: a `Sampler` whose options look at what came before, which is not known here.
    """
    if isinstance(select, Sampler):
        if select.needs_history:
            raise RequestError(
                "penalties, DRY, n-grams, bad words and min_new_tokens look at the whole text, and here only the next "
                "tokens are known: use onward.generate or LanguageModel.generate, or leave them out"
            )
        return select
    return GREEDY if select is greedy else lambda logits, positions: select(logits)


def _check_room(cache: Cache, max_len: int | None, offset: int, max_new_tokens: int) -> None:
    limits = [limit for limit in (max_len, length_of(cache)) if limit is not None]
    needed = offset + max(max_new_tokens, 0)
    if limits and needed > min(limits):
        raise ContextOverflowError(
            f"offset {offset} + max_new_tokens {max_new_tokens} = {needed} positions, but the cache holds "
            f"{min(limits)}: ask for at most {max(0, min(limits) - offset)} or make a longer cache"
        )


def _device_of(*trees: Any) -> torch.device:
    leaves = (leaf for tree in trees for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
    return next((leaf.device for leaf in leaves), torch.device("cpu"))
