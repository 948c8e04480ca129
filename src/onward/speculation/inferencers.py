"""Speculation with any two `Inferencer`s: one drafts, the other verifies.

An inferencer's `prefill` processes ids and gives the logits after each, and its cache can be truncated. The contract of
a `Model` asks for no more. So each inferencer becomes a `Model`, and the step, the verifiers and the drafters are those
of every other text.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from onward.checks import check_whole
from onward.decoding import DecodeState, FilledCache, Inferencer, Picker, Row, decode_loop
from onward.decoding.driver import positional
from onward.decoding.inferencer import SampleStrategy
from onward.errors import RequestError
from onward.models import Model
from onward.sampling import History, Sampler, greedy
from onward.speculation.counts import Speculation
from onward.speculation.model_drafter import ModelDrafter
from onward.speculation.speculator import Speculator


class SpeculateOutput(NamedTuple):
    """token_ids: int64 [B, N], where N is the length of the longest row; a row that ended before repeats its last id.
    speculation: what drafting brought each row.
    """

    token_ids: Tensor
    speculation: list[Speculation]


def speculate(
    target: Inferencer,
    drafter: Inferencer,
    query_token_ids: Tensor,
    max_new_tokens: int,
    sample_strategy: SampleStrategy = greedy,
    *,
    eos: int | Sequence[int] = (),
    length: int | None = None,
    verifier: Literal["coupled", "rejection"] = "coupled",
) -> SpeculateOutput:
    """Continue prompts: `drafter` guesses ids, and `target` decides which follow.

    Only `prefill` of each is called, over a cache that its own `new_cache` made.

    Args:
        query_token_ids: the prompts, int [B, T].
        max_new_tokens: the most ids to give out, 1 or more.
        sample_strategy: as in `Inferencer`. A `Sampler` draws with the same noise for both.
        eos: an id or ids that end a row.
        length, verifier: as in `Speculator`.

    Raises:
        RequestError: an argument outside its range.
        DraftError: the drafter failed.
    """
    check_whole("max_new_tokens", max_new_tokens, low=1)
    query = query_token_ids
    if query.dim() != 2 or query.is_floating_point() or query.dtype == torch.bool or not query.numel():
        raise RequestError(
            f"speculate takes prompts as whole numbers [B, T], T of 1 or more; got {query.dtype} {list(query.shape)}"
        )
    prompts: list[list[int]] = query.tolist()
    stop_ids = frozenset((eos,) if isinstance(eos, int) else eos)
    rows = [Row(max_new_tokens, stop_ids) for _ in prompts]
    max_len = query.shape[1] + max_new_tokens
    model = _as_model(target, query)
    step = Speculator(ModelDrafter(_as_model(drafter, query)), length=length, verifier=verifier).step(
        model,
        _picker(sample_strategy, prompts),
        prompts,
        rows,
        max_len=max_len,
        vocab_size=model.vocab_size,
        device=query.device,
    )
    state = DecodeState.start(prompts, model.new_cache(len(prompts), max_len), query.device)
    for _ in decode_loop(step, state, rows):
        pass  # the rows collect their ids
    longest = max(len(row.token_ids) for row in rows)
    ids = [row.token_ids + row.token_ids[-1:] * (longest - len(row.token_ids)) for row in rows]
    return SpeculateOutput(
        torch.tensor(ids, device=query.device), [step.speculation(owner) for owner in range(len(rows))]
    )


def _as_model(inferencer: Inferencer, query: Tensor) -> Model:
    """A `Model` whose forward is the inferencer's prefill, over the inferencer's own kind of cache."""

    def forward(tokens: Tensor, offsets: Tensor, cache: FilledCache, params: Any) -> tuple[Tensor, FilledCache]:
        cache.truncate(offsets)
        return inferencer.prefill(tokens, cache, greedy).token_logits, cache

    # The protocol does not give the size of the vocabulary, but the logits after one id do.
    first = inferencer.prefill(query[:1, :1], inferencer.new_cache(1, 1), greedy).token_logits
    return Model(
        forward=forward,
        params=(),
        new_cache=inferencer.new_cache,
        vocab_size=first.shape[-1],
        device=query.device,
        compiles=False,
    )


def _picker(strategy: SampleStrategy, prompts: Sequence[Sequence[int]]) -> Picker:
    if not isinstance(strategy, Sampler):
        return Picker(positional(strategy))
    return Picker(strategy, [History(prompt) for prompt in prompts] if strategy.needs_history else None)
