"""Responses of /v1/responses: an object with items, and the events that build it in a stream."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from onward.chat import MessageDelta, ToolCallDelta
from onward.errors import OnwardError
from onward.language_model import Completion, Piece
from onward.protocols.answer_key import ResponseKey
from onward.protocols.answers import ContentLogprobs, delta_of, finish_reason
from onward.protocols.chunks import as_json
from onward.protocols.errors import error_fields
from onward.protocols.protocol import ParsedBody
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


Event = dict[str, Any]
Entry = dict[str, Any]  # of logprobs


def response_body(body: ParsedBody, completion: Completion, tokenizer: Tokenizer, version: str) -> dict[str, Any]:
    """The response to a body: the result of its stream's events."""
    answer = ResponseStream(body, tokenizer, version)
    answer.begin()
    return answer.end(completion)[-1]["response"]  # type: ignore[no-any-return]


class ResponseStream:
    """The events of the response to one body. Call `begin` first; `end` or `error` last."""

    def __init__(self, body: ParsedBody, tokenizer: Tokenizer, version: str) -> None:
        self._body, self._version = body, version
        request = body.requests[0]
        self._logprobs: ContentLogprobs | None = None
        if request.options.logprobs is not None:
            self._logprobs = ContentLogprobs(request, request.options.seed, tokenizer)
        self._entries: list[Entry] = []  # of tokens whose text was not sent
        self._number = 0
        self._tokens = 0  # sent
        self._items: list[_Item] = []
        self._open: dict[type[_Item], _Item] = {}

    def begin(self) -> list[Event]:
        response = self._response("in_progress")
        types = ("response.created", "response.in_progress")
        return self._numbered([{"type": type, "response": response} for type in types])

    def pieces(self, pieces: Sequence[Piece]) -> list[Event]:
        """The events for new tokens."""
        self._tokens += len(pieces)
        events: list[Event] = []
        for piece in pieces:
            if self._logprobs is not None:
                self._entries += self._logprobs.push([piece])
            if piece.message:
                events += self._add(piece.message)
        return self._numbered(events)

    def end(self, completion: Completion) -> list[Event]:
        """The events for the remaining content, the ends of all items, and the complete response."""
        events: list[Event] = []
        message = completion.message
        assert message is not None, "a chat's text is parsed as a message"
        if self._logprobs is not None:
            self._entries += self._logprobs.rest(completion)
        if not self._tokens:
            events += self._add(delta_of(message))
        if not self._items:
            events += self._add_text(_Text, "")
        state = "incomplete" if finish_reason(completion) == "length" else "completed"
        if (text := self._open.get(_Text)) is not None:
            text.entries += self._take_entries()
        for item in list(self._open.values()):
            events += self._close(item, state)
        events.append({"type": f"response.{state}", "response": self._response(state, completion)})
        return self._numbered(events)

    def error(self, error: OnwardError) -> list[Event]:
        """The end of a failed response."""
        fields = {"code": "server_error", "message": error_fields(error)["message"]}
        failed = self._response("failed") | {"error": fields}
        return self._numbered([{"type": "response.failed", "response": failed}])

    def _add(self, delta: MessageDelta) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            events += self._add_text(_Reasoning, delta.reasoning)
        if delta.content:
            events += self._close_open(_Reasoning) + self._add_text(_Text, delta.content)
        for call in delta.tool_calls:
            if call.id is not None:
                events += self._close_open(_Reasoning) + self._close_open(_Call)
                events += self._start(_Call(self._body.key, len(self._items), call))
            events += self._open[_Call].add(call.arguments)
        return events

    def _add_text(self, kind: "type[_Reasoning | _Text]", text: str) -> list[Event]:
        """Add text to the open item of a kind, starting one if necessary."""
        events = [] if kind in self._open else self._start(kind(self._body.key, len(self._items)))
        return events + self._open[kind].add(text, self._take_entries() if kind is _Text else ())

    def _take_entries(self) -> list[Entry]:
        entries, self._entries = self._entries, []
        return entries

    def _start(self, item: "_Item") -> list[Event]:
        self._items.append(item)
        self._open[type(item)] = item
        return item.begin()

    def _close_open(self, kind: "type[_Item]") -> list[Event]:
        return self._close(self._open[kind], "completed") if kind in self._open else []

    def _close(self, item: "_Item", state: str) -> list[Event]:
        del self._open[type(item)]
        return item.end(state)

    def _numbered(self, events: list[Event]) -> list[Event]:
        for event in events:
            event["sequence_number"] = self._number
            self._number += 1
        return events

    def _response(self, state: str, completion: Completion | None = None) -> dict[str, Any]:
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


class ResponseEventStream:
    """The events of a response as server-sent events."""

    per_piece = True

    def __init__(self, body: ParsedBody, tokenizer: Tokenizer, version: str) -> None:
        self._stream = ResponseStream(body, tokenizer, version)

    def begin(self, at: int) -> list[str]:
        return _named(self._stream.begin())

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        events = []
        for done, piece in enumerate(pieces):
            new = _named(self._stream.pieces([piece]))
            events += [(done + (event is new[-1]), event) for event in new]
        return events

    def end(self, at: int, completion: Completion) -> list[str]:
        return _named(self._stream.end(completion))

    def finish(self) -> list[str]:
        return []

    def error(self, error: OnwardError) -> list[str]:
        return _named(self._stream.error(error))


def _named(events: Sequence[Event]) -> list[str]:
    return [f"event: {event['type']}\ndata: {as_json(event)}\n\n" for event in events]


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


class _Item:
    """An item of the output while it is generated."""

    prefix: str  # of its id
    delta: str  # type of the events with new text
    has_logprobs = False

    def __init__(self, key: ResponseKey, place: int) -> None:
        self._at = {"output_index": place}
        self._id = f"{self.prefix}_{key.derived(f'item {place}')}"
        self._text = ""
        self.entries: list[Entry] = []  # logprobs of its tokens
        self._state = "in_progress"

    def begin(self) -> list[Event]:
        return [{"type": "response.output_item.added", **self._at, "item": self.object()}]

    def add(self, text: str, entries: Sequence[Entry] = ()) -> list[Event]:
        self._text += text
        self.entries += entries
        event = {"type": f"response.{self.delta}", **self._in_item, "delta": text, **self._logprobs(entries)}
        return [event] if text else []

    def end(self, state: str) -> list[Event]:
        self._state = state
        return [{"type": "response.output_item.done", **self._at, "item": self.object()}]

    def object(self) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        return {"logprobs": list(entries)} if self.has_logprobs else {}

    @property
    def _in_item(self) -> dict[str, Any]:
        return {"item_id": self._id, **self._at}


class _PartItem(_Item):
    """An item whose content is one part."""

    def begin(self) -> list[Event]:
        (added,) = super().begin()
        return [added, {"type": "response.content_part.added", **self._in_item, "part": self.part("")}]

    def end(self, state: str) -> list[Event]:
        kind = self.delta.removesuffix(".delta")
        return [
            {"type": f"response.{kind}.done", **self._in_item, "text": self._text, **self._logprobs(self.entries)},
            {"type": "response.content_part.done", **self._in_item, "part": self.part(self._text)},
            *super().end(state),
        ]

    def part(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def _in_item(self) -> dict[str, Any]:
        return {**super()._in_item, "content_index": 0}

    @property
    def _content(self) -> list[dict[str, Any]]:
        return [] if self._state == "in_progress" else [self.part(self._text)]


class _Reasoning(_PartItem):
    prefix, delta = "rs", "reasoning_text.delta"

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def object(self) -> dict[str, Any]:
        return {"id": self._id, "type": "reasoning", "summary": [], "content": self._content, "status": self._state}


class _Text(_PartItem):
    prefix, delta, has_logprobs = "msg", "output_text.delta", True

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], **self._logprobs(self.entries if text else ())}

    def object(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": self._content}
        return {"id": self._id, "type": "message", "status": self._state, **message}


class _Call(_Item):
    prefix, delta = "fc", "function_call_arguments.delta"

    def __init__(self, key: ResponseKey, place: int, call: ToolCallDelta) -> None:
        super().__init__(key, place)
        self._call_id, self._name = call.id, call.name

    def end(self, state: str) -> list[Event]:
        done = {"type": "response.function_call_arguments.done", **self._in_item}
        return [done | {"arguments": self._text, "name": self._name}, *super().end(state)]

    def object(self) -> dict[str, Any]:
        call = {"call_id": self._call_id, "name": self._name, "arguments": self._text}
        return {"id": self._id, "type": "function_call", "status": self._state, **call}
