"""Prompt ids from lists, arrays and tensors, and checks against the vocabulary and the context."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onward.decoding.batch import PickingRun
from onward.errors import ContextOverflowError, OptionError, ProgramError
from onward.models import Cache
from onward.program import SamplingKernel
from onward.util.checks import check_id, plain, plain_items

# A list or a tuple, or a one-dimensional array or tensor of integers.
PromptIds = Sequence[int] | NDArray[np.integer] | Tensor

R = TypeVar("R", bound=tuple[Any, ...])


def prompt_ids(name: str, prompt: PromptIds) -> list[int]:
    """The ids of a prompt as a list. name: the argument's name, for the error message.

    Raises:
        RequestError: no ids, more than one dimension, or an element that is not an integer of 0 or more.
    """
    if isinstance(prompt, Tensor | np.ndarray) and prompt.ndim != 1:
        raise OptionError(name, f"must have one dimension, the ids of one row; got {list(prompt.shape)}")
    listed = plain(prompt)
    if isinstance(listed, str | bytes) or not isinstance(listed, Sequence):
        raise OptionError(name, f"must be a list of ids, or one dimension of a tensor or array; got {prompt!r}")
    if not listed:
        raise OptionError(name, "must contain at least one id; got none")
    ids = plain_items(listed)
    for token in ids:
        check_id(name, token)
    return ids


class VocabularyCheck:
    """A run that checks a prompt's ids against the vocabulary, whose size is known from the first logits.

    An id outside the vocabulary usually makes the forward itself fail, as an index of the embedding. Then the forward
    is called again with ids of 0, for the size of its logits.

    name: the argument's name, for the error message.
    """

    def __init__(self, run: PickingRun, name: str, ids: Sequence[int]) -> None:
        self._run, self._name, self._largest = run, name, max(ids)
        self._checked = False

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Cache, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        if self._checked:
            return self._run(tokens, offsets, cache, logits_at)
        return self._first(self._run, tokens, offsets, cache, logits_at)

    def picked(
        self, tokens: Tensor, offsets: Tensor, cache: Cache, pick: SamplingKernel, positions: Tensor
    ) -> tuple[Tensor, Tensor | None, Cache]:
        if self._checked:
            return self._run.picked(tokens, offsets, cache, pick, positions)
        return self._first(self._run.picked, tokens, offsets, cache, pick, positions)

    def _first(self, run: Callable[..., R], tokens: Tensor, offsets: Tensor, cache: Cache, *options: object) -> R:
        try:
            output = run(tokens, offsets, cache, *options)
        except (IndexError, RuntimeError, ProgramError):
            logits = None
            with contextlib.suppress(Exception):  # the ids were not the cause: the first error is raised
                # This writes at and past the offsets, where nothing is read before it is written again.
                logits, _ = self._run(torch.zeros_like(tokens), offsets, cache)
            if logits is not None:
                self._check(logits)
            raise
        self._check(output[0])
        return output

    def _check(self, logits: Tensor) -> None:
        self._checked = True
        if self._largest >= logits.shape[-1]:
            problem = f"names id {self._largest}, but the vocabulary ends at {logits.shape[-1] - 1}"
            raise OptionError(self._name, problem) from None


def check_room(prompt: int, new: int, context: int | None, cache_len: int | None = None) -> None:
    """Raise `ContextOverflowError` unless a prompt and `new` tokens fit the context and the cache."""
    limits = [limit for limit in (context, cache_len) if limit is not None]
    if not limits or prompt + new <= min(limits):
        return
    limit = min(limits)
    holder = "context" if limit == context else "cache"
    if prompt > limit or new == 0:
        raise ContextOverflowError(
            f"the prompt is {prompt} tokens long, but the {holder} holds {limit}: shorten the prompt", option="prompt"
        )
    raise ContextOverflowError(
        f"prompt ({prompt} tokens) + max_new_tokens ({new}) = {prompt + new}, but the {holder} holds {limit}: "
        f"ask for at most {limit - prompt} new tokens or shorten the prompt",
        option="prompt",
    )
