"""Responses of /v1/responses: an object with items, and the events that build it in a stream."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from onward import __version__
from onward.chat import MessageDelta, ToolCallDelta
from onward.chat.message import TEXT_KEYS
from onward.errors import OnwardError
from onward.language_model import Completion, Piece
from onward.protocols.body import error_fields
from onward.protocols.choices import as_json, finish_reason, weights_version
from onward.protocols.logprobs import ContentLogprobs
from onward.protocols.protocol import ParsedBody, ResponseKey, counted_events
from onward.protocols.response_items import encoded_reasoning, name_fields

# The value of `include` that asks for reasoning in a form that clients send back.
ENCRYPTED = "reasoning.encrypted_content"
# Fields of a body that its response repeats only if it has them.
_ECHOED = ("max_tool_calls", "prompt_cache_key", "safety_identifier")


class Response(BaseModel):
    """A response of /v1/responses, for the OpenAPI document."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    seed: int | None
    system_fingerprint: str
    receipt: dict[str, Any] | None = None


Entry = dict[str, Any]  # of logprobs


class ResponseEventStream:
    """The events of the response to one body as server-sent events. Call `begin` first; `end` or `error` last."""

    def __init__(self, body: ParsedBody) -> None:
        self._body = body
        request = body.requests[0]
        self._logprobs: ContentLogprobs | None = None
        if request.options.logprobs is not None:
            self._logprobs = ContentLogprobs(request, request.options.seed, body.tokenizer)
        self._entries: list[Entry] = []  # of tokens whose text was not sent
        self._events: list[dict[str, Any]] = []  # to be sent
        self._number = 0  # of the next event
        self._tokens = 0  # sent
        self._items: list[_Item] = []
        self._open: dict[str, _Item] = {}  # by kind
        self._encrypts = ENCRYPTED in (body.values.include or ())
        self.final: dict[str, Any] | None = None  # the response, once it is complete

    def begin(self, at: int) -> list[str]:
        for state in ("created", "in_progress"):
            self._emit(state, response=self.response("in_progress"))
        return self._sent()

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        return counted_events(pieces, self._format)

    def _format(self, piece: Piece) -> list[str]:
        self._tokens += 1
        if self._logprobs is not None:
            self._entries += self._logprobs.push([piece])
        if piece.message:
            self._add(piece.message)
        return self._sent()

    def end(self, at: int, completion: Completion) -> list[str]:
        """The events for the remaining content, the ends of all items, and the complete response."""
        state = self.add_rest(completion)
        self.final = self.response(state, completion)
        self._emit(state, response=self.final)
        return self._sent()

    def finish(self) -> list[str]:
        return []

    def error(self, error: OnwardError) -> list[str]:
        self._emit("failed", response=self.failure(error))
        return self._sent()

    def failure(self, error: OnwardError) -> dict[str, Any]:
        """The response after an error."""
        fields = {"code": "server_error", "message": error_fields(error)["message"]}
        return self.response("failed") | {"error": fields}

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The response, if no events were sent."""
        return self.response(self.add_rest(completion), completion)

    def add_rest(self, completion: Completion) -> str:
        """Add the content that was not sent as pieces, and close all items. Returns the final status."""
        message = completion.message
        assert message is not None, "a chat's text is parsed as a message"
        if self._logprobs is not None:
            self._entries += self._logprobs.rest(completion)
        if not self._tokens:
            self._add(message.as_delta())
        if not self._items:
            self._add_text("output_text", "")
        state = "incomplete" if finish_reason(completion) == "length" else "completed"
        if (text := self._open.get("output_text")) is not None:
            text.entries += self._take_entries()
        for kind in list(self._open):
            self._close(kind, state)
        return state

    def _add(self, delta: MessageDelta) -> None:
        if delta.reasoning:
            self._add_text("reasoning_text", delta.reasoning)
        if delta.content:
            self._close("reasoning_text")
            self._add_text("output_text", delta.content)
        for call in delta.tool_calls:
            kind = _CALLS[call.type]
            if call.id is not None:
                for open in ("reasoning_text", *_CALLS.values()):
                    self._close(open)
                self._start(kind, call)
            self._open[kind].add(call.arguments)

    def _add_text(self, kind: str, text: str) -> None:
        """Add text to the open item of a kind, starting one if necessary."""
        if kind not in self._open:
            self._start(kind)
        self._open[kind].add(text, self._take_entries() if kind == "output_text" else ())

    def _take_entries(self) -> list[Entry]:
        entries, self._entries = self._entries, []
        return entries

    def _start(self, kind: str, call: ToolCallDelta | None = None) -> None:
        encrypts = self._encrypts and kind == "reasoning_text"
        name = {} if call is None else name_fields(call.name, self._body.fields.get("tools") or ())
        self._open[kind] = item = _Item(kind, self._body.key, len(self._items), self._emit, call, name, encrypts)
        self._items.append(item)
        item.begin()

    def _close(self, kind: str, state: str = "completed") -> None:
        if kind in self._open:
            self._open.pop(kind).end(state)

    def _emit(self, type: str, /, **fields: Any) -> None:
        self._events.append({"type": f"response.{type}", **fields, "sequence_number": self._number})
        self._number += 1

    def _sent(self) -> list[str]:
        """The events since the last call."""
        events, self._events = self._events, []
        return [f"event: {event['type']}\ndata: {as_json(event)}\n\n" for event in events]

    def response(self, state: str, completion: Completion | None = None) -> dict[str, Any]:
        fields, options = self._body.fields, self._body.requests[0].options
        conversation = self._body.values.conversation
        return {
            "id": f"resp_{self._body.key.text}",
            "object": "response",
            "created_at": self._body.key.created,
            "status": state,
            "background": fields.get("background", False),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if state == "incomplete" else None,
            "instructions": fields.get("instructions"),
            "max_output_tokens": options.max_new_tokens,
            "metadata": fields.get("metadata", {}),
            "model": self._body.model,
            "output": [item.object() for item in self._items],
            "parallel_tool_calls": fields.get("parallel_tool_calls", True),
            "previous_response_id": fields.get("previous_response_id"),
            "reasoning": fields.get("reasoning", {"effort": None, "summary": None}),
            "store": self._body.storage is not None,
            "temperature": options.temperature,
            "text": fields.get("text", {"format": {"type": "text"}}),
            "tool_choice": fields.get("tool_choice", "auto"),
            "tools": [_shown_tool(tool) for tool in fields.get("tools", ())],
            "top_logprobs": options.logprobs or 0,
            "top_p": options.top_p,
            "truncation": fields.get("truncation", "disabled"),
            "usage": None if completion is None else _usage(completion),
            "user": fields.get("user"),
            "seed": self._body.seed,
            "system_fingerprint": f"onward-{__version__}",
            **({} if completion is None else self._body.receipt(completion)),
            **({} if conversation is None else {"conversation": {"id": conversation.id}}),
            **{name: fields[name] for name in _ECHOED if name in fields},
        }


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": None, "strict": None} | tool if tool["type"] == "function" else tool


def _usage(completion: Completion) -> dict[str, Any]:
    new = len(completion.token_ids)
    return {
        "input_tokens": completion.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": completion.cached_tokens,
            "cache_write_tokens": completion.prompt_tokens - completion.cached_tokens,
        },
        "output_tokens": new,
        "output_tokens_details": {"reasoning_tokens": completion.reasoning_tokens or 0},
        "total_tokens": completion.prompt_tokens + new,
        **weights_version([completion]),
    }


# The prefix of an item's id, by the kind of its text in the types of events.
_CALLS = {"function": "function_call_arguments", "custom": "custom_tool_call_input"}
_PREFIXES = {"reasoning_text": "rs", "output_text": "msg", _CALLS["function"]: "fc", _CALLS["custom"]: "ctc"}


class _Item:
    """An item of the output while it is generated: reasoning, text or a call. emit: takes its events. name: the
    fields of a call with the name of its tool. encrypts: whether it has an encrypted_content."""

    def __init__(
        self,
        kind: str,
        key: ResponseKey,
        place: int,
        emit: Callable[..., None],
        call: ToolCallDelta | None,
        name: dict[str, Any],
        encrypts: bool,
    ) -> None:
        self.entries: list[Entry] = []  # logprobs of its tokens
        self._kind, self._emit, self._call, self._name, self._encrypts = kind, emit, call, name, encrypts
        self._at = {"output_index": place}
        self._id = f"{_PREFIXES[kind]}_{key.derived(f'item {place}')}"
        self._in_item = {"item_id": self._id, **self._at, **({"content_index": 0} if call is None else {})}
        self._text, self._state = "", "in_progress"

    def begin(self) -> None:
        self._emit("output_item.added", **self._at, item=self.object())
        if self._call is None:
            self._emit("content_part.added", **self._in_item, part=self._part(""))

    def add(self, text: str, entries: Sequence[Entry] = ()) -> None:
        self._text += text
        self.entries += entries
        if text:
            self._emit(f"{self._kind}.delta", **self._in_item, delta=text, **self._logprobs(entries))

    def end(self, state: str) -> None:
        self._state = state
        if self._call is None:
            self._emit(f"{self._kind}.done", **self._in_item, text=self._text, **self._logprobs(self.entries))
            self._emit("content_part.done", **self._in_item, part=self._part(self._text))
        else:
            name = {"name": self._name["name"]} if self._call.type == "function" else {}
            self._emit(f"{self._kind}.done", **self._in_item, **{TEXT_KEYS[self._call.type]: self._text}, **name)
        self._emit("output_item.done", **self._at, item=self.object())

    def object(self) -> dict[str, Any]:
        if self._call is not None:
            type = "function_call" if self._call.type == "function" else "custom_tool_call"
            call = {"call_id": self._call.id, **self._name, TEXT_KEYS[self._call.type]: self._text}
            return {"id": self._id, "type": type, "status": self._state, **call}
        content = [] if self._state == "in_progress" else [self._part(self._text)]
        if self._kind == "reasoning_text":
            item = {"id": self._id, "type": "reasoning", "summary": [], "content": content, "status": self._state}
            return item | ({"encrypted_content": encoded_reasoning(self._text)} if self._encrypts and content else {})
        message = {"role": "assistant", "content": content}
        return {"id": self._id, "type": "message", "status": self._state, **message}

    def _part(self, text: str) -> dict[str, Any]:
        """The content of an item of text."""
        annotations: dict[str, Any] = {"annotations": []} if self._kind == "output_text" else {}
        return {"type": self._kind, "text": text, **annotations, **self._logprobs(self.entries if text else ())}

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        return {"logprobs": list(entries)} if self._kind == "output_text" else {}
