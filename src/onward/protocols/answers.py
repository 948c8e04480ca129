"""Completions as response bodies."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from onward.chat import AssistantMessage, MessageDelta, ToolCallDelta
from onward.language_model import Completion, Piece, Request
from onward.protocols.protocol import ParsedBody
from onward.sampling import TokenLogprobs
from onward.tokenizer import Tokenizer
from onward.tokenizer.text_stream import TokenText, TokenTexts, token_texts


class Usage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: dict[str, Any] | None


class ChatMessage(BaseModel):
    """The message of a chat completion."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(_Choice):
    """A choice of a chat completion."""

    message: ChatMessage


class TextChoice(_Choice):
    """A choice of a completion."""

    text: str


class _Completion(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    seed: int | None
    usage: Usage


class ChatCompletion(_Completion):
    """A response of /v1/chat/completions, for the OpenAPI document."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextCompletion(_Completion):
    """A response of /v1/completions, for the OpenAPI document."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


_MIN_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON doesn't have
# Clients read one or the other.
_REASONING = ("reasoning", "reasoning_content")
_PREFIXES = {"chat.completion": "chatcmpl", "text_completion": "cmpl"}


def answer_body(
    body: ParsedBody, completions: Sequence[Completion], tokenizer: Tokenizer, version: str
) -> dict[str, Any]:
    """Return the response to a body.

    completions: of its requests, in order; their choices follow each other. "seed" is that of the first: the same body
    with it gives the same response.
    """
    choices: list[dict[str, Any]] = []
    for at, completion in enumerate(completions):
        prompt = body.requests[at].prompt
        for text in completion.choices:
            choice: dict[str, Any] = {"index": len(choices)}
            if body.kind == "chat.completion":
                choice |= _chat_choice(text, prompt, tokenizer)
            else:
                echo = None if body.echoes is None else body.echoes[at]
                choice |= _text_choice(text, completion, prompt, echo, tokenizer, body.values.return_token_ids)
                if body.values.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs(prompt, completion.prompt_logprobs, tokenizer)
            if body.values.return_token_ids:
                choice["token_ids"] = text.token_ids
            choices.append(choice | {"finish_reason": finish_reason(text)})
    answer = answer_head(body, body.kind, completions[0].seed, version)
    answer |= {"choices": choices, "usage": usage_of(completions)}
    if body.values.prompt_logprobs is not None and body.kind == "chat.completion":
        entries = completions[0].prompt_logprobs
        answer["prompt_logprobs"] = prompt_logprobs(body.requests[0].prompt, entries, tokenizer)
    return answer


def answer_head(body: ParsedBody, kind: str, seed: int | None, version: str) -> dict[str, Any]:
    """The fields common to a response and its chunks. kind: the object type."""
    return {
        "id": f"{_PREFIXES[body.kind]}-{body.key.text}",
        "object": kind,
        "created": body.key.created,
        "model": body.model,
        "system_fingerprint": f"onward-{version}",
        "seed": seed,
    }


def finish_reason(text: Completion) -> str:
    """OpenAI's finish reason: "tool_calls" if there are calls to run. A stop string that cuts off the last call leaves
    nothing to run: "stop"."""
    if text.finish_reason != "stop":  # including time limits, for which OpenAI has no other reason
        return "length"
    if text.message is None or not text.message.tool_calls:
        return "stop"
    is_cut = isinstance(text.stopped_by, str) and not text.message.tool_calls[-1].is_whole
    return "stop" if is_cut else "tool_calls"


def delta_body(delta: MessageDelta) -> dict[str, Any]:
    """The "delta" of a chunk, without the role."""
    body: dict[str, Any] = {"content": delta.content} if delta.content else {}
    if delta.reasoning:
        body |= dict.fromkeys(_REASONING, delta.reasoning)
    if delta.tool_calls:
        body["tool_calls"] = calls = []
        for call in delta.tool_calls:
            start = {} if call.id is None else {"id": call.id, "type": "function"}
            name = {} if call.id is None else {"name": call.name}
            calls.append({"index": call.index, **start, "function": {**name, "arguments": call.arguments}})
    return body


def delta_of(message: AssistantMessage) -> MessageDelta:
    calls = [ToolCallDelta(at, call.id, call.name, call.arguments) for at, call in enumerate(message.tool_calls)]
    return MessageDelta(message.content or "", message.reasoning or "", tuple(calls))


def usage_of(completions: Sequence[Completion]) -> dict[str, Any]:
    prompt = sum(completion.prompt_tokens for completion in completions)
    texts = [text for completion in completions for text in completion.choices]
    new = sum(len(text.token_ids) for text in texts)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(completion.cached_tokens for completion in completions)},
    }
    details = {}
    if reasoning := sum(text.reasoning_tokens or 0 for text in texts):
        details["reasoning_tokens"] = reasoning
    if drafts := [text.speculation for text in texts if text.speculation]:
        details["accepted_prediction_tokens"] = accepted = sum(draft.accepted for draft in drafts)
        details["rejected_prediction_tokens"] = sum(draft.drafted for draft in drafts) - accepted
    return usage | ({"completion_tokens_details": details} if details else {})


def _chat_choice(text: Completion, prompt: Sequence[int], tokenizer: Tokenizer) -> dict[str, Any]:
    logprobs = None
    if text.logprobs is not None:
        tokens = token_texts(text.token_ids, text.logprobs, prompt, tokenizer)
        logprobs = chat_logprobs(tokens, text.token_ids, text.logprobs)
    assert text.message is not None, "a chat's text is parsed as a message"
    message = text.message.to_dict()
    if text.message.reasoning is not None:
        message |= dict.fromkeys(_REASONING, text.message.reasoning)
    return {"message": message | {"refusal": None}, "logprobs": logprobs}


def chat_logprobs(tokens: Sequence[TokenText], ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    return {"content": logprob_entries(tokens, ids, entries), "refusal": None}


def logprob_entries(
    tokens: Sequence[TokenText], ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any]]:
    """The tokens in a chat's logprobs. "id" is an extension."""
    content = []
    for token, id, entry in zip(tokens, ids, entries, strict=True):
        if entry is None:  # the first token of a prompt
            content.append({**_with_bytes(token, id, 0.0), "logprob": None, "top_logprobs": []})
        else:
            top = [_with_bytes(other, *pair) for other, pair in zip(token.top, entry.top, strict=True)]
            content.append(_with_bytes(token, id, entry.chosen) | {"top_logprobs": top})
    return content


def _with_bytes(token: TokenText, id: int, logprob: float) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(logprob), "bytes": list(token.bytes), "id": id}


def _text_choice(
    text: Completion,
    completion: Completion,
    prompt: Sequence[int],
    echo: str | None,
    tokenizer: Tokenizer,
    with_content: bool,
) -> dict[str, Any]:
    """echo: the text of the prompt, if the response repeats it."""
    whole = (echo or "") + text.text
    if text.logprobs is None:
        return {"text": whole, "logprobs": None}
    ids, entries = text.token_ids, list[TokenLogprobs | None](text.logprobs)
    tokens = token_texts(ids, entries, prompt, tokenizer)
    if echo is not None and completion.prompt_logprobs is not None:
        tokens = [*token_texts(prompt, completion.prompt_logprobs, (), tokenizer), *tokens]
        ids, entries = [*prompt, *ids], [*completion.prompt_logprobs, *entries]
    return {"text": whole, "logprobs": text_logprobs(tokens, ids, entries, with_content=with_content)}


def text_logprobs(
    tokens: Sequence[TokenText],
    ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    offset: int = 0,
    *,
    with_content: bool = False,
) -> dict[str, Any]:
    """The logprobs of a completion's tokens. offset: of the first token in the text. "ids" is an extension.

    with_content: add another one, "content", in the format of chats: with the ids of alternatives, which a mapping by
        text cannot tell apart.
    """
    offsets = [offset]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token.text))
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [None if entry is None else _finite(entry.chosen) for entry in entries],
        "top_logprobs": [
            None
            if entry is None
            else {other.text: _finite(logprob) for other, (_, logprob) in zip(token.top, entry.top, strict=True)}
            for token, entry in zip(tokens, entries, strict=True)
        ],
        "text_offset": offsets[: len(tokens)],
        "ids": list(ids),
        **({"content": logprob_entries(tokens, ids, entries)} if with_content else {}),
    }


def prompt_logprobs(
    prompt: Sequence[int], entries: Sequence[TokenLogprobs | None] | None, tokenizer: Tokenizer
) -> list[dict[str, dict[str, Any]] | None]:
    """The logprobs of a prompt in vLLM's format: for each token, itself and the top alternatives. rank: 1 for the
    likeliest; None for a token that is not among the listed ones."""
    assert entries is not None, "the body asks for them"
    listed: list[dict[str, dict[str, Any]] | None] = []
    for id, entry, token in zip(prompt, entries, token_texts(prompt, entries, (), tokenizer), strict=True):
        if entry is None:
            listed.append(None)
            continue
        own = {"logprob": _finite(entry.chosen), "rank": None, "decoded_token": token.text}
        likeliest = {
            str(other): {"logprob": _finite(logprob), "rank": rank, "decoded_token": text.text}
            for rank, ((other, logprob), text) in enumerate(zip(entry.top, token.top, strict=True), 1)
        }
        listed.append({str(id): own, **likeliest})
    return listed


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _MIN_LOGPROB


class ContentLogprobs:
    """Selects the logprobs of a message's content while it is generated. The text is parsed token by token. A token
    belongs to the content if one of its characters does, or a part of one. Text that may be the start of a mark is held
    back until that is certain."""

    def __init__(self, request: Request, seed: int | None, tokenizer: Tokenizer) -> None:
        assert request.answer is not None, "a chat's text is parsed as a message"
        self._parser = request.answer.parser(request.prompt, seed)
        self._marks = dict(request.answer.marks)
        self._texts = TokenTexts(request.prompt, tokenizer)
        self._pending: list[tuple[int, TokenLogprobs]] = []  # tokens whose texts are not final
        # The texts since the last content, each with the unsent entries of its tokens.
        self._read: list[tuple[str, list[dict[str, Any]]]] = []
        self.pushed = 0

    def push(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """The entries of content that is certain after these tokens."""
        new: list[dict[str, Any]] = []
        for piece in pieces:
            assert piece.logprobs is not None, "logprobs were asked for"
            self.pushed += 1
            self._pending.append((piece.token_id, piece.logprobs))
            new += self._settle(self._texts.push(piece.token_id, piece.logprobs))
        return new

    def rest(self, completion: Completion) -> list[dict[str, Any]]:
        """The remaining entries of a finished text."""
        tokens = list(zip(completion.token_ids, completion.logprobs or (), strict=True))[self.pushed :]
        new = self.push([Piece("", id, entry) for id, entry in tokens])
        new += self._settle(self._texts.flush())
        self._parser.finish()
        return new + self._match(self._parser.take().content)

    def _settle(self, final: Sequence[TokenText]) -> list[dict[str, Any]]:
        """Parse tokens whose texts are final."""
        new: list[dict[str, Any]] = []
        entries: list[dict[str, Any]] = []  # of a character's tokens, whose text is in the last one
        for at, token in enumerate(final, 1):
            id, entry = self._pending.pop(0)
            entries += logprob_entries([token], [id], [entry])
            text = self._marks.get(id, token.text)
            if token.bytes and not text and at < len(final):
                continue
            self._parser.feed(text)
            self._read.append((text, entries))
            new += self._match(self._parser.take().content)
            entries = []
        return new

    def _match(self, content: str) -> list[dict[str, Any]]:
        """The entries of the tokens with this content: a suffix of the text read so far, apart from what is held
        back."""
        if not content:
            return []
        begin = "".join(text for text, _ in self._read).rfind(content)
        end, at = begin + len(content), 0
        new: list[dict[str, Any]] = []
        rest: list[tuple[str, list[dict[str, Any]]]] = []
        for text, entries in self._read:
            after = at + len(text)
            if at < end and after > begin:
                new += entries
                entries = []
            if after > end:
                rest.append((text[max(0, end - at) :], entries))
            at = after
        self._read = rest
        return new
