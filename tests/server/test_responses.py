"""/v1/responses: the chat of a body, its answer as items, and the events of a stream."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
from live_server import SECONDS, LiveServer

import onward
from onward.chat import AnswerFormat, AssistantMessage, ToolCall
from onward.chat.formats import FORMATS
from onward.language_model import Piece
from onward.protocols import BodyError, BodyReader
from onward.protocols.logprobs import ContentLogprobs
from onward.sampling import TokenLogprobs
from onward.tokenizer.text_stream import token_texts

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}


def test_openais_client_reads_a_response_and_its_stream(server: LiveServer, lm: onward.LanguageModel) -> None:
    options: dict[str, Any] = {"model": "demo", "input": "Tell me a story.", "max_output_tokens": 12}
    options["extra_body"] = {"seed": 3}
    alone = lm.chat([{"role": "user", "content": "Tell me a story."}], max_new_tokens=12, seed=3)
    with server.openai() as client:
        response = client.responses.create(**options)
        events = list(client.responses.create(stream=True, **options))
    assert response.output_text == alone.text
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 12
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added")
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == alone.text
    assert all(deltas)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == alone.text


def test_logprobs_equal_those_of_a_chat(server: LiveServer) -> None:
    """Whole and streamed, equal to those of a chat; the token that ends a text is excluded."""
    wanted: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 12}
    with server.openai() as client:
        options: Any = {"model": "demo", "input": "Tell me a story.", "extra_body": {"seed": 3}, **wanted}
        response = client.responses.create(**options)
        events = list(client.responses.create(stream=True, **options))
    chat = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 12, "seed": 3}
    answer = server.post("/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": 2}).json()
    entries = answer["choices"][0]["logprobs"]["content"]
    (part,) = response.output[0].content
    assert [entry.model_dump() for entry in part.logprobs] == entries
    assert response.top_logprobs == 2
    assert len(entries) == 12
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.token for event in deltas for entry in event.logprobs] == [entry["token"] for entry in entries]
    assert all("".join(entry.token for entry in event.logprobs) == event.delta for event in deltas)
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert [entry.logprob for entry in done.logprobs] == [entry["logprob"] for entry in entries]
    assert events[-1].response.output[0].content[0].logprobs == part.logprobs


ANSWERS = [
    ("Hm.</think>\n\nWell, t.", None, "Well, t."),
    ("a <tool_call>b", None, "a <tool_call>b"),
    ('t<tool_call>\n{"name": "t", "arguments": {"t": "t"}}\n</tool_call>\nt t', ("t",), "t\nt t"),
    ("a <to", ("t",), "a <to"),
    ("", None, ""),
]


@pytest.mark.parametrize(("text", "tools", "content"), ANSWERS)
@pytest.mark.parametrize("whole", [True, False])
def test_logprobs_cover_only_the_content(
    lm: onward.LanguageModel, text: str, tools: tuple[str, ...] | None, content: str, whole: bool
) -> None:
    """Every token with a character of the content is sent once, in order, and no other token is."""
    thinking = True if "</think>" in text else None
    request = lm.request([1])
    request = dataclasses.replace(request, answer=AnswerFormat(FORMATS["hermes"], tools, thinking))
    ids = lm.encode(text)
    entries = [TokenLogprobs(-float(at), ()) for at in range(len(ids))]
    completion: Any = SimpleNamespace(token_ids=ids, logprobs=entries)
    found = ContentLogprobs(request, 1, lm.tokenizer)
    logprobs = [] if whole else found.push([Piece("", *token) for token in zip(ids, entries, strict=True)])
    logprobs += found.rest(completion)
    places = [-int(entry["logprob"]) for entry in logprobs]
    assert places == sorted(set(places))
    parts = [part for part in content.split("\n") if part]
    start, expected = 0, set()
    pieces = [entry.text for entry in token_texts(ids, None, [1], lm.tokenizer)]
    for part in parts:
        start = text.rindex(part) if part == parts[-1] else text.index(part, start)
        at = 0
        for place, piece in enumerate(pieces):
            if at < start + len(part) and at + len(piece) > start:
                expected.add(place)
            at += len(piece)
    assert set(places) == expected


@pytest.mark.parametrize("text", ["é🦊b", "🦊", "t é"])
def test_logprobs_of_the_content_have_all_of_its_bytes(lm: onward.LanguageModel, text: str) -> None:
    request = dataclasses.replace(lm.request([1]), answer=AnswerFormat(FORMATS["hermes"], None, True))
    ids = lm.encode(f"Hm é.</think>{text}")
    completion: Any = SimpleNamespace(token_ids=ids, logprobs=[TokenLogprobs(-1.0, ())] * len(ids))
    logprobs = ContentLogprobs(request, 1, lm.tokenizer).rest(completion)
    assert bytes(byte for entry in logprobs for byte in entry["bytes"]).decode() == text


def test_openais_stream_helper_follows_it(server: LiveServer) -> None:
    one_of = {"choice": ["yes", "no"]}
    with server.openai() as client, client.responses.stream(model="demo", input="Hi", extra_body=one_of) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text
    assert text in one_of["choice"]


def test_items_of_the_input_are_messages(lm: onward.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    request = lm.chat_request([{"role": "user", "content": "Hi"}])

    def chat_request(self: Any, messages: Any, **options: Any) -> onward.Request:
        seen.append((messages, options))
        return request

    monkeypatch.setattr(onward.LanguageModel, "chat_request", chat_request)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "How is "}, {"type": "input_text", "text": "it?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wet."}]},
        {"role": "user", "content": "Thanks"},
    ]
    body = {"input": items, "instructions": "Be brief.", "tools": [TOOL], "reasoning": {"effort": "low"}}
    body |= {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}, "max_output_tokens": 7}
    assert BodyReader(lm, "demo", streams=True).read("/v1/responses", body).requests == (request,)
    ((messages, options),) = seen
    calls = [
        {"id": call, "type": "function", "function": {"name": "weather", "arguments": "{}"}} for call in ("c1", "c2")
    ]
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "assistant", "content": "Wet."},
        {"role": "user", "content": "Thanks"},
    ]
    assert options["max_new_tokens"] == 7
    assert options["template"] == {"reasoning_effort": "low"}
    assert options["json_schema"] == {}
    function = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    assert options["tools"] == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call"}]}, "input[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": 1}}, "conversation"),
        ({"truncation": "some"}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"input": [{"type": "reasoning", "encrypted_content": "gAAAAA"}]}, "input[0].encrypted_content"),
        ({"text": {"verbosity": "none"}}, "text"),
        ({"include": "message.output_text.logprobs"}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": -1}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"text": 5}, "text"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"tools": [{"type": "file_search"}]}, "tools[0]"),
        ({"nothing": 1}, "nothing"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_unsupported_fields_are_refused_by_name(lm: onward.LanguageModel, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BodyError) as refused:
        BodyReader(lm, "demo", streams=True).read("/v1/responses", {"input": "Hi"} | fields)
    assert refused.value.param == param


def test_reasoning_and_calls_are_items(lm: onward.LanguageModel) -> None:
    body = BodyReader(lm, "demo", streams=True).read("/v1/responses", {"input": "Hi", "seed": 1})
    completion = lm.generate(body.requests[0], max_new_tokens=3)
    message = AssistantMessage("Well.", "Hm.", (ToolCall("c1", "weather", '{"at":1}'), ToolCall("c2", "weather", "{}")))
    object.__setattr__(completion, "message", message)
    assert lm.tokenizer is not None
    stream = body.protocol.events(body)
    events = [json.loads(event.partition("data: ")[2]) for event in [*stream.begin(0), *stream.end(0, completion)]]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds.count("function_call_arguments.done") == 2
    assert kinds.index("reasoning_text.done") < kinds.index("output_text.delta")
    response = json.loads(json.dumps(events[-1]["response"]))
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert response["output"][0]["content"][0]["text"] == "Hm."
    assert response["output"][1]["content"][0]["text"] == "Well."
    assert [item["arguments"] for item in response["output"][2:]] == ['{"at":1}', "{}"]
    from openai.types.responses import Response

    Response.model_validate(response)


def test_the_path_works_without_v1(server: LiveServer) -> None:
    answer = server.post("/responses", {"input": "Hi", "max_output_tokens": 1}, params={})
    assert answer.status_code == 200
    assert answer.elapsed.total_seconds() < SECONDS
