"""Prompts of ids as people have them, and ids held against a vocabulary that only logits tell."""

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onward.decoding.step import PickingRun
from onward.errors import ProgramError, RequestError
from onward.models import Cache
from onward.program import Pick
from onward.sampling.params import check_whole, plain

# A list or a tuple, or one dimension of an array or a tensor of whole numbers.
PromptIds = Sequence[int] | NDArray[np.integer] | Tensor


def prompt_ids(name: str, prompt: PromptIds) -> list[int]:
    """The ids of a prompt as a list; `name` is for the message.

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
    ids = [plain(token) for token in listed]
    for token in ids:
        check_whole(f"{name}: an id", token, low=0)
    return ids


class VocabularyCheck:
    """A run that holds a prompt's ids against the vocabulary at its first call, whose logits tell it.

    An id outside most often fails within the forward, as an index of an embedding. Then the forward is asked once more,
    with other ids, how many there are.

    name: what the ids were given as.
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
            self._check_without(tokens, offsets, cache)
            raise
        self._check(logits)
        return logits, cache

    def picked(
        self, tokens: Tensor, offsets: Tensor, cache: Cache, pick: Pick, positions: Tensor
    ) -> tuple[Tensor, Tensor | None, Cache]:
        if self._checked:
            return self._run.picked(tokens, offsets, cache, pick, positions)
        try:
            logits, ids, cache = self._run.picked(tokens, offsets, cache, pick, positions)
        except (IndexError, RuntimeError, ProgramError):
            self._check_without(tokens, offsets, cache)
            raise
        self._check(logits)
        return logits, ids, cache

    def _check_without(self, tokens: Tensor, offsets: Tensor, cache: Cache) -> None:
        """What this writes stands at and past the offsets, where nothing is read before it is written again."""
        logits = None
        with contextlib.suppress(Exception):  # then it was another error, which is about to be raised
            logits, _ = self._run(torch.zeros_like(tokens), offsets, cache)
        if logits is not None:
            self._check(logits)

    def _check(self, logits: Tensor) -> None:
        self._checked = True
        if self._largest >= logits.shape[-1]:
            raise RequestError(
                f"{self._name} names id {self._largest}, but the vocabulary ends at {logits.shape[-1] - 1}"
            ) from None
