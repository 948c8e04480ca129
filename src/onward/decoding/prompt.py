"""Prompts of ids in any of the types that people have them in; ids checked against a vocabulary known from logits."""

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onward.decoding.batch import PickingRun
from onward.errors import ContextOverflowError, ProgramError, RequestError
from onward.models import Cache
from onward.program import SamplingKernel
from onward.util.checks import check_whole, plain, plain_items

# A list or a tuple, or one dimension of an array or a tensor of whole numbers.
PromptIds = Sequence[int] | NDArray[np.integer] | Tensor


def prompt_ids(name: str, prompt: PromptIds) -> list[int]:
    """The ids of a prompt as a list. `name` is the argument that the message names.

    Raises:
        RequestError: no ids, more than one dimension, or what is no whole number of 0 or more.
    """
    if isinstance(prompt, Tensor | np.ndarray) and prompt.ndim != 1:
        raise RequestError(f"{name} must have one dimension, the ids of one row; got {list(prompt.shape)}")
    listed = plain(prompt)
    if isinstance(listed, str | bytes) or not isinstance(listed, Sequence):
        raise RequestError(f"{name} must be a list of ids, or one dimension of a tensor or array; got {prompt!r}")
    if not listed:
        raise RequestError(f"{name} must hold one id at least; got none")
    ids = plain_items(listed)
    for token in ids:
        check_whole(f"{name}: an id", token, low=0)
    return ids


class VocabularyCheck:
    """A run that checks a prompt's ids against the vocabulary. Its size is known from the logits of the first call.

    An id outside the vocabulary most often makes the forward itself fail, as the index of an embedding. Then the
    forward is called once more with ids of 0, and its logits tell the size.

    name: the argument that the message names.
    """

    def __init__(self, run: PickingRun, name: str, ids: Sequence[int]) -> None:
        self._run, self._name, self._largest = run, name, max(ids)
        self._checked = False

    def __call__(
        self, tokens: Tensor, offsets: Tensor, cache: Cache, logits_at: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        if self._checked:
            return self._run(tokens, offsets, cache, logits_at)
        try:
            logits, cache = self._run(tokens, offsets, cache, logits_at)
        except (IndexError, RuntimeError, ProgramError):
            self._check_with_zeros(tokens, offsets, cache)
            raise
        self._check(logits)
        return logits, cache

    def picked(
        self, tokens: Tensor, offsets: Tensor, cache: Cache, pick: SamplingKernel, positions: Tensor
    ) -> tuple[Tensor, Tensor | None, Cache]:
        if self._checked:
            return self._run.picked(tokens, offsets, cache, pick, positions)
        try:
            logits, ids, cache = self._run.picked(tokens, offsets, cache, pick, positions)
        except (IndexError, RuntimeError, ProgramError):
            self._check_with_zeros(tokens, offsets, cache)
            raise
        self._check(logits)
        return logits, ids, cache

    def _check_with_zeros(self, tokens: Tensor, offsets: Tensor, cache: Cache) -> None:
        """Call the forward with ids of 0 for the size of its logits.

        This writes into the cache at and past the offsets, where nothing is read before it is written again.
        """
        logits = None
        with contextlib.suppress(Exception):  # the ids were not the cause: the caller raises the first error
            logits, _ = self._run(torch.zeros_like(tokens), offsets, cache)
        if logits is not None:
            self._check(logits)

    def _check(self, logits: Tensor) -> None:
        self._checked = True
        if self._largest >= logits.shape[-1]:
            raise RequestError(
                f"{self._name} names id {self._largest}, but the vocabulary ends at {logits.shape[-1] - 1}"
            ) from None


def check_room(prompt: int, new: int, context: int | None, cache_len: int | None = None) -> None:
    """Raise `ContextOverflowError` unless a prompt and `new` tokens fit the context and the cache."""
    limits = [limit for limit in (context, cache_len) if limit is not None]
    if not limits or prompt + new <= min(limits):
        return
    limit = min(limits)
    holder = "context" if limit == context else "cache"
    if prompt > limit or new == 0:
        raise ContextOverflowError(
            f"the prompt is {prompt} tokens long, but the {holder} holds {limit}: shorten the prompt"
        )
    raise ContextOverflowError(
        f"prompt ({prompt} tokens) + max_new_tokens ({new}) = {prompt + new}, but the {holder} holds {limit}: "
        f"ask for at most {limit - prompt} new tokens or shorten the prompt"
    )
