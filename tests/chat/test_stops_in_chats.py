"""A chat's answer that a stop string or a limit ends anywhere, in reasoning, content or a call: clients see a
consistent state."""

import json
from typing import Any

import pytest
from answers import ASKED, CLOCK, TEMPLATES, WEATHER, Chat, answering
from test_harmony import TEMPLATE as HARMONY
from test_truncated_calls import ANSWERS

import onward
from onward.decoding.speculation import PredictedOutput, Speculator
from onward.language_model import Completion, Piece
from onward.protocols import BodyReader

CHAT = "/v1/chat/completions"
TOOLS = [WEATHER, CLOCK]
FORMATS = ["hermes", "mistral", "mistral-args", "llama3", "harmony"]


def answering_with(format: str) -> Chat:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TEMPLATES, "harmony", HARMONY)
        return answering(format, ANSWERS[format])


def streamed(chat: Chat, stop: str) -> tuple[list[Piece], Completion]:
    pieces = []
    stream = chat.lm.stream_chat(ASKED, tools=TOOLS, stop=stop, logprobs=0)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas of chunks add up to."""
    parts: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for delta in (chunk["delta"] for chunk in chunks):
        parts["content"] += delta.get("content") or ""
        parts["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(parts["tool_calls"]):
                parts["tool_calls"].append(dict(call["function"]))
            else:
                parts["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return parts


def data(event: str) -> Any:
    """The JSON of a server-sent event."""
    return json.loads(event.partition("data: ")[2])


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.stride(2)
def test_a_stop_anywhere_leaves_a_consistent_answer(format: str) -> None:
    chat, text = answering_with(format), ANSWERS[format]
    reader = BodyReader(chat.lm, "m", streams=True)
    predicted = Speculator(PredictedOutput(chat.lm.encode(text, add_special_tokens=False)))
    ends = set()
    for begin in range(0, len(text) - 3, max(7, len(text) // 20)):
        stop = text[begin : begin + 3]
        body = reader.read(CHAT, {"messages": ASKED, "tools": TOOLS, "stop": stop, "stream": True, "logprobs": True})
        (request,) = body.requests
        chat.answers.prompt_length = len(request.prompt)
        pieces, completion = streamed(chat, stop)
        assert completion.stopped_by == stop
        drafted = chat.lm.generate(request.replace(draft=predicted))
        assert (drafted.message, drafted.token_ids) == (completion.message, completion.token_ids)
        assert (drafted.stopped_by, drafted.reasoning_tokens) == (completion.stopped_by, completion.reasoning_tokens)

        (choice,) = body.protocol.answer(body, [completion])["choices"]
        stream = body.protocol.events(body)
        events = [*stream.begin(0), *(chunk for piece in pieces for _, chunk in stream.pieces(0, [piece]))]
        chunks = [data(event)["choices"][0] for event in [*events, *stream.end(0, completion)]]
        from_chunks, message = joined(chunks), choice["message"]
        assert from_chunks["content"] == (message["content"] or "")
        assert from_chunks["reasoning"] == (message.get("reasoning") or "")
        assert from_chunks["tool_calls"] == [call["function"] for call in message.get("tool_calls", ())]
        entries = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
        assert [entry["id"] for entry in entries] == completion.token_ids
        assert stop not in from_chunks["content"] + from_chunks["reasoning"]

        whole = [is_json(call["arguments"]) for call in from_chunks["tool_calls"]]
        assert all(whole[:-1])
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]
        assert choice["finish_reason"] == ("tool_calls" if whole and whole[-1] else "stop")
        ends.add((bool(whole), choice["finish_reason"]))
    assert ends >= {(False, "stop"), (True, "stop")}


def test_a_call_ended_by_the_model_finishes_with_tool_calls() -> None:
    chat = answering("hermes", '<tool_call>\n{"name": "clock", "arguments": {"at": ')
    body = BodyReader(chat.lm, "m").read(CHAT, {"messages": ASKED, "tools": TOOLS})
    chat.answers.prompt_length = len(body.requests[0].prompt)
    (choice,) = body.protocol.answer(body, [chat.lm.generate(body.requests[0])])["choices"]
    assert choice["finish_reason"] == "tool_calls"


def built(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that the events of a response build: type, text or arguments as deltas brought them, last state."""
    items: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append({"id": event["item"]["id"], "type": event["item"]["type"], "said": ""})
        elif event["type"].endswith(".delta"):
            item = items[event["output_index"]]
            assert event["item_id"] == item["id"]
            assert "done" not in item, "what is done gets no more"
            item["said"] += event["delta"]
        elif event["type"] == "response.output_item.done":
            items[event["output_index"]]["done"] = event["item"]
    return items


@pytest.mark.parametrize("format", FORMATS)
def test_a_truncated_response_equals_the_sum_of_its_events(format: str) -> None:
    chat, text = answering_with(format), ANSWERS[format]
    reader = BodyReader(chat.lm, "m", streams=True)
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    for most in (*range(1, len(text), max(11, len(text) // 16)), len(text) + 1):
        fields = {"input": ASKED, "tools": tools, "max_output_tokens": most, "stream": True}
        body = reader.read("/v1/responses", fields)
        chat.answers.prompt_length = len(body.requests[0].prompt)
        pieces: list[Piece] = []
        with onward.Engine(chat.lm) as engine:
            generation = engine.submit(body.requests[0])
            pieces += generation
            completion = generation.result()
        stream = body.protocol.events(body)
        sent = [*stream.begin(0), *(event for piece in pieces for _, event in stream.pieces(0, [piece]))]
        events = [data(event) for event in [*sent, *stream.end(0, completion)]]
        whole = events[-1]["response"]
        assert whole == body.protocol.answer(body, [completion])
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        items = built(events)
        assert [item["done"] for item in items] == whole["output"]
        for item in items:
            final = item["done"].get("arguments")
            assert item["said"] == (item["done"]["content"][0]["text"] if final is None else final)
        is_cut = completion.finish_reason == "length"
        assert is_cut == (most <= len(text))
        assert events[-1]["type"] == f"response.{whole['status']}"
        assert whole["status"] == ("incomplete" if is_cut else "completed")
        assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)
        assert is_cut == any(item["status"] == "incomplete" for item in whole["output"])
        calls = [item for item in whole["output"] if item["type"] == "function_call"]
        assert all(is_json(call["arguments"]) for call in calls if call["status"] == "completed")
        usage = whole["usage"]
        assert usage["output_tokens"] == len(completion.token_ids)
        assert usage["output_tokens_details"]["reasoning_tokens"] == completion.reasoning_tokens
