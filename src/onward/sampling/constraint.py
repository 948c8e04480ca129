"""Constraints: which ids may follow a text, according to a grammar or the user's own rule."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Protocol, Self, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onward import ops
from onward.errors import NothingToDrawError, RequestError

# A set of ids as bits, int32 [N]: it has id i if bit i % 32 of word i // 32 is set, and none past the last word.
Mask = NDArray[np.int32]


@runtime_checkable
class Constraint(Protocol):
    """The rule of one text: which ids may follow the ids that it has accepted. Its answers depend on these alone.

    Subclasses may leave out `forced` and `is_done`.
    """

    def mask(self) -> Mask:
        """The ids that may follow, a new array (see `onward.sampling.mask_of`). Ids that end the text are included if
        it may end here. Not called if `is_done`."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance by an id that the mask admits. Never called with an id that ends the text."""
        ...

    def rollback(self, count: int) -> None:
        """Remove the last `count` accepted ids."""
        ...

    def fork(self) -> Self:
        """An independent copy in the same state."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether nothing may follow. The text then ends without an end id."""
        return False

    def forced(self) -> Sequence[int]:
        """Ids that very likely follow regardless of the model, such as braces and keys of JSON. They are drafted, so
        that one pass of the model processes them all. A wrong guess changes no text."""
        return ()


class PartialConstraint(Constraint):
    """A constraint that applies only to parts of a text, where it may overrule other options."""

    @property
    def is_open(self) -> bool:
        """Whether any id may follow. `mask` is not called then."""
        return False

    @property
    def imposed(self) -> int | None:
        """The only id that may follow, even if other options ban it; None for a choice."""
        return None


def mask_of(ids: Iterable[int]) -> Mask:
    """The mask of these ids, for a `Constraint`."""
    unique = np.unique(np.fromiter(ids, dtype=np.int64))
    if len(unique) and unique[0] < 0:
        raise RequestError(f"ids must be whole numbers of 0 or more; got {unique[0]} for a mask")
    words = np.zeros(1 + int(unique[-1]) // 32 if len(unique) else 0, dtype=np.uint32)
    np.bitwise_or.at(words, unique // 32, np.uint32(1) << (unique % 32).astype(np.uint32))
    return words.view(np.int32)


def admits(mask: Mask, token_id: int) -> bool:
    """Whether an id is in a mask."""
    word = token_id // 32
    return word < len(mask) and bool(int(mask[word]) >> (token_id % 32) & 1)


def _checked(mask: object) -> Mask:
    """Check the mask of a user's constraint."""
    if isinstance(mask, np.ndarray) and mask.dtype == np.int32 and mask.ndim == 1:
        return mask
    got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, np.ndarray | Tensor) else type(mask).__name__
    raise RequestError(f"a constraint's mask must be int32 [N], 32 ids a word (onward.sampling.mask_of); got {got}")


class ConstraintState:
    """The constraint of one text: ids are appended and removed, as in its `History`.

    Drafted ids may run past the end of the text, or the constraint may reject them. Positions after these are never
    reached, so they are unconstrained. stop_ids: ids that end the text.
    """

    def __init__(self, constraint: Constraint, stop_ids: AbstractSet[int] = frozenset()) -> None:
        self._constraint = constraint
        self._stop_ids = stop_ids
        self._accepted = self._unreachable = 0
        self._mask: Mask | None = None  # of the current position, once computed

    def __len__(self) -> int:
        """The number of appended ids."""
        return self._accepted + self._unreachable

    @property
    def is_done(self) -> bool:
        """Whether the text ends here or earlier."""
        return self._unreachable > 0 or self._constraint.is_done

    def mask(self) -> Mask | None:
        """The ids that may follow; None for all."""
        if self.is_done or (isinstance(self._constraint, PartialConstraint) and self._constraint.is_open):
            return None
        if self._mask is None:
            self._mask = _checked(self._constraint.mask())
        return self._mask

    @property
    def imposed(self) -> int | None:
        """The only id that may follow, even if other options ban it; None for a choice."""
        return self._constraint.imposed if isinstance(self._constraint, PartialConstraint) else None

    def forced(self) -> Sequence[int]:
        return () if self.is_done else self._constraint.forced()

    def append(self, token_id: int) -> None:
        if self.is_done or token_id in self._stop_ids or not self.admits(token_id):
            self._unreachable += 1
            return
        self._constraint.accept(token_id)
        self._accepted += 1
        self._mask = None

    def admits(self, token_id: int) -> bool:
        """Whether an id may follow, including ids that end the text."""
        mask = self.mask()
        return mask is None or admits(mask, token_id)

    def admitted(self, tokens: Sequence[int]) -> int:
        """How many of these ids may follow in sequence."""
        with self.assuming(()):
            for count, token in enumerate(tokens):
                if self.is_done or not self.admits(token):
                    return count
                self.append(token)
        return len(tokens)

    def truncate(self, length: int) -> None:
        """Remove all but the first `length` ids."""
        assert 0 <= length <= len(self), "only appended ids can be removed"
        count = len(self) - length
        unreachable = min(count, self._unreachable)
        self._unreachable -= unreachable
        if count > unreachable:
            self._constraint.rollback(count - unreachable)
            self._accepted -= count - unreachable
            self._mask = None

    def fork(self) -> Self:
        """An independent copy in the same state."""
        other = copy.copy(self)
        other._constraint = self._constraint.fork()
        return other

    @contextmanager
    def assuming(self, tokens: Sequence[int]) -> Iterator[None]:
        """Append `tokens` within the context, and remove them and all later ones afterwards."""
        before = len(self)
        try:
            for token in tokens:
                self.append(token)
            yield
        finally:
            self.truncate(before)


def mask_logits(
    logits: Tensor, texts: Sequence[ConstraintState | None], drafts: Sequence[Sequence[int]] | None = None
) -> tuple[Tensor, Tensor]:
    """The logits, float [B, K, V], with -inf for ids that may not follow, all others unchanged, bit for bit, and bool
    [B, K]: whether any logit is not -inf. An imposed id is 0 if it was -inf.

    texts: one for each of the B rows; None for a row without a constraint.
    drafts: as in `Sampler`: position k assumes that the first k of the row's drafted ids were chosen.
    """
    if len(texts) != logits.shape[0]:
        raise RequestError(f"the sampler was called with {logits.shape[0]} rows and {len(texts)} constraints")
    drafts = [()] * len(texts) if drafts is None else drafts
    rules = [rule for text, draft in zip(texts, drafts, strict=True) for rule in _rules(text, draft, logits.shape[1])]
    if all(mask is None for mask, _ in rules):
        return logits, torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
    flat = logits.reshape(len(rules), -1)
    words = _words([mask for mask, _ in rules], flat.shape[1])
    masked, left = ops.apply_token_mask(flat, words.to(flat.device))
    for row, (_, imposed) in enumerate(rules):
        if imposed is not None:
            masked[row, imposed] = masked[row, imposed].nan_to_num(float("nan"), float("inf"), 0.0)
            left[row] = True
    return masked.view_as(logits), left.view(logits.shape[:2])


def nothing_left() -> NothingToDrawError:
    return NothingToDrawError(
        "nothing is left to sample: after this text the constraint admits no id, or none that other options "
        "(logit_bias, bad_words, no_repeat_ngram_size, min_new_tokens) do not ban"
    )


def _rules(text: ConstraintState | None, draft: Sequence[int], positions: int) -> list[tuple[Mask | None, int | None]]:
    """The mask and the imposed id of each position; None for all ids, also past the draft, where the result is not
    used."""
    if text is None:
        return [(None, None)] * positions
    rules = [(text.mask(), text.imposed)]
    if positions > 1 and len(draft):
        with text.assuming(()):
            for token in draft[: positions - 1]:
                text.append(token)
                rules.append((text.mask(), text.imposed))
    return [*rules, *[(None, None)] * (positions - len(rules))]


def _words(masks: Sequence[Mask | None], vocab: int) -> Tensor:
    """The masks as `ops.apply_token_mask` takes them: int32 [N, W]."""
    words = np.full((len(masks), -(-vocab // 32)), -1, dtype=np.int32)
    for row, mask in enumerate(masks):
        if mask is not None:
            count = min(len(mask), words.shape[1])
            words[row, :count], words[row, count:] = mask[:count], 0
    return torch.from_numpy(words)
