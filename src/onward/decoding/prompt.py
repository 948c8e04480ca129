"""Prompt ids from lists, arrays and tensors, and a check against the context."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from onward.errors import ContextOverflowError, OptionError
from onward.util.checks import check_id, plain, plain_items

# A list or a tuple, or a one-dimensional array or tensor of integers.
PromptIds = Sequence[int] | NDArray[np.integer] | Tensor


def prompt_ids(prompt: PromptIds) -> list[int]:
    """The ids of a prompt as a list.

    Raises:
        RequestError: no ids, more than one dimension, or an element that is not an integer of 0 or more.
    """
    if isinstance(prompt, Tensor | np.ndarray) and prompt.ndim != 1:
        raise OptionError("prompt", f"must have one dimension, the ids of one row; got {list(prompt.shape)}")
    listed = plain(prompt)
    if isinstance(listed, str | bytes) or not isinstance(listed, Sequence):
        raise OptionError("prompt", f"must be a list of ids, or one dimension of a tensor or array; got {prompt!r}")
    if not listed:
        raise OptionError("prompt", "must contain at least one id; got none")
    ids = plain_items(listed)
    for token in ids:
        check_id("prompt", token)
    return ids


def check_context_length(
    length: int,
    new: int = 0,
    *,
    context: int | None,
    cache: int | None = None,
    what: str = "prompt",
    of_new: str = "max_new_tokens",
    advice: str = "",
) -> None:
    """Raise `ContextOverflowError` unless `length` and `new` positions together fit the context and the cache.

    Args:
        length: the positions of `what`, a prompt or a text. new: those that follow, the argument `of_new`.
        context, cache: the most positions that the model and the cache hold; None for any number.
        advice: how the caller makes `what` fit; by default "shorten the " `what`.
    """
    is_context = cache is None or (context is not None and context <= cache)
    limit, holder = (context, "context") if is_context else (cache, "cache")
    if limit is None or length + new <= limit:
        return
    ways = [advice or f"shorten the {what}", *(["make a longer cache"] if holder == "cache" else [])]
    if length > limit or not new:
        problem = f"the {what} is {length} tokens long"
    else:
        problem = f"{what} ({length} tokens) + {of_new} ({new}) = {length + new}"
        ways[:0] = [f"ask for at most {limit - length} new tokens"] if limit > length else []
    raise ContextOverflowError(
        f"{problem}, but the {holder} holds {limit}: {' or '.join(ways)}", option=what if what == "prompt" else None
    )
