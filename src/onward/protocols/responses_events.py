"""Responses of /v1/responses: an object with items, and the events that build it in a stream."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from onward.chat import MessageDelta, ToolCallDelta
from onward.errors import OnwardError
from onward.language_model import Completion, Piece
from onward.protocols.body import error_fields
from onward.protocols.choices import as_json, finish_reason
from onward.protocols.logprobs import ContentLogprobs
from onward.protocols.protocol import ParsedBody, ResponseKey
from onward.tokenizer import Tokenizer


class Response(BaseModel):
    """A response of /v1/responses, for the OpenAPI document."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    seed: int | None
    system_fingerprint: str


Entry = dict[str, Any]  # of logprobs


def response_body(body: ParsedBody, completion: Completion, tokenizer: Tokenizer, version: str) -> dict[str, Any]:
    """The response to a body: the result of its stream's events."""
    events = ResponseEventStream(body, tokenizer, version)
    return events.response(events.add_rest(completion), completion)


class ResponseEventStream:
    """The events of the response to one body as server-sent events. Call `begin` first; `end` or `error` last."""

    def __init__(self, body: ParsedBody, tokenizer: Tokenizer, version: str) -> None:
        self._body, self._version = body, version
        request = body.requests[0]
        self._logprobs: ContentLogprobs | None = None
        if request.options.logprobs is not None:
            self._logprobs = ContentLogprobs(request, request.options.seed, tokenizer)
        self._entries: list[Entry] = []  # of tokens whose text was not sent
        self._events: list[dict[str, Any]] = []  # to be sent
        self._number = 0  # of the next event
        self._tokens = 0  # sent
        self._items: list[_Item] = []
        self._open: dict[str, _Item] = {}  # by kind

    def begin(self, at: int) -> list[str]:
        for state in ("created", "in_progress"):
            self._emit(state, response=self.response("in_progress"))
        return self._sent()

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        events = []
        for done, piece in enumerate(pieces):
            self._tokens += 1
            if self._logprobs is not None:
                self._entries += self._logprobs.push([piece])
            if piece.message:
                self._add(piece.message)
            new = self._sent()
            events += [(done + (event is new[-1]), event) for event in new]
        return events

    def end(self, at: int, completion: Completion) -> list[str]:
        """The events for the remaining content, the ends of all items, and the complete response."""
        state = self.add_rest(completion)
        self._emit(state, response=self.response(state, completion))
        return self._sent()

    def finish(self) -> list[str]:
        return []

    def error(self, error: OnwardError) -> list[str]:
        fields = {"code": "server_error", "message": error_fields(error)["message"]}
        self._emit("failed", response=self.response("failed") | {"error": fields})
        return self._sent()

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
            if call.id is not None:
                self._close("reasoning_text")
                self._close(_CALL)
                self._start(_CALL, call)
            self._open[_CALL].add(call.arguments)

    def _add_text(self, kind: str, text: str) -> None:
        """Add text to the open item of a kind, starting one if necessary."""
        if kind not in self._open:
            self._start(kind)
        self._open[kind].add(text, self._take_entries() if kind == "output_text" else ())

    def _take_entries(self) -> list[Entry]:
        entries, self._entries = self._entries, []
        return entries

    def _start(self, kind: str, call: ToolCallDelta | None = None) -> None:
        self._open[kind] = item = _Item(kind, self._body.key, len(self._items), self._emit, call)
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
        return {
            "id": f"resp_{self._body.key.text}",
            "object": "response",
            "created_at": self._body.key.created,
            "status": state,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if state == "incomplete" else None,
            "instructions": fields.get("instructions"),
            "max_output_tokens": options.max_new_tokens,
            "metadata": fields.get("metadata", {}),
            "model": self._body.model,
            "output": [item.object() for item in self._items],
            "parallel_tool_calls": fields.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": fields.get("reasoning", {"effort": None, "summary": None}),
            "store": False,
            "temperature": options.temperature,
            "text": fields.get("text", {"format": {"type": "text"}}),
            "tool_choice": fields.get("tool_choice", "auto"),
            "tools": [{"parameters": None, "strict": None} | tool for tool in fields.get("tools", ())],
            "top_logprobs": options.logprobs or 0,
            "top_p": options.top_p,
            "truncation": "disabled",
            "usage": None if completion is None else _usage(completion),
            "user": fields.get("user"),
            "seed": self._body.seed,
            "system_fingerprint": f"onward-{self._version}",
        }


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
    }


# The prefix of an item's id, by the kind of its text in the types of events.
_CALL = "function_call_arguments"
_PREFIXES = {"reasoning_text": "rs", "output_text": "msg", _CALL: "fc"}


class _Item:
    """An item of the output while it is generated: reasoning, text or a call. emit: takes its events."""

    def __init__(
        self, kind: str, key: ResponseKey, place: int, emit: Callable[..., None], call: ToolCallDelta | None
    ) -> None:
        self.entries: list[Entry] = []  # logprobs of its tokens
        self._kind, self._emit, self._call = kind, emit, call
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
            self._emit(f"{self._kind}.done", **self._in_item, arguments=self._text, name=self._call.name)
        self._emit("output_item.done", **self._at, item=self.object())

    def object(self) -> dict[str, Any]:
        if self._call is not None:
            call = {"call_id": self._call.id, "name": self._call.name, "arguments": self._text}
            return {"id": self._id, "type": "function_call", "status": self._state, **call}
        content = [] if self._state == "in_progress" else [self._part(self._text)]
        if self._kind == "reasoning_text":
            return {"id": self._id, "type": "reasoning", "summary": [], "content": content, "status": self._state}
        message = {"role": "assistant", "content": content}
        return {"id": self._id, "type": "message", "status": self._state, **message}

    def _part(self, text: str) -> dict[str, Any]:
        """The content of an item of text."""
        annotations: dict[str, Any] = {"annotations": []} if self._kind == "output_text" else {}
        return {"type": self._kind, "text": text, **annotations, **self._logprobs(self.entries if text else ())}

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        return {"logprobs": list(entries)} if self._kind == "output_text" else {}
