"""Completions as JSON."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onward import Completion, Timing
    from onward.checkpoint import Tokenizer
    from onward.decoding import TokenLogprobs


def json_fields(completion: "Completion", prompt: Sequence[int], tokenizer: "Tokenizer | None") -> dict[str, Any]:
    """All texts of a prompt, `choices`, each with its tokens; the first one's text stands beside them.

    The same fields whatever was asked for, but for the `message` of a chat, and those of logprobs: `logprob` and `top`
    of a token, and `prompt`, the prompt's tokens. Without a tokenizer tokens have no text.
    """
    fields: dict[str, Any] = {
        "text": completion.text,
        "prompt_tokens": completion.prompt_tokens,
        "cached_tokens": completion.cached_tokens,
    }
    if completion.prompt_logprobs is not None:
        fields["prompt"] = _tokens(prompt, completion.prompt_logprobs, (), tokenizer)
    return fields | {"choices": [_choice(one, prompt, tokenizer) for one in completion.choices]}


def _choice(completion: "Completion", prompt: Sequence[int], tokenizer: "Tokenizer | None") -> dict[str, Any]:
    draft = completion.speculation
    return {
        "text": completion.text,
        **({} if completion.message is None else {"message": completion.message.to_dict()}),
        "tokens": _tokens(completion.token_ids, completion.logprobs, prompt, tokenizer),
        "finish_reason": completion.finish_reason,
        "stopped_by": completion.stopped_by,
        "seed": completion.seed,
        "score": completion.score,
        "timing": _timing(completion.timing),
        "speculation": None if draft is None else dataclasses.asdict(draft),
    }


def _timing(timing: "Timing") -> dict[str, float | None]:
    laps = timing.per_token_ms
    return {
        "prefill_ms": timing.prefill_ms,
        "total_ms": timing.total_ms,
        "tokens_per_second": timing.tokens_per_second,
        "median_ms_per_token": statistics.median(laps) if laps else None,
        "worst_ms_per_token": max(laps, default=None),
    }


def _tokens(
    ids: Sequence[int],
    logprobs: "Sequence[TokenLogprobs | None] | None",
    before: Sequence[int],
    tokenizer: "Tokenizer | None",
) -> list[dict[str, Any]]:
    """Ids with their texts, which add up to the whole: a character of several tokens is in the last of them."""
    from onward.decoding.text import token_texts

    texts = None if tokenizer is None else token_texts(ids, logprobs, before, tokenizer)
    tokens = []
    for at, token in enumerate(ids):
        fields: dict[str, Any] = {"id": token} if texts is None else {"id": token, "text": texts[at].text}
        if logprobs is not None:
            entry = logprobs[at]
            top = []
            for place, (one, value) in enumerate(() if entry is None else entry.top):
                text = {} if texts is None else {"text": texts[at].top[place].text}
                top.append({"id": one} | text | {"logprob": finite(value)})
            fields |= {"logprob": None if entry is None else finite(entry.chosen), "top": top}
        tokens.append(fields)
    return tokens


def finite(value: float) -> float | None:
    """JSON knows no infinity."""
    return value if math.isfinite(value) else None
