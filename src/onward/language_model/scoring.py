"""Scores of texts under a model, and its logits."""

import math
from collections import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from onward.cache import AdapterRef
from onward.decoding import CacheManager, DecodeStep, SamplerCache, Sequence, SharedCache, slots_for
from onward.decoding.batch import LogitsNeeded, ScheduledSequence, processed
from onward.decoding.loop import run_to_end
from onward.decoding.prompt import check_context_length
from onward.decoding.step import Emitted
from onward.errors import RequestError
from onward.language_model.tapped import in_groups
from onward.models import Run
from onward.sampling import SamplingParams, TokenLogprobs
from onward.util.checks import check_whole, plain

# The maximum number of continuations that run together.
_MAX_CONTINUATIONS = 32
# The maximum number of texts that run together.
_MAX_ROWS = 8


@dataclass(frozen=True)
class Score:
    """The score of a text. Nothing predicts the first id, so it does not count.

    token_ids: T ids, T of 2 or more.
    logprobs: the logprob of each id given the ids before it, and of the most likely ids at its position if requested;
        None for ids that do not count: the first, and those of a context.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]

    def __repr__(self) -> str:
        numbers = f"perplexity={self.perplexity:.6g}, log_likelihood={self.log_likelihood:.6g}"
        return f"Score({len(self.token_ids)} tokens, {numbers})"

    @property
    def log_likelihood(self) -> float:
        """The sum of the logprobs, in nats."""
        return math.fsum(token.chosen for token in self.logprobs if token is not None)

    @property
    def perplexity(self) -> float:
        """exp(-log_likelihood / the number of ids that count); infinity if an id has probability 0."""
        mean = -self.log_likelihood / sum(token is not None for token in self.logprobs)
        return math.exp(mean) if mean < 700 else math.inf


def score_texts(
    run: Run,
    texts: abc.Sequence[list[int]],
    top: int,
    chunk: int,
    stride: int | None = None,
    adapter: AdapterRef | None = None,
) -> list[Score]:
    """The score of each text, in order; bit for bit the same for a text alone or among others.

    stride: score texts longer than the context in windows of its length, each `stride` ids after the previous one. Each
        window scores the ids that no earlier one contains. Without it such a text raises `ContextOverflowError`.
    """
    run.model.check_head()
    context = run.model.max_seq_len
    if stride is None:
        for ids in texts:
            advice = "give a stride, to score it in windows"
            check_context_length(len(ids), context=context, what="text", advice=advice)
        stride = 1  # unused: all texts have a single window
    else:
        stride = plain(stride)
        check_whole("stride", stride, low=1)
        if context is not None and stride >= context:
            raise RequestError(f"stride must be less than the context, {context} ids; got {stride}")
    ranges = [_windows(len(ids), context, stride) for ids in texts]
    windows = [ids[begin:end] for ids, text_ranges in zip(texts, ranges, strict=True) for begin, end in text_ranges]
    logprobs = iter(_logprobs_of_texts(run, windows, top, chunk, adapter))
    return [Score(ids, _joined(text_ranges, logprobs)) for ids, text_ranges in zip(texts, ranges, strict=True)]


def _logprobs_of_texts(
    run: Run, texts: abc.Sequence[list[int]], top: int, chunk: int, adapter: AdapterRef | None
) -> list[list[TokenLogprobs | None]]:
    """The logprobs of each text's ids, in order. Texts of similar length run together."""
    for ids in texts:
        if len(ids) < 2:
            raise RequestError(
                f"a text to score must have at least 2 ids, since the first one is not predicted; got {ids}"
            )

    def score(batch: list[int]) -> list[list[TokenLogprobs | None]]:
        sequences = [Sequence(texts[index], 0, prompt_top=top, adapter=adapter) for index in batch]
        _score(run, slots_for(run.model, len(batch), len(texts[batch[0]])), sequences, chunk)
        return [each.prompt_logprobs for each in sequences]

    return in_groups([len(ids) for ids in texts], score, _MAX_ROWS)


def score_continuations(
    run: Run,
    prefix_cache: SharedCache,
    context: list[int],
    continuations: abc.Sequence[list[int]],
    top: int,
    chunk: int,
    adapter: AdapterRef | None = None,
) -> list[Score]:
    """The score of each continuation of the context, which is processed once, apart from a cached prefix."""
    run.model.check_head()
    if not all(continuations):
        raise RequestError("a continuation to score must have at least one id; got an empty one")
    for ids in continuations:
        check_context_length(len(context) + len(ids), context=run.model.max_seq_len, what="text")
    scores: list[Score] = []
    for begin in range(0, len(continuations), _MAX_CONTINUATIONS):
        batch = continuations[begin : begin + _MAX_CONTINUATIONS]
        # The context is a sequence that samples an unused token. The others fork from it.
        first = Sequence(context, 1, sampling=SamplingParams(temperature=0.0), adapter=adapter)
        texts = [Sequence([*context, *ids], 0, prompt_top=top, adapter=adapter) for ids in batch]
        for text in texts:
            text.prompt_logprobs = [None] * len(context)  # the ids of the context are not scored
            text.leader = first
        with prefix_cache.lease(run.model, 1 + len(texts), max(text.longest for text in (first, *texts))) as slots:
            _score(run, slots, [first, *texts], chunk)
        scores += [Score([*context, *ids], text.prompt_logprobs) for ids, text in zip(batch, texts, strict=True)]
    return scores


def _windows(length: int, context: int | None, stride: int) -> list[tuple[int, int]]:
    if context is None or length <= context:
        return [(0, length)]
    last = -(-(length - context) // stride)
    return [(number * stride, min(number * stride + context, length)) for number in range(last + 1)]


def _joined(
    places: abc.Sequence[tuple[int, int]], windows: abc.Iterator[list[TokenLogprobs | None]]
) -> list[TokenLogprobs | None]:
    """The logprobs of a text, from those of its windows."""
    logprobs: list[TokenLogprobs | None] = []
    for begin, _ in places:
        logprobs += next(windows)[len(logprobs) - begin :]
    return logprobs


def _score(run: Run, slots: CacheManager, sequences: abc.Sequence[Sequence], chunk: int) -> None:
    """Run sequences to their ends. They collect the logprobs of their prompts."""
    device, vocab_size = run.model.device, run.model.vocab_size
    step = DecodeStep(run, slots, SamplerCache(device), device)
    run_to_end(step, slots, sequences, chunk, vocab_size=vocab_size)


def logits_of(run: Run, ids: list[int], chunk: int, adapter: AdapterRef | None = None) -> Tensor:
    """The logits after each of the ids, processed chunk by chunk: float32 [T, V], on the CPU."""
    run.model.check_head()
    check_context_length(len(ids), context=run.model.max_seq_len)
    slots = slots_for(run.model, 1, len(ids))
    sequence = Sequence(ids, 0, adapter=adapter)
    sequence.reopen()  # no new ids, but the last one is processed too
    parts: list[Tensor] = []

    def step(work: abc.Sequence[ScheduledSequence]) -> Emitted:
        logits, _ = processed(run, slots, work, LogitsNeeded.ALL, run.model.device)
        assert logits is not None, "all logits were asked for"
        parts.append(logits[0].to(device="cpu", dtype=torch.float32))
        return [[]]

    run_to_end(step, slots, [sequence], chunk)
    return torch.cat(parts)
