"""Completions as the body of an answer."""

import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

from onward.checkpoint import Tokenizer
from onward.completion import Completion
from onward.decoding import TokenLogprobs
from onward.decoding.token_texts import TokenText, token_texts
from onward.messages import MessageDelta, ToolCallDelta
from onward.openai.body import Body

# OpenAI's for what has no chance; JSON knows no infinity.
_NO_CHANCE = -9999.0
# Clients read one or the other.
_REASONING = ("reasoning", "reasoning_content")
_PREFIXES = {"chat.completion": "chatcmpl", "text_completion": "cmpl"}


def answer_body(body: Body, completions: Sequence[Completion], tokenizer: Tokenizer, version: str) -> dict[str, Any]:
    """The object that answers a body.

    completions: of its requests, in order. Their choices follow each other, and "seed" is what the first was drawn
    with: the same body with it gives the same answer.
    """
    choices: list[dict[str, Any]] = []
    for at, completion in enumerate(completions):
        prompt = body.requests[at].prompt
        for text in completion.choices:
            choice = {"index": len(choices)}
            if body.kind == "chat.completion":
                choice |= _chat_choice(text, prompt, tokenizer)
            else:
                echo = None if body.echoes is None else body.echoes[at]
                choice |= _text_choice(text, completion.prompt_logprobs, prompt, echo, tokenizer)
            choices.append(choice | {"finish_reason": finish_reason(text)})
    return {
        "id": f"{_PREFIXES[body.kind]}-{uuid.uuid4().hex}",
        "object": body.kind,
        "created": int(time.time()),
        "model": body.model,
        "choices": choices,
        "usage": _usage(completions),
        "system_fingerprint": f"onward-{version}",
        "seed": completions[0].seed,
    }


def finish_reason(text: Completion) -> str:
    """OpenAI's word for how a text ended: "tool_calls" where it ended by itself and has calls."""
    if text.finish_reason != "stop":  # a text that ran out of time was cut, too; OpenAI has no other word for it
        return "length"
    return "tool_calls" if text.message is not None and text.message.tool_calls else "stop"


def delta_body(delta: MessageDelta) -> dict[str, Any]:
    """The "delta" of a chunk: only what came. The role, which the first chunk has, is the caller's."""
    body: dict[str, Any] = {"content": delta.content} if delta.content else {}
    if delta.reasoning:
        body |= dict.fromkeys(_REASONING, delta.reasoning)
    if delta.tool_calls:
        body["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
    return body


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _usage(completions: Sequence[Completion]) -> dict[str, Any]:
    prompt = sum(completion.prompt_tokens for completion in completions)
    new = sum(len(text.token_ids) for completion in completions for text in completion.choices)
    cached = sum(completion.cached_tokens for completion in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _chat_choice(text: Completion, prompt: Sequence[int], tokenizer: Tokenizer) -> dict[str, Any]:
    logprobs = None
    if text.logprobs is not None:
        tokens = token_texts(text.token_ids, text.logprobs, prompt, tokenizer)
        content = [_chat_token(token, entry) for token, entry in zip(tokens, text.logprobs, strict=True)]
        logprobs = {"content": content, "refusal": None}
    return {"message": _message(text), "logprobs": logprobs}


def _message(text: Completion) -> dict[str, Any]:
    assert text.message is not None, "the text of a chat is read as a message"
    said = text.message.to_dict()
    if text.message.reasoning is not None:
        said |= dict.fromkeys(_REASONING, text.message.reasoning)
    return said | {"refusal": None}


def _chat_token(token: TokenText, entry: TokenLogprobs) -> dict[str, Any]:
    top = [_with_bytes(text, logprob) for text, (_, logprob) in zip(token.top, entry.top, strict=True)]
    return _with_bytes(token.text, entry.chosen) | {"top_logprobs": top}


def _with_bytes(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _text_choice(
    text: Completion,
    prompt_logprobs: Sequence[TokenLogprobs | None] | None,
    prompt: Sequence[int],
    echo: str | None,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    whole = text.text if echo is None else echo + text.text
    if text.logprobs is None:
        return {"text": whole, "logprobs": None}
    entries: list[TokenLogprobs | None] = [*text.logprobs]
    tokens = token_texts(text.token_ids, entries, prompt, tokenizer)
    if prompt_logprobs is not None:
        tokens = [*token_texts(prompt, prompt_logprobs, (), tokenizer), *tokens]
        entries = [*prompt_logprobs, *entries]
    offsets = [0]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token.text))
    logprobs = {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [None if entry is None else _finite(entry.chosen) for entry in entries],
        "top_logprobs": [_by_text(token, entry) for token, entry in zip(tokens, entries, strict=True)],
        "text_offset": offsets[: len(tokens)],
    }
    return {"text": whole, "logprobs": logprobs}


def _by_text(token: TokenText, entry: TokenLogprobs | None) -> dict[str, float] | None:
    if entry is None:
        return None
    return {text: _finite(logprob) for text, (_, logprob) in zip(token.top, entry.top, strict=True)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NO_CHANCE
