"""A broken stream continues after any of its events, here or on another server, with the same rest."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from live_server import SECONDS, LiveServer

import onward
from onward.protocols import ResponseKey
from onward.server import App, Settings, create_app
from onward.testing import ByteTokenizer, tiny_model

CHAT, TEXT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ASKED = [{"role": "user", "content": "Does it rain in Oslo?"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
TOOLS = {"tools": [TOOL], "tool_choice": "required"}
RESPONSE_TOOLS = {"tools": [{"type": "function", **TOOL["function"]}], "tool_choice": "required"}
ANTHROPIC_TOOLS = {
    "tools": [{"name": "weather", "input_schema": TOOL["function"]["parameters"]}],
    "tool_choice": {"type": "any"},
}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": ASKED, "max_tokens": 12}),
    "usage": (CHAT, {"messages": ASKED, "max_tokens": 5, "stream_options": {"include_usage": True}}),
    "greedy": (CHAT, {"messages": ASKED, "max_tokens": 8, "temperature": 0}),
    "logprobs": (CHAT, {"messages": ASKED, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}),
    "ids": (CHAT, {"messages": ASKED, "max_tokens": 6, "return_token_ids": True, "seed": 3}),
    "n": (CHAT, {"messages": ASKED, "max_tokens": 6, "n": 3}),
    "beams": (CHAT, {"messages": ASKED, "max_tokens": 6, "beams": 2}),
    "tools": (CHAT, {"messages": ASKED, "max_tokens": 30, **TOOLS}),
    "text": (TEXT, {"prompt": "The fox", "max_tokens": 9, "stop": ["e"]}),
    "texts": (TEXT, {"prompt": ["The fox", "The owl"], "max_tokens": 5, "n": 2, "echo": True}),
    "text logprobs": (TEXT, {"prompt": ["The fox", "An owl"], "max_tokens": 5, "logprobs": 1}),
    "response": (RESPONSES, {"input": "Hi", "max_output_tokens": 8}),
    "response logprobs": (
        RESPONSES,
        {"input": "Hi", "max_output_tokens": 6, "include": ["message.output_text.logprobs"], "top_logprobs": 1},
    ),
    "response tools": (RESPONSES, {"input": "Hi", "max_output_tokens": 30, **RESPONSE_TOOLS}),
    "message": (ANTHROPIC, {"messages": ASKED, "max_tokens": 8, "stop_sequences": ["e"]}),
    "message tools": (ANTHROPIC, {"messages": ASKED, "max_tokens": 30, **ANTHROPIC_TOOLS}),
}


SEVERAL = ("n", "texts", "text logprobs")  # texts, whose events have no ids
SINGLE = [body for body in BODIES if body not in SEVERAL]
PIECEWISE = (RESPONSES, ANTHROPIC)  # protocols whose events are those of one piece each


class Frames(list[str]):
    """The frames of a stream, each with its id."""

    @classmethod
    def of(cls, response: httpx2.Response) -> "Frames":
        assert response.status_code == 200, response.text
        return cls(frame for frame in response.text.split("\n\n") if frame and not frame.startswith(":"))

    def id(self, at: int) -> str:
        first, _ = self[at].split("\n", 1)
        assert first.startswith("id: ")
        return first.removeprefix("id: ")

    @property
    def data(self) -> list[Any]:
        texts = [frame.split("data: ", 1)[1] for frame in self]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]


def taken_up(server: LiveServer, body: str, last: str | None = None, **fields: Any) -> Frames:
    url, asked = BODIES[body]
    headers = {} if last is None else {"last-event-id": last}
    return Frames.of(server.post(url, {**asked, "stream": True, **fields}, headers=headers))


def joined(chunks: list[Any]) -> dict[str, Any]:
    """What chunks add up to: a string of JSON for all that may come in several."""
    added: dict[str, Any] = {}
    for chunk in chunks:
        if not isinstance(chunk, dict):
            added["done"] = True
            continue
        added.setdefault("head", {name: chunk[name] for name in ("id", "object", "created", "model", "seed")})
        if chunk.get("usage"):
            added["usage"] = {name: value for name, value in chunk["usage"].items() if not name.endswith("_details")}
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in added.get("reasons", {}), "nothing comes after a text's end"
            _add(added, f"{index}", {**choice.get("delta", {}), "text": choice.get("text", "")})
            for name in ("logprobs", "token_ids"):
                for entry in _listed(choice.get(name)):
                    added.setdefault(f"{index} {name}", []).append(entry)
            if choice["finish_reason"] is not None:
                added.setdefault("reasons", {})[index] = choice["finish_reason"]
    return added


def _add(added: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _add(added, f"{name} {key}", inner)
    elif isinstance(value, list):
        for inner in value:
            _add(added, f"{name} {inner['index']}", {key: one for key, one in inner.items() if key != "index"})
    else:
        added[name] = added.get(name, "") + (value or "")


def _listed(entries: Any) -> list[Any]:
    if entries is None or isinstance(entries, list):
        return entries or []
    if entries.get("content") is not None:
        return list(entries["content"])
    return list(zip(*(entries[name] for name in ("tokens", "token_logprobs", "text_offset", "ids")), strict=True))


@pytest.fixture(scope="module")
def another(lm: onward.LanguageModel) -> Iterator[LiveServer]:
    """A server that has seen nothing."""
    with LiveServer({"demo": lm}) as live:
        yield live


@pytest.mark.parametrize("body", SINGLE)
def test_a_stream_resumes_after_any_event_on_any_server(server: LiveServer, another: LiveServer, body: str) -> None:
    whole = taken_up(server, body)
    is_response = BODIES[body][0] in PIECEWISE
    places = range(0, len(whole), 1 + len(whole) // 12)
    for at in places:
        rest = taken_up((server, another)[at % 2], body, whole.id(at))
        if is_response:
            assert without_cached(rest) == without_cached(Frames(whole[at + 1 :]))
        else:
            assert joined(whole.data[: at + 1] + rest.data) == joined(whole.data)
            again = taken_up(another, body, rest.id(0)) if len(rest) > 1 else Frames()
            assert not again or joined(whole.data[: at + 1] + rest.data[:1] + again.data) == joined(whole.data)
    assert taken_up(another, body, whole.id(-1)) == []


def without_cached(frames: Frames) -> list[str]:
    """The counts of the cache are those of a server. Anthropic's input_tokens leave out those that it had."""

    def summed(match: re.Match[str]) -> str:
        return f'"all_input_tokens":{int(match[1]) + int(match[2])}'

    anthropic = r'"input_tokens":([0-9]+),"cache_creation_input_tokens":0,"cache_read_input_tokens":([0-9]+)'
    frames = Frames(re.sub(anthropic, summed, frame) for frame in frames)
    return [re.sub(r'"(cached_tokens|cache_write_tokens)":[0-9]+', "", frame) for frame in frames]


def test_event_ids_are_unique_and_short(server: LiveServer) -> None:
    for body in SINGLE:
        frames = taken_up(server, body)
        ids = [frames.id(at) for at in range(len(frames))]
        assert len(set(ids)) == len(ids)
        assert max(map(len, ids)) < 80
        key = ResponseKey(ids[0].split(".")[0])
        head = frames.data[0].get("response") or frames.data[0].get("message") or frames.data[0]
        assert head["id"].endswith(key.text)
        if BODIES[body][0] != ANTHROPIC:  # whose messages have no time
            assert head.get("created", head.get("created_at")) == key.created


@pytest.mark.parametrize("body", SEVERAL)
def test_streams_of_several_texts_have_no_ids(server: LiveServer, body: str) -> None:
    assert not any(frame.startswith("id: ") for frame in taken_up(server, body))
    url, asked = BODIES[body]
    last = taken_up(server, "text").id(0)
    answer = server.post(url, {**asked, "stream": True}, headers={"last-event-id": last})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "last_event_id_mismatch")


def test_openais_client_resumes_a_stream(server: LiveServer) -> None:
    options: Any = {"model": "demo", "messages": ASKED, "max_tokens": 20, "stream": True, "seed": 1}
    with server.openai() as client:
        with client.chat.completions.with_streaming_response.create(**options) as response:
            lines = [line for line in response.iter_lines() if line]
        ids = [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]
        first_chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        text = "".join(choice["delta"].get("content", "") for choice in first_chunks)
        at = (len(ids) - 1) // 2  # a server that has no time sends several tokens at once
        begun = "".join(choice["delta"].get("content", "") for choice in first_chunks[: at + 1])
        rest = list(client.chat.completions.create(**options, extra_headers={"Last-Event-ID": ids[at]}))
        assert begun + "".join(chunk.choices[0].delta.content or "" for chunk in rest) == text
        ends = [choice["finish_reason"] for choice in first_chunks[: at + 1]]
        ends += [chunk.choices[0].finish_reason for chunk in rest]
        assert ends[-1] == first_chunks[-1]["finish_reason"]
        again = [
            client.responses.create(model="demo", input="Hi", extra_headers={"Idempotency-Key": "one"})
            for _ in range(2)
        ]
        assert again[0] == again[1]


# ── refused ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("last", "fields", "status", "code"),
    [
        ("12", {}, 400, "invalid_last_event_id"),
        ("x" * 5000, {}, 400, "invalid_last_event_id"),
        ("{key}.{asked}.{computed}.1,1", {}, 400, "invalid_last_event_id"),
        ("{key}.{asked}.{computed}.+", {}, 400, "invalid_last_event_id"),
        ("{key}.{asked}.{computed}.1+", {}, 400, "invalid_last_event_id"),
        ("{key}.{asked}.{computed}.1", {"max_tokens": 11}, 422, "last_event_id_mismatch"),
        ("{key}.{asked}.{computed}.1", {"n": 2}, 422, "last_event_id_mismatch"),
        ("{key}.{asked}.00000000.1", {}, 409, "fingerprint_mismatch"),
        ("{key}.{asked}.{computed}.1", {"stream": False}, 400, "invalid_value"),
    ],
)
def test_an_id_of_another_request_is_refused(
    server: LiveServer, last: str, fields: dict[str, Any], status: int, code: str
) -> None:
    key, asked, computed, _ = taken_up(server, "chat").id(1).split(".")
    header = last.format(key=key, asked=asked, computed=computed)
    url, body = BODIES["chat"]
    answer = server.post(url, {**body, "stream": True, **fields}, headers={"last-event-id": header})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert len(answer.json()["error"]["message"]) < 300


def test_a_server_of_another_model_refuses(server: LiveServer) -> None:
    demo = server.engines["demo"].lm
    other = onward.LanguageModel(tiny_model(seed=3), ByteTokenizer(), demo.chat_template)
    same = onward.LanguageModel(demo.model, demo.tokenizer, demo.chat_template, demo.defaults.replace(top_k=3))
    last = taken_up(server, "chat").id(0)
    with LiveServer({"demo": other}) as another, LiveServer({"demo": same}) as configured:
        url, body = BODIES["chat"]
        for live, status in ((another, (409, 422)), (configured, (422,))):
            answer = live.post(url, {**body, "stream": True}, headers={"last-event-id": last})
            assert answer.status_code in status


# ── in one process ──────────────────────────────────────────────────────────────────────────────────────────────────


class Caller:
    """Calls an application as an ingress does."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def messages(self, url: str, body: Any, given: dict[str, Any] | None, stop: int | None = None) -> list[Any]:
        """The messages of the application, up to number `stop`, where the caller disconnects."""
        sent: list[Any] = []
        received = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        left = asyncio.Event()

        async def receive() -> Any:
            if received:
                return received.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if stop is not None and len(sent) > stop:
                left.set()
                await asyncio.sleep(0)

        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": url,
            "raw_path": url.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json"), (b"last-event-id", b"of nobody")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "http_version": "1.1",
        }
        if given is not None:
            scope["onward"] = given
        await asyncio.wait_for(self.app(scope, receive, send), SECONDS)
        return sent


def frames_of(messages: list[Any]) -> Frames:
    text = b"".join(message["body"] for message in messages if message["type"] == "http.response.body").decode()
    return Frames(frame for frame in text.split("\n\n") if frame)


@pytest.mark.parametrize("body", BODIES)
def test_an_in_process_caller_moves_an_answer_between_applications(lm: onward.LanguageModel, body: str) -> None:
    url, asked = BODIES[body]
    asked = {**asked, "stream": True}
    with onward.Engine(lm) as one, onward.Engine(lm) as other:
        apps = [Caller(create_app({"demo": engine}, Settings(access_log=False))) for engine in (one, other)]

        async def handed_over() -> None:
            key = ResponseKey.new().text
            whole = await apps[0].messages(url, asked, {"answer": key})
            bodies = [message for message in whole if message["type"] == "http.response.body"]
            for stop in range(len(bodies)):
                before = bodies[: stop + 1]
                texts = len(before[0]["onward"]["emitted"])
                emitted = [[id for part in before for id in part["onward"]["emitted"][text]] for text in range(texts)]
                ended = [at for part in before for at in part["onward"]["ended"]]
                state = {"answer": key, "emitted": emitted, "ended": ended}
                rest = await apps[(stop + 1) % 2].messages(url, asked, state)
                if url in PIECEWISE:
                    assert without_cached(frames_of([*before, *rest])) == without_cached(frames_of(whole))
                else:
                    assert joined(frames_of([*before, *rest]).data) == joined(frames_of(whole).data)
                later = [part["onward"]["emitted"] for part in rest if part["type"] == "http.response.body"]
                everything = [ids + [id for part in later for id in part[text]] for text, ids in enumerate(emitted)]
                known = [[id for part in bodies for id in part["onward"]["emitted"][text]] for text in range(texts)]
                assert everything == known

        asyncio.run(handed_over())


def test_an_in_process_caller_gets_the_ids_known_to_the_application(lm: onward.LanguageModel) -> None:
    """Another ingress may have called before. Without the ids, the text could not be continued a second time."""
    asked = {"messages": ASKED, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with onward.Engine(lm) as engine:
        app = create_app({"demo": engine}, Settings(access_log=False))
        caller, key = Caller(app), ResponseKey.new().text

        async def messages_of(stop: int | None = None, **given: Any) -> list[Any]:
            messages = await caller.messages(CHAT, asked, {"answer": key, **given}, stop)
            return [message for message in messages if message["type"] == "http.response.body"]

        async def taken_up_again() -> None:
            whole = await messages_of()
            cut = await messages_of(stop=20)
            known = app.service.replays.emitted(ResponseKey(key))
            assert known is not None
            assert 0 < len(known[0]) < 200
            rest = await messages_of(last_event_id=frames_of(cut).id(-1))
            assert [id for part in rest for id in part["onward"]["emitted"][0]] == [
                id for part in whole for id in part["onward"]["emitted"][0]
            ]

        asyncio.run(taken_up_again())


def test_the_same_key_gives_the_same_nonstreamed_answer(lm: onward.LanguageModel) -> None:
    with onward.Engine(lm) as engine:
        caller = Caller(create_app({"demo": engine}, Settings(access_log=False)))
        for body in ("chat", "texts", "response"):
            url, asked = BODIES[body]
            state = {"answer": ResponseKey.new().text}
            answers = []
            for emitted in ({}, {"emitted": [[]] * (4 if body == "texts" else 1)}):
                _, message = asyncio.run(caller.messages(url, asked, {**state, **emitted}))
                answers.append(json.loads(message["body"]))
            for answer in answers:
                del answer["usage"]
            assert answers[0] == answers[1]
            assert answers[0]["id"].endswith(state["answer"])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"answer": "abc"}, "a response key is 32 hexadecimal digits"),
        ({"anser": "abc"}, "scope['onward'] has answer, emitted, ended and last_event_id; got 'anser'"),
        ({"emitted": [[1], [2]]}, "emitted has ids of 2 sequences, but the body asks for 1"),
        ({"emitted": [[10**9]]}, "emitted must hold ids"),
    ],
)
def test_mistakes_of_an_in_process_caller_are_errors(
    lm: onward.LanguageModel, state: dict[str, Any], message: str
) -> None:
    with onward.Engine(lm) as engine:
        caller = Caller(create_app({"demo": engine}, Settings(access_log=False)))
        start, answer = asyncio.run(caller.messages(CHAT, {**BODIES["chat"][1], "stream": True}, state))
        assert start["status"] == 400
        assert message in json.loads(answer["body"])["error"]["message"]
