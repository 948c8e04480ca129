"""Ids that a request's texts emitted elsewhere, checked before its texts take them up."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from onward.checks import plain_items
from onward.errors import RequestError
from onward.requests.request import Ids, Request

# The ids of one text, or a list of them for each of several.
Emitted: TypeAlias = Ids | Sequence[Ids]


def checked_emitted(emitted: Emitted, request: Request, vocab_size: int) -> list[list[int]]:
    """A list of ids for each of the request's `n` texts.

    Raises:
        RequestError: another number of lists, what is no id of the vocabulary, more ids than the request may emit, or
            a request whose texts do not follow from its prompt, its options and its seed.
    """
    options = request.options
    if options.seed is None and options.temperature > 0 and options.beams == 1:
        raise RequestError(
            "a sampled request without a seed cannot be resumed: give the seed that its texts were drawn with "
            "(Completion.seed; submit it with one to know it ahead)"
        )
    texts = _of_each_text(emitted, options.n)
    for ids in texts:
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise RequestError(f"emitted must hold ids, whole numbers from 0 to {vocab_size - 1}; got {token!r}")
        if len(ids) > request.max_new_tokens:
            raise RequestError(
                f"emitted holds {len(ids)} ids of a text, but max_new_tokens is {request.max_new_tokens}: give the "
                "options of the request that emitted them"
            )
    return texts


def _of_each_text(emitted: Any, n: int) -> list[list[Any]]:
    if isinstance(emitted, str | bytes) or not isinstance(emitted, Sequence | np.ndarray | Tensor):
        raise RequestError(f"emitted must be ids, or a list of ids for each text; got {type(emitted).__name__}")
    items = list(emitted)
    if not items:
        return [[] for _ in range(n)]
    nested = [isinstance(item, Sequence) or (isinstance(item, np.ndarray | Tensor) and item.ndim > 0) for item in items]
    if not any(nested):
        items = [emitted]
    elif not all(nested):
        raise RequestError("emitted must be ids, or a list of ids for each text; got a list of both")
    if len(items) != n:
        raise RequestError(f"emitted holds ids of {len(items)} texts, but the request has n={n}: give a list for each")
    return [plain_items(ids) for ids in items]
