"""Answers and streams of chats and completions: the text of the Python API, and OpenAI's rules for chunks."""

import asyncio
import json
import math
from typing import Any, Literal

import openai
import pydantic
import pytest
from live_server import MESSAGES, SECONDS, LiveServer, deltas, text_of

import onward

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def test_a_chat_is_answered_as_in_python(server: LiveServer, lm: onward.LanguageModel) -> None:
    answer = server.post(CHAT, {"messages": MESSAGES, "max_tokens": 12, "seed": 4, "model": "demo"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    alone = lm.chat(MESSAGES, max_new_tokens=12, seed=4)
    (choice,) = answer.json()["choices"]
    assert choice["message"]["content"] == alone.text
    assert answer.json()["seed"] == 4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0},
        {"stop": ["e"]},
        {"n": 3},
        {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2},
        {"beams": 3, "n": 2},
        {"logprobs": True, "top_logprobs": 3},
        {"prediction": {"type": "content", "content": "Once upon a time, there was a fox."}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "bb"]}}}},
        {"regex": "[a-z]{5,9}"},
        {"choice": ["yes", "no"]},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_a_stream_adds_up_to_the_whole_answer(server: LiveServer, options: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, "max_tokens": 24, "seed": 9} | options
    if "beams" in options:
        del body["seed"]
    whole = server.post(CHAT, body).json()
    stream = server.stream(CHAT, body)
    assert stream.status == 200
    for choice in whole["choices"]:
        index = choice["index"]
        assert text_of(stream.chunks, index) == choice["message"]["content"]
        parts = list(deltas(stream.chunks, index))
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        if choice["logprobs"] is not None:
            entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
            assert entries == choice["logprobs"]["content"]
            assert all(math.isfinite(entry["logprob"]) for entry in entries)


@pytest.mark.parametrize(
    "options", [{}, {"n": 2}, {"logprobs": 2}, {"echo": True}], ids=lambda o: next(iter(o), "plain")
)
def test_a_stream_of_completions_adds_up_too(server: LiveServer, options: dict[str, Any]) -> None:
    body = {"prompt": ["The fox", "The owl"], "max_tokens": 20, "seed": 2, "return_token_ids": True} | options
    whole = server.post(TEXT, body).json()
    stream = server.stream(TEXT, body)
    assert len(whole["choices"]) == 2 * options.get("n", 1)
    for choice in whole["choices"]:
        parts = list(deltas(stream.chunks, choice["index"]))
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part.get("token_ids", ())] == choice["token_ids"]
        for name in choice["logprobs"] or ():
            streamed = [item for part in parts if part["logprobs"] for item in part["logprobs"][name]]
            assert streamed == choice["logprobs"][name]


def test_chunks_follow_openais_format(server: LiveServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 10, "seed": 1, "stream_options": {"include_usage": True}}
    stream = server.stream(CHAT, body)
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, last = stream.chunks
    assert {chunk["object"] for chunk in stream.chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in stream.chunks}) == 1
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 10
    assert all(len(chunk["choices"]) == 1 and chunk["usage"] is None for chunk in chunks)
    first, *others = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert first["role"] == "assistant"
    assert first["content"]
    assert all("role" not in delta for delta in others)
    assert others[-1] == {}
    assert all(delta["content"] for delta in others[:-1])
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes == [None] * (len(chunks) - 1) + ["length"]
    assert {chunk["seed"] for chunk in stream.chunks} == {1}


def test_without_include_usage_no_chunk_has_usage(server: LiveServer) -> None:
    stream = server.stream(CHAT, {"messages": MESSAGES, "max_tokens": 3})
    assert all("usage" not in chunk and chunk["choices"] for chunk in stream.chunks)


def test_an_empty_text_has_a_role_and_an_end(server: LiveServer) -> None:
    stream = server.stream(CHAT, {"messages": MESSAGES, "max_tokens": 0})
    assert [choice["delta"] for choice in deltas(stream.chunks)] == [{"role": "assistant", "content": ""}, {}]


def test_a_fresh_seed_is_reported_and_reproduces_the_answer(server: LiveServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 1.0}
    stream = server.stream(CHAT, body)
    (seed,) = {chunk["seed"] for chunk in stream.chunks}
    again = server.post(CHAT, body | {"seed": seed}).json()
    assert again["choices"][0]["message"]["content"] == text_of(stream.chunks)
    other = server.post(CHAT, body).json()
    assert other["seed"] != seed


def test_token_ids_are_included_in_chunks(server: LiveServer, lm: onward.LanguageModel) -> None:
    body = {"prompt": lm.encode("The fox"), "max_tokens": 8, "seed": 3, "return_token_ids": True}
    stream = server.stream(TEXT, body)
    ids = [token for choice in deltas(stream.chunks) for token in choice.get("token_ids", ())]
    assert ids == lm.generate("The fox", max_new_tokens=8, seed=3).token_ids


def test_a_prediction_is_a_draft(server: LiveServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 40, "seed": 5}
    plain = server.post(CHAT, body).json()
    text = plain["choices"][0]["message"]["content"]
    drafted = server.post(CHAT, body | {"prediction": {"type": "content", "content": text}}).json()
    assert drafted["choices"][0]["message"]["content"] == text
    details = drafted["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert "completion_tokens_details" not in plain["usage"]


def test_chunks_report_drafted_tokens(server: LiveServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 40, "seed": 5, "return_token_ids": True}
    text = server.post(CHAT, body).json()["choices"][0]["message"]["content"]
    body |= {"prediction": {"type": "content", "content": text}, "stream_options": {"include_usage": True}}
    chunks = server.stream(CHAT, body).chunks
    drafted = [flag for choice in deltas(chunks) for flag in choice.get("drafted", ())]
    assert sum(drafted) == chunks[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    assert all(len(choice["drafted"]) == len(choice["token_ids"]) for choice in deltas(chunks) if "drafted" in choice)


def test_completions_have_the_same_logprobs_as_chats(server: LiveServer, lm: onward.LanguageModel) -> None:
    body = {"max_tokens": 8, "seed": 3, "return_token_ids": True}
    chat = server.post(CHAT, body | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3}).json()
    prompt = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    text = server.post(TEXT, body | {"prompt": prompt, "logprobs": 3}).json()
    assert text["choices"][0]["logprobs"]["content"] == chat["choices"][0]["logprobs"]["content"]
    echoed = server.post(TEXT, body | {"prompt": "The fox", "logprobs": 1, "echo": True}).json()
    first = echoed["choices"][0]["logprobs"]["content"][0]
    assert (first["logprob"], first["top_logprobs"]) == (None, [])


def test_concurrent_clients_equal_each_client_alone(server: LiveServer, lm: onward.LanguageModel) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=16, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", _strict_response_validation=True) as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(24)))

    texts = asyncio.run(asyncio.wait_for(all_of_them(), SECONDS))
    assert texts == [lm.chat(MESSAGES, max_new_tokens=16, seed=seed).text for seed in range(24)]


def test_openais_client_reads_answers_and_streams(server: LiveServer, lm: onward.LanguageModel) -> None:
    with server.openai() as client:
        options: dict[str, Any] = {"model": "demo", "max_tokens": 12, "seed": 6}
        alone = lm.chat(MESSAGES, max_new_tokens=12, seed=6, logprobs=2)
        answer = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **options)
        assert answer.choices[0].message.content == alone.text
        assert answer.choices[0].logprobs.content[0].bytes
        assert answer._request_id.startswith("req_")
        stream = client.chat.completions.create(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, extra_body={"top_k": 0}, **options
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == alone.text
        assert chunks[-1].usage.completion_tokens == 12
        assert [model.id for model in client.models.list()] == ["demo"]
        assert client.models.retrieve("demo").id == "demo"
        completion = client.completions.create(prompt="The fox", logprobs=1, **options)
        assert completion.choices[0].text == lm.generate("The fox", max_new_tokens=12, seed=6).text
    with server.openai(strict=False) as client:  # its type of a completion has no chunk that is not the last
        streamed = client.completions.create(prompt="The fox", stream=True, **options)
        assert "".join(chunk.choices[0].text for chunk in streamed) == completion.choices[0].text


class Animal(pydantic.BaseModel):
    kind: Literal["fox", "owl"]
    is_small: bool


def test_openais_client_parses_answers_with_a_schema(server: LiveServer) -> None:
    with server.openai() as client:
        options: Any = {"model": "demo", "extra_body": {"seed": 4}}
        chat = client.chat.completions.parse(messages=MESSAGES, response_format=Animal, max_tokens=100, **options)
        response = client.responses.parse(input="Hi", text_format=Animal, max_output_tokens=100, **options)
    assert isinstance(chat.choices[0].message.parsed, Animal)
    assert isinstance(response.output_parsed, Animal)


def test_paths_work_without_v1(server: LiveServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "seed": 1}
    with_v1, without = (server.post(path, body).json()["choices"] for path in (CHAT, "/chat/completions"))
    assert with_v1 == without
    assert server.get("/models").json() == server.get("/v1/models").json()


def test_characters_of_several_tokens_are_sent_whole(server: LiveServer, lm: onward.LanguageModel) -> None:
    tokens = lm.encode("é🦊", add_special_tokens=False)
    body = {"prompt": "x", "max_tokens": len(tokens), "temperature": 0, "logprobs": 0, "ignore_eos": True}
    body["logit_bias"] = {str(token): 100 for token in set(tokens)}
    whole = server.post(TEXT, body).json()["choices"][0]
    stream = server.stream(TEXT, body)
    assert text_of(stream.chunks) == whole["text"]
    streamed = [text for part in deltas(stream.chunks) if part["logprobs"] for text in part["logprobs"]["tokens"]]
    assert streamed == whole["logprobs"]["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param", "status"),
    [
        (CHAT, {"messages": MESSAGES, "stream": 1}, "stream", 400),
        (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}, "stream_options", 400),
        (CHAT, {"messages": MESSAGES, "stream": True, "stream_options": {"x": 1}}, "stream_options", 400),
        (CHAT, {"messages": MESSAGES, "temprature": 1}, "temprature", 400),
        (CHAT, {"messages": MESSAGES, "model": "other"}, "model", 404),
        (CHAT, {"messages": MESSAGES, "model": 5}, "model", 400),
        (CHAT, {"messages": MESSAGES, "n": 33}, "n", 400),
        (CHAT, {"messages": MESSAGES, "return_token_ids": "yes"}, "return_token_ids", 400),
        (CHAT, {"messages": MESSAGES, "prediction": "x"}, "prediction", 400),
        (CHAT, {"messages": MESSAGES, "store": True}, "store", 400),
        (TEXT, {"prompt": "x", "stream": True, "echo": True, "logprobs": 1}, "echo", 400),
        (TEXT, {"prompt": ["x"] * 300}, "prompt", 400),
        (TEXT, {"prompt": "x", "logprobs": 21}, "logprobs", 400),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", 400),
        (TEXT, {"prompt": "x", "stop": ["s"] * 65}, "stop", 400),
        (TEXT, {"prompt": "x", "stop": "s" * 1025}, "stop", 400),
        (TEXT, {"prompt": "x", "bad_words": [[5]] * 1025}, "bad_words", 400),
        (CHAT, {"messages": "m" * 100_000}, "messages", 400),
        (TEXT, {"prompt": "x " * 3000}, "prompt", 400),
    ],
)
def test_errors_have_openais_format(
    server: LiveServer, path: str, body: dict[str, Any], param: str | None, status: int
) -> None:
    answer = server.post(path, body)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 1100


def test_openais_client_raises_its_own_errors(server: LiveServer) -> None:
    with server.openai() as client, pytest.raises(openai.NotFoundError) as wrong_model:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert wrong_model.value.code == "model_not_found"
    with server.openai() as client, pytest.raises(openai.BadRequestError) as wrong_field:
        client.chat.completions.create(model="demo", messages=MESSAGES, temperature=-1)
    assert wrong_field.value.param == "temperature"


def test_events_are_json_of_utf8(server: LiveServer) -> None:
    stream = server.stream(CHAT, {"messages": MESSAGES, "max_tokens": 5})
    assert stream.text.endswith("data: [DONE]\n\n")
    assert all(json.loads(event) for event in stream.events[:-1])
