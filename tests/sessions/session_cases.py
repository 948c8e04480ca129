"""Models and texts for the tests of sessions."""

import dataclasses
from functools import lru_cache
from typing import Any

from torch import Tensor

from onward import Completion, GenerateOptions, LanguageModel, Model, Session, ops
from onward.cache import PagedCacheManager
from onward.models import pack_params
from onward.ops.heads import BLOCK
from onward.testing import ByteTokenizer, tiny_model

TOKENIZER = ByteTokenizer()
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 11}
PENALISED = {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "dry_multiplier": 0.5}


WINDOWED = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}


def tiny(seed: int = 7, prefix_memory: int = 2**30, **config: Any) -> LanguageModel:
    """Random float32 weights, packed for the kernels in use, with a window in one layer; a context of 256."""
    return _tiny(ops.choice(), seed, prefix_memory, **config)


@lru_cache
def _tiny(form: ops.OpsBackend, seed: int, prefix_memory: int, **config: Any) -> LanguageModel:
    return LanguageModel(
        packed(tiny_model("qwen3", seed=seed, **WINDOWED, **config)),
        TOKENIZER,
        defaults=GenerateOptions(max_new_tokens=10),
        prefill_chunk=16,
        prefix_memory=prefix_memory,
    )


def packed(model: Model) -> Model:
    """The model in the layout of the kernels, where they are in use."""
    return model if ops.choice().form == "definition" else dataclasses.replace(model, params=pack_params(model.params))


def contents(completion: Completion) -> tuple[Any, ...]:
    """All fields of a completion, except its timing and its number of cached tokens."""
    return completion.text, completion.token_ids, completion.finish_reason, completion.prompt_tokens, completion.seed


def counting(model: Model) -> tuple[Model, list[int]]:
    """The model, and the number of tokens of each of its calls (when it is not compiled)."""
    processed: list[int] = []

    def forward(tokens: Tensor, *arguments: Any, **options: Any) -> Any:
        processed.append(tokens.numel())
        return model.forward(tokens, *arguments, **options)

    return dataclasses.replace(model, forward=forward), processed


def spoil(session: Session) -> None:
    """NaN wherever the session's slot holds nothing: what reads it shows in the tokens, or raises."""
    slots, slot = session._text.slots, session._text.pin
    assert isinstance(slots, PagedCacheManager)
    cache = slots.view([slot], [0], 0).cache
    slides = [slots._memory.windows is not None and shape.window is not None for shape in slots._memory.plan.shapes]
    for layer, of_window in zip((*cache.keys, *cache.values), slides * 2, strict=True):
        for number, block in slot.windows.items() if of_window else enumerate(slot.blocks):
            length = max(0, len(session.tokens) - number * BLOCK)
            layer[block, :, length:] = float("nan")
