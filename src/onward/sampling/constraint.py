"""Constraints: which ids may follow a text, where a grammar or a rule of the user's says so."""

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

# Ids as bits: id i is among them where bit i % 32 of word i // 32 is set; int32 [N]. An id past the last word is not.
Mask = NDArray[np.int32]


@runtime_checkable
class Constraint(Protocol):
    """Says which ids may follow the ids of one text that it has accepted. All it says depends on these alone.

    Inherit from it, and `forced` and `is_done` need not be written.
    """

    def mask(self) -> Mask:
        """The ids that may follow, a new array; `onward.sampling.mask_of` makes it of ids. An id that ends the text
        is among them where the text may end. It is not asked where `is_done`."""
        ...

    def accept(self, token_id: int) -> None:
        """Go on after an id that the mask admits. An id that ends the text is never given."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last `count` of the accepted ids."""
        ...

    def fork(self) -> Self:
        """A copy that goes on from here by itself."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether nothing may follow. The text then ends without an id that says so."""
        return False

    def forced(self) -> Sequence[int]:
        """Ids that most likely follow whatever the model says, as braces and keys of JSON do. They are drafted, so that
        one pass of the model processes them all. A wrong guess changes no text."""
        return ()


def mask_of(ids: Iterable[int]) -> Mask:
    """The mask of these ids, for a `Constraint`."""
    listed = np.unique(np.fromiter(ids, dtype=np.int64))
    if len(listed) and listed[0] < 0:
        raise RequestError(f"ids are whole numbers of 0 or more; got {listed[0]} for a mask")
    words = np.zeros(1 + int(listed[-1]) // 32 if len(listed) else 0, dtype=np.uint32)
    np.bitwise_or.at(words, listed // 32, np.uint32(1) << (listed % 32).astype(np.uint32))
    return words.view(np.int32)


def admits(mask: Mask, token_id: int) -> bool:
    """Whether an id is in a mask."""
    word = token_id // 32
    return word < len(mask) and bool(int(mask[word]) >> (token_id % 32) & 1)


def _checked(mask: object) -> Mask:
    """A mask as a constraint of the user's gives it."""
    if isinstance(mask, np.ndarray) and mask.dtype == np.int32 and mask.ndim == 1:
        return mask
    got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, np.ndarray | Tensor) else type(mask).__name__
    raise RequestError(f"a constraint's mask must be int32 [N], 32 ids a word (onward.constraints.mask_of); got {got}")


class ConstraintState:
    """A constraint at work on one text: ids are appended and taken back, as in its `History`.

    Drafted ids may run past the end of the text, or the constraint may refuse them. What stands after these is never
    reached, so everything may follow there.

    stop_ids: those that end the text.
    """

    def __init__(self, constraint: Constraint, stop_ids: AbstractSet[int] = frozenset()) -> None:
        self._constraint = constraint
        self._stop_ids = stop_ids
        self._accepted = self._unreachable = 0
        self._mask: Mask | None = None  # of where it stands, if it was asked for

    def __len__(self) -> int:
        """How many ids were appended."""
        return self._accepted + self._unreachable

    @property
    def is_done(self) -> bool:
        """Whether the text ends here, or has ended before."""
        return self._unreachable > 0 or self._constraint.is_done

    def mask(self) -> Mask | None:
        """What may follow; None for everything."""
        if self.is_done:
            return None
        if self._mask is None:
            self._mask = _checked(self._constraint.mask())
        return self._mask

    def forced(self) -> Sequence[int]:
        """Ids that most likely follow."""
        return () if self.is_done else self._constraint.forced()

    def append(self, token_id: int) -> None:
        mask = self.mask()
        if mask is None or token_id in self._stop_ids or not admits(mask, token_id):
            self._unreachable += 1
            return
        self._constraint.accept(token_id)
        self._accepted += 1
        self._mask = None

    def admits(self, token_id: int) -> bool:
        """Whether an id may follow, one that ends the text too."""
        mask = self.mask()
        return mask is None or admits(mask, token_id)

    def admitted(self, tokens: Sequence[int]) -> int:
        """How many of these ids may follow, one after the other."""
        with self.assuming(()):
            for count, token in enumerate(tokens):
                if self.is_done or not self.admits(token):
                    return count
                self.append(token)
        return len(tokens)

    def truncate(self, length: int) -> None:
        """Take back what was appended after the first `length` ids."""
        assert 0 <= length <= len(self), "only what was appended can be taken back"
        count = len(self) - length
        unreachable = min(count, self._unreachable)
        self._unreachable -= unreachable
        if count > unreachable:
            self._constraint.rollback(count - unreachable)
            self._accepted -= count - unreachable
            self._mask = None

    def fork(self) -> Self:
        """A copy that goes on from here by itself."""
        other = copy.copy(self)
        other._constraint = self._constraint.fork()
        return other

    @contextmanager
    def assuming(self, tokens: Sequence[int]) -> Iterator[None]:
        """As it would be after `tokens`, and what is appended to them meanwhile; afterwards as it was."""
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
    """-inf for what may not follow: float [B, K, V] -> the same; all other logits as they are, bit for bit. And whether
    a place has any id left that is not -inf: bool [B, K].

    texts: one for each of the B rows; None for a row without a constraint.
    drafts: as in `Sampler`: place k is as if the first k of the row's drafted ids had been chosen.
    """
    if len(texts) != logits.shape[0]:
        raise RequestError(f"the sampler was called with {logits.shape[0]} rows and {len(texts)} constraints")
    each = [()] * len(texts) if drafts is None else drafts
    masks = [mask for text, draft in zip(texts, each, strict=True) for mask in _masks(text, draft, logits.shape[1])]
    flat = logits.reshape(len(masks), -1)
    kept, left = ops.apply_token_mask(flat, _words(masks, flat.shape[1]).to(flat.device))
    return kept.view_as(logits), left.view(logits.shape[:2])


def nothing_left() -> NothingToDrawError:
    return NothingToDrawError(
        "nothing is left to draw: after this text the constraint admits no id, or none that other options "
        "(logit_bias, bad_words, no_repeat_ngram_size, min_new_tokens) do not ban"
    )


def _masks(text: ConstraintState | None, draft: Sequence[int], places: int) -> list[Mask | None]:
    """What may follow at each place; None for everything, as at places past the draft, which nobody reads."""
    if text is None:
        return [None] * places
    masks = [text.mask()]
    if places > 1 and len(draft):
        with text.assuming(()):
            for token in draft[: places - 1]:
                text.append(token)
                masks.append(text.mask())
    return [*masks, *[None] * (places - len(masks))]


def _words(masks: Sequence[Mask | None], vocab: int) -> Tensor:
    """The masks as `ops.apply_token_mask` takes them: int32 [N, W]."""
    words = np.full((len(masks), -(-vocab // 32)), -1, dtype=np.int32)
    for row, mask in enumerate(masks):
        if mask is not None:
            count = min(len(mask), words.shape[1])
            words[row, :count], words[row, count:] = mask[:count], 0
    return torch.from_numpy(words)
