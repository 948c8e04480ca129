"""Tensors in, tensors out: `onward.generate` continues prompts of one length through the one loop."""

from collections import abc
from typing import Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onward.checks import check_whole
from onward.decoding.kept_slots import slots_for
from onward.decoding.loop import AllTogether, decode_loop
from onward.decoding.prompt import check_room
from onward.decoding.sequence import Sequence
from onward.decoding.step import DecodeStep, SamplingChooser
from onward.errors import RequestError
from onward.models import Model, reused_run
from onward.sampling import ConstrainedText, Constraint, Sampler, SamplingParams
from onward.sampling.params import UnseededOptionsDict


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

    Prompts may be a NumPy array; the result is still a tensor.

    The result always has this shape. A row that ends early is filled up with the id that ended it, or with `pad`.
    For prompts of different lengths, or text, there is `LanguageModel.generate`.

    Args:
        model: such as `Model.from_module` makes of a torch module.
        prompt_tokens: ids, the same number in every row and at least one.
        max_new_tokens: how many to add; 0 adds none.
        seed: the seed of every row, or one for each. A row depends on its prompt and its seed alone, not on the batch:
            equal prompts with an equal seed continue equally. None draws a seed for each row.
        pad: the id that fills a row after its end.
        compile: as in `onward.LanguageModel`; later calls with the same model use the same programs.
        constraint: says which ids may follow; every row gets a copy. It stands at the beginning of the new ids.
        options: fields of `SamplingParams`, for every row. `temperature` is 1 by default, the model's own distribution;
            0 is greedy. `eos` names the ids that end a row. Bad words are ids here.

    Raises:
        RequestError: an argument outside its range.
        ContextOverflowError: P + max_new_tokens is more than the model serves.
    """
    if not isinstance(model, Model):
        raise RequestError(f"generate takes an onward.Model; got {type(model).__name__}: see onward.Model.from_module")
    if constraint is not None and not isinstance(constraint, Constraint):
        raise RequestError(f"constraint must be an onward.Constraint; got {constraint!r}")
    prompt_tokens = _as_tensor(prompt_tokens)
    prompts = _checked_prompts(prompt_tokens, model.vocab_size)
    if "stop" in options:
        raise RequestError("stop strings need a text, but onward.generate has only ids: use eos, or LanguageModel")
    common = SamplingParams(temperature=1.0).replace(**options)
    common.check_length(max_new_tokens)
    requests = [common.replace(seed=row_seed) for row_seed in _row_seeds(seed, len(prompts))]
    stop_ids = common.stop_ids
    for name, token in [("pad", pad), *(("eos", token) for token in stop_ids)]:
        if token is not None:
            _check_id(name, token, model.vocab_size)
    check_room(prompt_tokens.shape[1], max_new_tokens, model.max_seq_len)
    sampler = Sampler(requests, model.device)  # it draws the seeds that are not given
    sequences = [
        Sequence(
            prompt,
            max_new_tokens,
            stop_ids,
            sampling=sampler.row(row),
            constraint=None if constraint is None else ConstrainedText(constraint.fork(), stop_ids),
        )
        for row, prompt in enumerate(prompts)
    ]
    slots = slots_for(model, len(prompts), prompt_tokens.shape[1] + max_new_tokens)
    step = DecodeStep(reused_run(model, compile), slots, SamplingChooser(model.device), model.device)
    for _ in decode_loop(step, AllTogether(slots, sequences), slots):
        pass  # the sequences collect their ids
    filled = [_filled(sequence.token_ids, max_new_tokens, pad) for sequence in sequences]
    new = torch.tensor(filled, dtype=torch.int64, device=prompt_tokens.device).reshape(len(prompts), max_new_tokens)
    return torch.cat((prompt_tokens.to(torch.int64), new), 1)


def _filled(tokens: list[int], length: int, pad: int | None) -> list[int]:
    if len(tokens) == length:
        return tokens
    return tokens + [tokens[-1] if pad is None else pad] * (length - len(tokens))


def _row_seeds(seed: int | abc.Sequence[int] | None, rows: int) -> list[int | None]:
    if not isinstance(seed, abc.Sequence):
        return [seed] * rows
    if len(seed) != rows:
        raise RequestError(f"seed must be one number or one for each of the {rows} rows; got {len(seed)}")
    return list(seed)


def _as_tensor(prompt_tokens: object) -> Tensor:
    if isinstance(prompt_tokens, np.ndarray) and prompt_tokens.dtype.kind in "iuf":
        return torch.tensor(prompt_tokens)
    if not isinstance(prompt_tokens, Tensor):
        raise RequestError(f"prompt_tokens must be a tensor of ids [B, P]; got {type(prompt_tokens).__name__}")
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
        raise RequestError(f"{name} names id {token}, but the vocabulary ends at {vocab_size - 1}")
