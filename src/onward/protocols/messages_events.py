"""Responses of /v1/messages: a message with content blocks, the events that build it in a stream, and errors."""

import re
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import from_json

from onward import __version__
from onward.chat import MessageDelta, ToolCall, ToolCallDelta
from onward.errors import OnwardError
from onward.language_model import Completion, Piece
from onward.protocols.body import BodyError, error_fields, status_of
from onward.protocols.choices import as_json, finish_reason, weights_version
from onward.protocols.protocol import ParsedBody, counted_events

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageUsage(BaseModel):
    """Numbers of tokens. input_tokens: of the prompt, without those read from the cache."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class Message(BaseModel):
    """A response of /v1/messages, for the OpenAPI document."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessageUsage
    seed: int | None
    system_fingerprint: str
    receipt: dict[str, Any] | None = None


class MessageError(BaseModel):
    """The reason of an error, in Anthropic's format."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class MessageErrorBody(BaseModel):
    """The response to a request that failed or was refused, in Anthropic's format."""

    type: Literal["error"]
    error: MessageError
    request_id: str | None = None


# Anthropic's types of errors, by status; other errors are invalid requests.
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


# The code of errors after which clients go on without a thread.
NO_THREADS = "thread_unsupported_request"


def message_error(error: OnwardError, request_id: str = "") -> dict[str, Any]:
    """The body of an error response, and the data of an error event."""
    kind = _ERRORS.get(status_of(error), "invalid_request_error")
    fields: dict[str, Any] = {"type": kind, "message": error_fields(error)["message"]}
    if isinstance(error, BodyError) and error.code == NO_THREADS:
        fields["details"] = {"error_code": error.code, "unsupported": ["thread"]}
    return {"type": "error", "error": fields, **({"request_id": request_id} if request_id else {})}


def message_body(body: ParsedBody, completion: Completion) -> dict[str, Any]:
    """The response to a body: the result of its stream's events."""
    message = completion.message
    assert message is not None, "a chat's text is parsed as a message"
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        thinking = "" if omits_thinking(body) else message.reasoning
        blocks.append({"type": "thinking", "thinking": thinking, "signature": _signature(body, 0)})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": input_of(call)} for call in message.tool_calls
    ]
    reason, sequence = stop_of(body, completion)
    stop = {"stop_reason": reason, "stop_sequence": sequence}
    return {
        **_head(body),
        "content": blocks,
        **stop,
        "usage": usage_of(completion),
        **body.receipt(completion),
    }


def omits_thinking(body: ParsedBody) -> bool:
    """Whether the response leaves out the text of the reasoning."""
    thinking = body.values.thinking
    return thinking is not None and thinking.display == "omitted"


def input_of(call: ToolCall) -> dict[str, Any]:
    """The arguments of a call as an object. Of arguments that were cut off, as much as there is; those that are no
    object are the value of INVALID_JSON, as Anthropic suggests."""
    text = JsonText().add(call.arguments)
    try:
        value = from_json(text or "{}", allow_partial=True, allow_inf_nan=False)
        if isinstance(value, str):  # some models write the object as a JSON string
            value = from_json(value, allow_inf_nan=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": call.arguments}


def stop_of(body: ParsedBody, completion: Completion) -> tuple[StopReason, str | None]:
    """The stop reason, and the stop sequence if that is the reason."""
    reason = finish_reason(completion)
    if reason == "tool_calls":
        return "tool_use", None
    if reason == "length":
        is_full = len(completion.token_ids) < body.values.max_tokens
        return "model_context_window_exceeded" if is_full else "max_tokens", None
    if isinstance(completion.stopped_by, str):
        return "stop_sequence", completion.stopped_by
    return "end_turn", None


def usage_of(completion: Completion) -> dict[str, Any]:
    usage = _usage(completion.prompt_tokens, completion.cached_tokens, len(completion.token_ids))
    if completion.reasoning_tokens:
        usage["output_tokens_details"] = {"thinking_tokens": completion.reasoning_tokens}
    return usage | weights_version([completion])


def _usage(prompt: int, cached: int, new: int) -> dict[str, Any]:
    """Numbers of tokens. The cache needs no writing that anyone pays for, so nothing counts as its creation."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": new,
    }


def _head(body: ParsedBody) -> dict[str, Any]:
    return {
        "id": f"msg_{body.key.text}",
        "type": "message",
        "role": "assistant",
        "model": body.model,
        "seed": body.seed,
        "system_fingerprint": f"onward-{__version__}",
    }


def _signature(body: ParsedBody, place: int) -> str:
    """The signature of a thinking block. It is not checked: clients only expect that there is one."""
    return body.key.derived(f"signature {place}")


_SPECIAL = re.compile(r'["\\\x00-\x1f]')


class JsonText:
    """JSON in parts. Control characters in strings, which JSON forbids and many models write, become escapes."""

    def __init__(self) -> None:
        self._begin = 0  # of the next part
        self._escaped = -1  # the place after a backslash
        self._in_string = False

    def add(self, text: str) -> str:
        result = _SPECIAL.sub(self._replaced, text)
        self._begin += len(text)
        return result

    def _replaced(self, match: re.Match[str]) -> str:
        char, at = match.group(), self._begin + match.start()
        if at == self._escaped:
            return char
        if char == '"':
            self._in_string = not self._in_string
        elif char == "\\":
            self._escaped = at + 1
        elif self._in_string:
            return encode_basestring(char)[1:-1]
        return char


# The kinds of deltas, and the name of their text, by the type of the block.
_DELTAS: Mapping[str, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessageEventStream:
    """The events of the response to one body as server-sent events. Call `begin` first; `end` or `error` last. One
    block is open at a time."""

    def __init__(self, body: ParsedBody) -> None:
        self._body = body
        self._omits_thinking = omits_thinking(body)
        self._events: list[str] = []  # to be sent
        self._tokens = 0  # sent
        self._place = -1  # of the open block, or the last one
        self._open: str | None = None  # its type
        self._json = JsonText()  # of the last call
        self._opening = ""  # of the open block's deltas, up to the text

    def begin(self, at: int) -> list[str]:
        head, prompt = _head(self._body), len(self._body.requests[0].prompt)
        stop: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        self._emit("message_start", message={**head, **stop, "usage": _usage(prompt, 0, 0)})
        self._emit("ping")
        return self._sent()

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        return counted_events(pieces, self._format)

    def _format(self, piece: Piece) -> list[str]:
        self._tokens += 1
        if piece.message:
            self._add(piece.message)
        return self._sent()

    def end(self, at: int, completion: Completion) -> list[str]:
        """The events for the remaining content, the end of the last block, and the stop reason."""
        if not self._tokens and completion.message is not None:  # of beam search
            self._add(completion.message.as_delta())
        self._close()
        reason, sequence = stop_of(self._body, completion)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        self._emit("message_delta", delta=delta, usage=usage_of(completion), **self._body.receipt(completion))
        self._emit("message_stop")
        return self._sent()

    def finish(self) -> list[str]:
        return []

    def error(self, error: OnwardError) -> list[str]:
        return [f"event: error\ndata: {as_json(message_error(error))}\n\n"]

    def _add(self, delta: MessageDelta) -> None:
        calls = delta.tool_calls
        if delta.reasoning:
            self._add_text("thinking", delta.reasoning)
        if calls and calls[0].id is None:  # the rest of the open call comes before any text
            self._extend(self._json.add(calls[0].arguments))
            calls = calls[1:]
        if delta.content:
            self._add_text("text", delta.content)
        for call in calls:
            self._begin_call(call)

    def _add_text(self, kind: str, text: str) -> None:
        if self._open != kind:
            self._start({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        if not (kind == "thinking" and self._omits_thinking):
            self._extend(text)

    def _begin_call(self, call: ToolCallDelta) -> None:
        self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        self._json = JsonText()
        self._extend(self._json.add(call.arguments))

    def _extend(self, text: str) -> None:
        """Add text to the open block."""
        if text:
            self._events.append(f"{self._opening}{encode_basestring(text)}}}}}\n\n")

    def _start(self, block: Mapping[str, Any]) -> None:
        """Close the open block, and start one."""
        self._close()
        self._open, self._place = block["type"], self._place + 1
        self._emit("content_block_start", index=self._place, content_block=block)
        kind, name = _DELTAS[block["type"]]
        opening = f'{{"type":"content_block_delta","index":{self._place},"delta":{{"type":"{kind}","{name}":'
        self._opening = f"event: content_block_delta\ndata: {opening}"

    def _close(self) -> None:
        if self._open is None:
            return
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": _signature(self._body, self._place)}
            self._emit("content_block_delta", index=self._place, delta=delta)
        self._emit("content_block_stop", index=self._place)
        self._open = None

    def _emit(self, type: str, /, **fields: Any) -> None:
        self._events.append(f"event: {type}\ndata: {as_json({'type': type, **fields})}\n\n")

    def _sent(self) -> list[str]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events
