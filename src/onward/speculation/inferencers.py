"""Speculation with any two `Inferencer`s: one drafts, the other verifies.

An inferencer's `prefill` processes ids and gives the logits after each, and its cache can be truncated. The contract of
a `Model` asks for no more. So each inferencer becomes a `Model`, and the step and the drafters are those of every other
text.
"""

from collections import abc
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onward.checks import check_whole
from onward.decoding import (
    AllTogether,
    DecodeStep,
    DenseSlots,
    FilledCache,
    Inferencer,
    Select,
    Sequence,
    decode_loop,
)
from onward.decoding.driver import chooser_of
from onward.decoding.inferencer import SampleStrategy
from onward.errors import RequestError
from onward.models import Model
from onward.sampling import Sampler, greedy
from onward.speculation.drafter import Speculation
from onward.speculation.model_drafter import ModelDrafter
from onward.speculation.speculator import Speculator
from onward.speculation.step import drafted_text


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
    eos: int | abc.Sequence[int] = (),
    length: int | None = None,
) -> SpeculateOutput:
    """Continue prompts: `drafter` guesses ids, and `target` decides which follow.

    Only `prefill` of each is called, over a cache that its own `new_cache` made.

    Args:
        query_token_ids: the prompts, int [B, T].
        max_new_tokens: the most ids to give out, 1 or more.
        sample_strategy: as in `Inferencer`. A `Sampler` draws with the same noise for both.
        eos: an id or ids that end a row.
        length: as in `Speculator`.

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
    max_len = query.shape[1] + max_new_tokens
    model = _as_model(target, query)
    device, rows = query.device, len(prompts)
    chooser, sampling = chooser_of(sample_strategy, rows, device, whole_text=True)
    sequences = [
        Sequence(prompt, max_new_tokens, stop_ids, sampling=of_row)
        for prompt, of_row in zip(prompts, sampling, strict=True)
    ]
    slots = DenseSlots(model.new_cache(rows, max_len), rows, max_len, None)
    speculator = Speculator(ModelDrafter(_as_model(drafter, query)), length=length)
    step = speculator.step(DecodeStep(model, slots, chooser, device), model, slots, chooser, device)
    speculator.join(sequences, model.vocab_size, device, None if sampling[0] else _select(sample_strategy), max_len)
    for _ in decode_loop(step, AllTogether(slots, sequences), slots):
        pass  # the sequences collect their ids
    longest = max(len(sequence.token_ids) for sequence in sequences)
    ids = [each.token_ids + each.token_ids[-1:] * (longest - len(each.token_ids)) for each in sequences]
    return SpeculateOutput(
        torch.tensor(ids, device=device), [drafted_text(sequence).counts(sequence) for sequence in sequences]
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


def _select(strategy: SampleStrategy) -> Select:
    assert not isinstance(strategy, Sampler), "a sampler is each sequence's own"
    return lambda logits, positions: strategy(logits)
