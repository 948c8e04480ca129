"""Attention and masks of a hosted module, under our name in the registries of transformers."""

from collections.abc import Callable
from functools import cache as once
from typing import Any

import torch
from torch import Tensor

from onward.models.hosted.library import NAME, NotHostedError, library
from onward.models.hosted.step import HostedLayer, Step, current_step

# Of a window that no field names, the longest that is looked for.
_LONGEST_UNNAMED = 64


@once
def register() -> None:
    """Tell transformers of our attention and masks, once."""
    library("modeling_utils").ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    library("masking_utils").ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Store new keys and values [B, G, T, D] in the cache and attend over it; [B, T, H, D]."""
    step = current_step()
    layer, new = step.layer_of(key, value)
    if step.survey is not None:
        _survey(step, layer, module, attention_mask, keywords)
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
    place, cache = step.places[layer], step.cache
    assert cache is not None
    options: dict[str, Any] = {"window": step.layers[step.calls].window, "scale": scaling, "sinks": s_aux}
    options["softcap"] = softcap
    step.calls += 1
    # None: another layer's keys and values, which that one has stored.
    out = cache.attend(place, query, key if new else None, value if new else None, step.offsets, **options)
    return out.transpose(1, 2), None


def mask(*, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> Tensor | None:
    """No mask: `attend` knows what a token sees. During a survey, a stand-in that says which window it is for."""
    step = current_step()
    if step.survey is None:
        return None
    stand_in = torch.zeros(1, 1, 1, 1)
    step.survey.windows[id(stand_in)] = _window(mask_function, local_size)
    step.survey.stand_ins.append(stand_in)
    return stand_in


def _survey(step: Step, layer: int, module: Any, attention_mask: Tensor | None, keywords: dict[str, Any]) -> None:
    survey = step.survey
    assert survey is not None
    if not keywords.get("is_causal", getattr(module, "is_causal", True)):
        raise NotHostedError("its attention is not causal")
    if attention_mask is not None and id(attention_mask) not in survey.windows:
        raise NotHostedError("it makes a mask of its own for attention")
    strange = [name for name, given in keywords.items() if isinstance(given, Tensor) and name not in _PASSED]
    if strange:
        raise NotHostedError(f"its attention takes {', '.join(sorted(strange))}")
    window = keywords.get("sliding_window") if attention_mask is None else survey.windows[id(attention_mask)]
    survey.layers.append(HostedLayer(window))
    survey.windows_of.setdefault(layer, set()).add(window)


# Tensors that modules pass on to every function below them, and attention does not read.
_PASSED = frozenset({"position_ids", "cache_position", "input_ids"})


def _window(mask_function: Callable[..., Any], local_size: int | None) -> int | None:
    """The window of a mask, which is compared with a causal one of that window; None: a token sees all before it."""
    length = 2 * (local_size or _LONGEST_UNNAMED) + 3
    queries = sorted({at for edge in (0, length // 2, length) for at in range(edge - 3, edge + 3) if 0 <= at < length})
    query, key = torch.tensor(queries).unsqueeze(1), torch.arange(length).unsqueeze(0)
    seen = torch.as_tensor(mask_function(0, 0, query, key)).expand(len(queries), length)
    window = int(seen[-1].sum())
    if not torch.equal(seen, (key <= query) & (key > query - window)):
        raise NotHostedError("its masks are neither causal nor those of a sliding window")
    return None if window == length else window
