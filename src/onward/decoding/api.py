"""`onward.generate`, `onward.decode` and `onward.stream`: decoding with any forward, without a checkpoint."""

import contextlib
import dataclasses
from collections import abc
from collections.abc import Callable, Iterator
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.cache import length_of
from onward.decoding.loop import BatchSchedule, decode_loop, run_to_end
from onward.decoding.prompt import PromptIds, check_context_length, prompt_ids
from onward.decoding.row_cache import RowCacheManager
from onward.decoding.sequence import Sequence
from onward.decoding.shared_cache import slots_for
from onward.decoding.step import DecodeStep, FunctionSampler, SamplerCache, TokenSampler
from onward.errors import OptionError, ProgramError, RequestError
from onward.models import Cache, Forward, Model, Params, Run, padded_length, reused_run
from onward.program import ForwardBatch, SamplingKernel, StepResult
from onward.sampling import Constraint, ConstraintState, Sampler, SamplingParams, greedy
from onward.sampling.draw import GREEDY
from onward.sampling.options_dict import UnseededOptionsDict
from onward.util.checks import as_tuple, check_whole, plain
from onward.util.option_names import checks_option_names


def generate(
    model: Model,
    prompt_tokens: Tensor | NDArray[np.integer],
    max_new_tokens: int,
    *,
    seed: int | abc.Sequence[int] | None = None,
    pad: int | None = None,
    compile: str = "auto",
    constraint: Constraint | None = None,
    **options: Unpack[UnseededOptionsDict],
) -> Tensor:
    """Continue prompts of one length: int [B, P] -> int64 [B, P + max_new_tokens], on the prompts' device.

    The result always has this shape: a row that ends early is filled with the id that ended it, or with `pad`.
    For text, or prompts of different lengths, use `LanguageModel.generate`.

    Args:
        model: for example from `Model.from_module`.
        prompt_tokens: a tensor or NumPy array of ids, at least one per row.
        max_new_tokens: the number of ids to add; 0 adds none.
        seed: one seed for all rows, or one per row. A row depends only on its prompt and seed, not on the batch. None
            draws a seed for each row.
        pad: the id that fills a row after its end.
        compile: as in `onward.LanguageModel`; later calls with the same model use the same programs.
        constraint: restricts the new ids; every row gets a copy.
        options: fields of `SamplingParams`, for every row. `temperature` is 1 by default, the model's own distribution;
            0 is greedy. `eos` is the ids that end a row. Bad words are ids here.

    Raises:
        RequestError: an argument outside its range.
        ContextOverflowError: P + max_new_tokens exceeds the model's context.
    """
    if not isinstance(model, Model):
        raise RequestError(f"generate takes an onward.Model; got {type(model).__name__}: see onward.Model.from_module")
    if constraint is not None and not isinstance(constraint, Constraint):
        raise OptionError("constraint", f"must be an onward.Constraint; got {constraint!r}")
    prompt_tokens = _as_tensor(prompt_tokens)
    prompts = _checked_prompts(prompt_tokens, model.vocab_size)
    if "stop" in options:
        message = "stop strings need a text, but onward.generate has only ids: use eos, or LanguageModel"
        raise RequestError(message, "stop")
    common = SamplingParams(temperature=1.0).replace(**options)
    common.check_length(max_new_tokens)
    stop_ids = common.stop_ids
    common.check_ids(model.vocab_size)
    if pad is not None:
        _check_id("pad", pad, model.vocab_size)
    check_context_length(prompt_tokens.shape[1], max_new_tokens, context=model.max_seq_len)
    requests = [common.replace(seed=row_seed) for row_seed in _row_seeds(seed, len(prompts))]
    sampler = Sampler(requests, model.device)  # it draws missing seeds
    sequences = [
        Sequence(
            prompt,
            max_new_tokens,
            stop_ids,
            sampling=sampler.row(row),
            constraint=None if constraint is None else ConstraintState(constraint.fork(), stop_ids),
        )
        for row, prompt in enumerate(prompts)
    ]
    slots = slots_for(model, len(prompts), prompt_tokens.shape[1] + max_new_tokens)
    step = DecodeStep(reused_run(model, compile), slots, SamplerCache(model.device), model.device)
    run_to_end(step, slots, sequences)
    outputs = [sequence.token_ids for sequence in sequences]
    if pad is None and max_new_tokens and not all(outputs):
        raise RequestError(f"row {outputs.index([])} ended before its first token, so no id can fill it: give pad")
    padded = [ids + (ids[-1:] if pad is None else [pad]) * (max_new_tokens - len(ids)) for ids in outputs]
    new = torch.tensor(padded, dtype=torch.int64, device=prompt_tokens.device).reshape(len(prompts), max_new_tokens)
    return torch.cat((prompt_tokens.to(torch.int64), new), 1)


def _row_seeds(seed: int | abc.Sequence[int] | None, rows: int) -> list[int | None]:
    if not isinstance(seed, abc.Sequence):
        return [seed] * rows
    if len(seed) != rows:
        raise OptionError("seed", f"must be one number or one for each of the {rows} rows; got {len(seed)}")
    return list(seed)


def _as_tensor(prompt_tokens: object) -> Tensor:
    if isinstance(prompt_tokens, np.ndarray) and prompt_tokens.dtype.kind in "iuf":
        return torch.tensor(prompt_tokens)
    if not isinstance(prompt_tokens, Tensor):
        raise OptionError("prompt_tokens", f"must be a tensor of ids [B, P]; got {type(prompt_tokens).__name__}")
    return prompt_tokens


def _checked_prompts(prompt_tokens: Tensor, vocab_size: int) -> list[list[int]]:
    whole = not (prompt_tokens.is_floating_point() or prompt_tokens.is_complex() or prompt_tokens.dtype == torch.bool)
    if prompt_tokens.dim() != 2 or not whole or not prompt_tokens.numel():
        raise RequestError(
            f"prompt_tokens must be whole numbers [B, P], B and P of 1 or more; got {prompt_tokens.dtype} "
            f"{list(prompt_tokens.shape)}"
        )
    prompts: list[list[int]] = prompt_tokens.tolist()
    for token in (min(map(min, prompts)), max(map(max, prompts))):
        _check_id("prompt_tokens", token, vocab_size)
    return prompts


def _check_id(name: str, token: int, vocab_size: int) -> None:
    check_whole(name, token, low=0)
    if token >= vocab_size:
        raise OptionError(name, f"names id {token}, but the vocabulary ends at {vocab_size - 1}")


class _ModelsOwn:
    """The default of arguments that a `Model` has and a bare forward lacks."""

    def __repr__(self) -> str:
        return "the model's own"


_OWN: Any = _ModelsOwn()


@checks_option_names
def stream(
    forward: Forward | Model,
    *,
    max_new_tokens: int,
    prompt: PromptIds | None = None,
    first_token: int | None = None,
    cache: Cache = _OWN,
    params: Params = _OWN,
    offset: int = 0,
    eos: int | abc.Sequence[int] = (),
    select: Callable[[Tensor], Tensor] | Sampler = greedy,
    on_token: Callable[[int], Any] | None = None,
    max_len: int | None = None,
    prefill_chunk: int = 512,
    compile: str = "auto",
) -> Iterator[int]:
    """Decode one row with your own forward (the contract is in `onward.models.model`) or a `Model`.

    Yields the new ids, including the stop id. Arguments are checked when `stream` is called, as far as possible before
    the first step.

    Args:
        forward: (tokens int32 [1, T], offsets int32 [1], cache, params) -> (logits [1, T, V], cache); or a `Model`,
            which brings its own cache and params.
        max_new_tokens: the most ids to generate; with 0 or less, nothing is processed.
        prompt: the ids to start from: a list, or one dimension of a tensor or an array.
        first_token: instead of `prompt`, the last id of a prompt whose other ids are in the cache.
        cache, params: the forward's; the cache holds the positions before `offset`.
        offset: absolute position of the first id to process.
        eos: an id or ids that stop.
        select: float [1, V] -> int [1]; or an `onward.Sampler`, which also gets the position.
        on_token: called with each id, including the stop id, before it is yielded.
        max_len: the number of positions of a cache that has no `max_len` attribute.
        prefill_chunk: the most prompt ids processed at once. It changes no token.
        compile: "auto" traces the forward and runs it as one native call per token if possible, otherwise eagerly
            (`onward.compile`; later calls with the same forward and params use the same trace). A backend of
            `onward.compile` raises if it cannot run the forward. "eager" calls the forward for each token.

    Raises:
        ContextOverflowError: the prompt and the new tokens exceed the cache or the model's context.
        RequestError: an argument outside its range, an id outside the vocabulary, or a result of `forward` or `select`
            of the wrong shape.
    """
    offset, first_token, max_new_tokens = plain(offset), plain(first_token), plain(max_new_tokens)
    check_whole("offset", offset, low=0)
    check_whole("prefill_chunk", prefill_chunk, low=1)
    name, ids = _named_ids(prompt, first_token)
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool):
        raise OptionError("max_new_tokens", f"must be a whole number; got {max_new_tokens!r}")
    model = _model(forward, cache, params, name, ids)
    stop_ids = frozenset(as_tuple("eos", plain(eos), int))
    # The last new token is not processed.
    before, new = offset + len(ids) - 1, max(max_new_tokens, 0)
    limits = [limit for limit in (max_len, length_of(cache)) if limit is not None]
    check_context_length(
        before,
        new,
        context=model.max_seq_len,
        cache=min(limits, default=None),
        what="text before the last id",
        advice="shorten it",
    )
    if cache is _OWN:
        if offset:
            raise OptionError("offset", f"{offset} needs a cache with {offset} computed positions: pass that cache")
        cache = model.new_cache(1, padded_length(max(before + new, 1), model))
    run = reused_run(model, compile)
    slots = RowCacheManager.wrap(model, cache, 1, [offset])
    chooser, sampling = chooser_of(select, 1, model.device)
    sequence = Sequence(ids, max_new_tokens, stop_ids, start=offset, sampling=sampling[0])
    first = run if isinstance(forward, Model) else _VocabularyCheck(run, name, max(ids))
    step = DecodeStep(first, slots, chooser, model.device)
    return _ids(step, run, slots, sequence, prefill_chunk, on_token)


@checks_option_names
def decode(
    forward: Forward | Model,
    *,
    max_new_tokens: int,
    prompt: PromptIds | None = None,
    first_token: int | None = None,
    cache: Cache = _OWN,
    params: Params = _OWN,
    offset: int = 0,
    eos: int | abc.Sequence[int] = (),
    select: Callable[[Tensor], Tensor] | Sampler = greedy,
    on_token: Callable[[int], Any] | None = None,
    max_len: int | None = None,
    prefill_chunk: int = 512,
    compile: str = "auto",
) -> list[int]:
    """The ids of `stream` as a list; takes the same arguments and raises the same errors."""
    return list(stream(**locals()))


def _named_ids(prompt: PromptIds | None, first_token: int | None) -> tuple[str, list[int]]:
    if (prompt is None) == (first_token is None):
        count = "neither" if prompt is None else "both"
        raise RequestError(f"pass either prompt= (the ids to process) or first_token= (one id); got {count}")
    if first_token is None:
        assert prompt is not None
        return "prompt", prompt_ids(prompt)
    check_whole("first_token", first_token, low=0)
    return "first_token", [first_token]


def _model(forward: Forward | Model, cache: Cache, params: Params, name: str, ids: abc.Sequence[int]) -> Model:
    """The forward as a Model. The vocabulary of a bare forward is unknown before its first logits: its size is 0."""
    if isinstance(forward, Model):
        _check_id(name, max(ids), forward.vocab_size)
        return forward if params is _OWN or params is None else dataclasses.replace(forward, params=params)
    if not callable(forward):
        raise RequestError(
            f"decoding takes a forward (tokens, offsets, cache, params) or an onward.Model; got "
            f"{type(forward).__name__} (the Model of a LanguageModel is its `model`)"
        )
    for argument, value in (("cache", cache), ("params", params)):
        if value is _OWN:
            raise RequestError(f"a forward needs {argument}=, which may be None; only an onward.Model provides it")
    return Model(forward, params, _no_cache, vocab_size=0, device=_device_of(cache, params))


class _VocabularyCheck:
    """Runs the first step of a bare forward, whose logits show the size of the vocabulary: checks the prompt's ids.

    An id outside the vocabulary usually makes the forward itself fail, as an index of the embedding. Then the forward
    is called again with ids of 0, for the size of its logits.

    name: the argument's name, for the error message. largest: of the ids.
    """

    def __init__(self, run: Run, name: str, largest: int) -> None:
        self._run, self._name, self._largest = run, name, largest

    def step(self, batch: ForwardBatch, sampler: SamplingKernel | None = None) -> StepResult:
        try:
            result = self._run.step(batch, sampler)
        except (IndexError, RuntimeError, ProgramError):
            logits = None
            with contextlib.suppress(Exception):  # the ids were not the cause: the first error is raised
                # This writes at and past the offsets, where nothing is read before it is written again.
                logits = self._run.step(batch._replace(tokens=torch.zeros_like(batch.tokens), logits_at=None)).logits
            if logits is not None:
                self._check(logits)
            raise
        self._check(result.logits)
        return result

    def _check(self, logits: Tensor) -> None:
        if self._largest >= logits.shape[-1]:
            problem = f"names id {self._largest}, but the vocabulary ends at {logits.shape[-1] - 1}"
            raise OptionError(self._name, problem) from None


def _ids(
    step: DecodeStep,
    run: Run,
    slots: RowCacheManager,
    sequence: Sequence,
    prefill_chunk: int,
    on_token: Callable[[int], Any] | None,
) -> Iterator[int]:
    schedule = BatchSchedule(slots, [sequence], prefill_chunk)
    for _ in decode_loop(step, schedule, slots):
        step.run = run  # after the first step
        for _, token, _, _ in sequence.deliver():
            if on_token is not None:
                on_token(token)
            yield token


def _no_cache(batch: int, max_len: int) -> Cache:
    raise AssertionError("a bare forward is called with the caller's cache")


def chooser_of(
    select: Callable[[Tensor], Tensor] | Sampler, rows: int, device: torch.device, *, whole_text: bool = False
) -> tuple[TokenSampler, list[SamplingParams | None]]:
    """The token sampler for a function of the logits or a `Sampler`, and each row's sampling parameters, if any.

    whole_text: whether the sequences begin with the whole prompt, which some options of a `Sampler` need.
    """
    if not isinstance(select, Sampler):
        function = GREEDY if select is greedy else lambda logits, positions: select(logits)
        return FunctionSampler(function), [None] * rows
    if select.needs_history and not whole_text:
        raise RequestError(
            "penalties, DRY, n-grams, bad words and min_new_tokens read the whole text, but here only the next "
            "tokens are known: use onward.generate or LanguageModel.generate, or leave them out"
        )
    if len(select.seeds) != rows:
        raise RequestError(
            f"the sampler has {len(select.seeds)} rows, but {rows} are needed: create one with {rows} rows"
        )
    return SamplerCache(device), [select.row(row) for row in range(rows)]


def _device_of(*trees: Any) -> torch.device:
    leaves = (leaf for tree in trees for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
    return next((leaf.device for leaf in leaves), torch.device("cpu"))
