"""Stored responses and conversations: continuations, owners, and lifetimes."""

import json
import sqlite3
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import LiveServer, Stream

import onward
from onward.errors import RequestError
from onward.protocols import BodyError, BodyReader
from onward.server import Settings, check_response_store
from onward.server.response_store import INPUT, ResponseStore

Start = Callable[..., LiveServer]
PATH = "/v1/responses"
SHORT: dict[str, Any] = {"model": "demo", "max_output_tokens": 8, "extra_body": {"seed": 3}}
USER = {"role": "user", "content": "Tell me a story."}


def sdk(server: LiveServer, key: str = "none") -> Any:
    """OpenAI's client, whose types have many kinds of items."""
    return server.openai(key)


def prompt_of(server: LiveServer, **fields: Any) -> int:
    answer = server.post(f"{PATH}/input_tokens", fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["input_tokens"]  # type: ignore[no-any-return]


def test_a_stored_response_equals_the_sent_one(server: LiveServer) -> None:
    """Whole or as the last event of a stream, with each field."""
    body = {"input": "Hello!", "max_output_tokens": 6, "metadata": {"a": "b"}, "prompt_cache_key": "k"}
    sent = server.post(PATH, body).json()
    assert sent["store"] is True
    assert server.get(f"{PATH}/{sent['id']}").json() == sent
    last = json.loads(server.stream(PATH, body).events[-1])["response"]
    assert server.get(f"/responses/{last['id']}").json() == last
    with sdk(server) as client:
        assert client.responses.retrieve(sent["id"]).model_dump(mode="json", exclude_unset=True) == sent


def test_a_stream_is_stored_before_its_last_event_is_sent(server: LiveServer) -> None:
    """A turn that follows at once finds the turn before."""
    with sdk(server) as client:
        last = None
        for text in ("Hi", "More", "And?"):
            stream = client.responses.create(input=text, stream=True, previous_response_id=last, **SHORT)
            last = next(event.response.id for event in stream if event.type == "response.incomplete")


@pytest.mark.parametrize("stream", [False, True])
def test_a_continued_response_is_the_whole_conversation(server: LiveServer, stream: bool) -> None:
    """The same ids, and the prefix cache has the earlier turns."""
    body: dict[str, Any] = {"max_output_tokens": 10, "seed": 4, "stream": stream}
    whole: list[dict[str, Any]] = []
    last = None
    for text in ("Tell me a long story of the harbour.", "And then?", "How does it end?"):
        turn = {**body, "input": text} | ({} if last is None else {"previous_response_id": last})
        response = answer_of(server, turn)
        whole.append({"role": "user", "content": text})
        alone = answer_of(server, {**body, "input": whole, "store": False})
        assert texts(response) == texts(alone)
        assert response["usage"]["input_tokens"] == alone["usage"]["input_tokens"]
        whole += response["output"]
        last = response["id"]
    assert response["usage"]["input_tokens_details"]["cached_tokens"] > 0
    assert response["previous_response_id"] is not None


def answer_of(server: LiveServer, body: dict[str, Any]) -> dict[str, Any]:
    if body["stream"]:
        return json.loads(server.stream(PATH, body).events[-1])["response"]  # type: ignore[no-any-return]
    return server.post(PATH, body).json()  # type: ignore[no-any-return]


def texts(response: dict[str, Any]) -> list[str]:
    return [part["text"] for item in response["output"] for part in item["content"]]


def test_instructions_apply_to_one_response(server: LiveServer) -> None:
    with sdk(server) as client:
        first = client.responses.create(input="Hi", instructions="Be brief.", **SHORT)
        count = prompt_of(server, input="More", previous_response_id=first.id)
        whole = [{"role": "user", "content": "Hi"}, *(item.model_dump() for item in first.output)]
        assert count == prompt_of(server, input=[*whole, {"role": "user", "content": "More"}])


def test_items_of_the_input_are_listed(server: LiveServer) -> None:
    """Including those of earlier responses; in pages, the last first."""
    with sdk(server) as client:
        first = client.responses.create(input="Hi", **SHORT)
        items: Any = [
            {"role": "developer", "content": "Be kind."},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_own"},
            {"type": "function_call_output", "call_id": "c", "output": "5"},
            {"type": "message", "role": "assistant", "content": "Five."},
        ]
        second = client.responses.create(input=items, previous_response_id=first.id, **SHORT)
        listed = client.responses.input_items.list(second.id, order="asc").data
        assert [item.type for item in listed] == [
            *("message", "message", "message", "function_call", "function_call_output", "message")
        ]
        assert listed[0].content[0].text == "Hi"
        assert listed[1].id == first.output[0].id
        assert listed[3].id == "fc_own"
        assert len({item.id for item in listed}) == 6
        paged = list(client.responses.input_items.list(second.id, limit=4))
        assert [item.id for item in reversed(paged)] == [item.id for item in listed]
        whole = [item.model_dump(exclude_unset=True) for item in listed]
        assert prompt_of(server, previous_response_id=second.id) == prompt_of(
            server, input=[*whole, *(item.model_dump() for item in second.output)]
        )


def test_an_item_can_be_referenced(server: LiveServer) -> None:
    with sdk(server) as client:
        first = client.responses.create(input="Hi", **SHORT)
        (item,) = first.output
        for reference in ({"type": "item_reference", "id": item.id}, {"id": item.id}):
            count = prompt_of(server, input=[USER, reference, USER])
            assert count == prompt_of(server, input=[USER, item.model_dump(), USER])
        with pytest.raises(openai.NotFoundError, match="'msg_0'"):
            client.responses.create(input=[{"type": "item_reference", "id": "msg_0"}], **SHORT)


def test_a_conversation_takes_each_turn(server: LiveServer) -> None:
    with sdk(server) as client:
        talk = client.conversations.create(items=[{"role": "user", "content": "Hi"}], metadata={"topic": "foxes"})
        assert client.conversations.retrieve(talk.id) == talk
        changed = client.conversations.update(talk.id, metadata={"topic": "geese"})
        assert (changed.id, changed.metadata) == (talk.id, {"topic": "geese"})
        first = client.responses.create(input="More", conversation=talk.id, **SHORT)
        assert first.conversation is not None
        assert first.conversation.id == talk.id
        events = list(client.responses.create(input="On", conversation={"id": talk.id}, stream=True, **SHORT))
        second = events[-1].response
        listed = client.conversations.items.list(talk.id, order="asc").data
        assert [item.role for item in listed] == ["user", "user", "assistant", "user", "assistant"]
        assert [item.id for item in listed[2::2]] == [first.output[0].id, second.output[0].id]
        whole = [item.model_dump(exclude_unset=True) for item in listed]
        assert second.usage.input_tokens == prompt_of(server, input=whole[:4])
        assert prompt_of(server, conversation=talk.id) == prompt_of(server, input=whole)
        assert client.conversations.items.retrieve(listed[1].id, conversation_id=talk.id) == listed[1]
        added = client.conversations.items.create(talk.id, items=[{"role": "user", "content": "Five"}])
        assert added.data[0].content[0].text == "Five"
        client.conversations.items.delete(listed[0].id, conversation_id=talk.id)
        left = client.conversations.items.list(talk.id, order="asc", limit=100).data
        assert [item.id for item in left] == [*(item.id for item in listed[1:]), added.data[0].id]
        assert client.conversations.delete(talk.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(talk.id)
        assert client.responses.retrieve(second.id).id == second.id
        with pytest.raises(openai.NotFoundError, match="deleted or has expired"):
            client.responses.create(input="x", previous_response_id=second.id, **SHORT)


def test_a_repeated_turn_of_a_conversation_continues_the_same_items(server: LiveServer) -> None:
    """The conversation has the turn when the client asks for the last event again: the stream is still the same."""
    with sdk(server) as client:
        talk = client.conversations.create().id
    body = {"input": "Hi", "conversation": talk, "max_output_tokens": 12, "seed": 5, "stream": True}
    text = server.stream(PATH, body).text
    ids = [line[4:] for line in text.split("\n") if line.startswith("id: ")]
    server.post(PATH, {"input": "Another", "conversation": talk, "max_output_tokens": 3})
    rest = server.post(PATH, body, headers={"last-event-id": ids[len(ids) // 2]})
    assert rest.status_code == 200
    again = rest.text.split("\n\n")
    assert len(again) > 3
    assert text.split("\n\n")[-len(again) : -2] == again[:-2]  # the last event also has the cached tokens
    with sdk(server) as client:
        assert len(client.conversations.items.list(talk).data) == 4


def test_deleted_responses_are_gone(server: LiveServer) -> None:
    with sdk(server) as client:
        first = client.responses.create(input="Hi", **SHORT)
        second = client.responses.create(input="Hi", previous_response_id=first.id, **SHORT)
        client.responses.delete(first.id)
        for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                call(first.id)
        with pytest.raises(openai.NotFoundError, match=first.id):
            client.responses.create(input="x", previous_response_id=second.id, **SHORT)
        assert client.responses.retrieve(second.id).id == second.id


def test_responses_with_store_false_are_not_stored(server: LiveServer) -> None:
    with sdk(server) as client:
        alone = client.responses.create(input="Hi", store=False, **SHORT)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(alone.id)
        first = client.responses.create(input="Hi", **SHORT)
        last = client.responses.create(input="Hi", previous_response_id=first.id, store=False, **SHORT)
        assert last.usage.input_tokens > alone.usage.input_tokens


def test_stored_responses_belong_to_an_api_key(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, api_keys=["one", "two"])
    with sdk(server, "one") as own, sdk(server, "two") as other:
        first = own.responses.create(input="Hi", **SHORT)
        talk = own.conversations.create(items=[{"role": "user", "content": "Hi"}])
        item = own.conversations.items.list(talk.id).data[0]
        reference: Any = [{"type": "item_reference", "id": item.id}]
        calls: list[Callable[[Any], object]] = [
            lambda client: client.responses.retrieve(first.id),
            lambda client: client.responses.input_items.list(first.id),
            lambda client: client.responses.create(input="x", previous_response_id=first.id, **SHORT),
            lambda client: client.responses.create(input=reference, **SHORT),
            lambda client: client.conversations.retrieve(talk.id),
            lambda client: client.conversations.update(talk.id, metadata={}),
            lambda client: client.conversations.items.create(talk.id, items=[{"role": "user", "content": "x"}]),
            lambda client: client.conversations.items.retrieve(item.id, conversation_id=talk.id),
            lambda client: client.responses.create(input="x", conversation=talk.id, **SHORT),
            lambda client: client.responses.delete(first.id),
            lambda client: client.conversations.delete(talk.id),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                call(other)
            call(own)


def test_a_file_survives_a_restart(start: Start, lm: onward.LanguageModel, tmp_path: Path) -> None:
    file = tmp_path / "responses.db"
    body = {"input": "Hi", "max_output_tokens": 6, "seed": 1}
    with LiveServer({"demo": lm}, response_store=str(file)) as server:
        first = server.post(PATH, body).json()
        talk = server.post("/v1/conversations", {"items": [USER]}).json()
        more = {"previous_response_id": first["id"], **body}
        before = server.post(PATH, more).json()
    assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()} == {0o600}
    with LiveServer({"demo": lm}, response_store=str(file)) as server:
        assert server.get(f"{PATH}/{first['id']}").json() == first
        assert server.get(f"/v1/conversations/{talk['id']}").json() == talk
        assert texts(server.post(PATH, more).json()) == texts(before)


def test_two_servers_share_a_file(start: Start, lm: onward.LanguageModel, tmp_path: Path) -> None:
    servers = [start({"demo": lm}, response_store=str(tmp_path / "r.db")) for _ in range(2)]
    last = None
    for turn in range(4):
        fields: dict[str, Any] = {} if last is None else {"previous_response_id": last}
        answer = servers[turn % 2].post(PATH, {"input": "Hi", "max_output_tokens": 2, **fields})
        assert answer.status_code == 200
        last = answer.json()["id"]


def test_an_unusable_file_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database" * 100)
    connection = sqlite3.connect(tmp_path / "other")
    connection.execute("CREATE TABLE other (id)")
    connection.close()
    for name in ("text", "other", "no-folder/file", "."):
        with pytest.raises(RequestError, match=r"the response store .* cannot be opened"):
            check_response_store(Settings(response_store=str(tmp_path / name)))
    check_response_store(Settings(response_store=str(tmp_path / "new")))
    check_response_store(Settings(response_store=str(tmp_path / "new")))


def test_a_failing_store_fails_no_response(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm})
    store = server.app.service.store
    assert store is not None
    first = server.post(PATH, {"input": "Hi", "max_output_tokens": 2}).json()
    store.close()
    assert server.post(PATH, {"input": "Hi", "max_output_tokens": 2}).status_code == 200
    assert json.loads(server.stream(PATH, {"input": "Hi", "max_output_tokens": 2}).events[-1])["response"]
    refused = server.get(f"{PATH}/{first['id']}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "response_store")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def response(id: str, text: str = "") -> dict[str, Any]:
    return {"id": id, "output": [{"id": f"msg_{id}", "text": text}], "status": "completed"}


def test_entries_expire_after_their_last_use() -> None:
    store, clock = ResponseStore(":memory:", 10.0, 2**20, clock := Clock()), clock
    store.put("", response("resp_a"), [{"id": "in"}], None)
    store.put("", response("resp_b"), [], "resp_a")
    clock.now += 9
    assert [item["id"] for item in store.context("", "resp_b")] == ["in", "msg_resp_a", "msg_resp_b"]
    clock.now += 9  # both were used
    assert [item["id"] for item in store.context("", "resp_b", through=INPUT)] == ["in", "msg_resp_a"]
    clock.now += 11
    for call in (store.get, store.context, store.delete):
        with pytest.raises(BodyError) as refused:
            call("", "resp_b")
        assert refused.value.status == 404
    with pytest.raises(BodyError):
        store.item("", "in")


def test_the_store_is_limited_and_fair() -> None:
    """The oldest entries go, of the owner who has most; one that is too large is not stored."""
    store, clock = ResponseStore(":memory:", 1e9, 20_000, clock := Clock()), clock
    store.put("little", response("resp_little", "x" * 1000), [], None)
    for number in range(12):
        clock.now += 1
        store.put("much", response(f"resp_{number}", "x" * 1000), [], None)
    assert store.get("little", "resp_little")
    left = [number for number in range(12) if has(store, "much", f"resp_{number}")]
    assert left == list(range(left[0], 12))
    assert 0 < left[0] < 11
    with pytest.raises(BodyError) as refused:
        store.context("little", "resp_little", limit=1000)
    assert refused.value.status == 413
    store.put("much", response("resp_huge", "x" * 20_000), [], None)
    assert not has(store, "much", "resp_huge")
    assert has(store, "much", "resp_11")


def has(store: ResponseStore, owner: str, id: str) -> bool:
    try:
        return bool(store.get(owner, id))
    except BodyError:
        return False


def test_a_final_response_does_not_change() -> None:
    store = ResponseStore(":memory:", 1e9, 2**20)
    store.put("", {**response("resp_a"), "status": "queued"}, [], None, is_final=False)
    store.put("", response("resp_a", "first"), [], None)
    store.put("", response("resp_a", "second"), [], None)
    assert store.get("", "resp_a") == response("resp_a", "first")


def test_a_killed_process_leaves_whole_entries(tmp_path: Path) -> None:
    """A transaction that was not committed leaves nothing."""
    file = str(tmp_path / "r.db")
    store = ResponseStore(file, 1e9, 2**20)
    store.put("", response("resp_a"), [], None)
    store._db.execute("BEGIN IMMEDIATE")
    store._add("resp_a", [{"id": "half"}])
    store._db.close()  # as the end of the process does
    again = ResponseStore(file, 1e9, 2**20)
    assert [item["id"] for item in again.context("", "resp_a")] == ["msg_resp_a"]


def test_a_background_response(server: LiveServer) -> None:
    with sdk(server) as client:
        queued = client.responses.create(input="Hi", background=True, **SHORT)
        assert queued.status == "queued"
        assert queued.output == []
        deadline = time.monotonic() + 60
        while (current := client.responses.retrieve(queued.id)).status in ("queued", "in_progress"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        alone = client.responses.create(input="Hi", **SHORT)
        assert current.status == "incomplete"
        assert current.background is True
        assert current.output_text == alone.output_text
        assert client.responses.cancel(queued.id).status == "incomplete"
        assert client.responses.create(input="x", previous_response_id=queued.id, **SHORT).output
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.cancel(alone.id)


def test_a_background_response_can_be_cancelled(server: LiveServer) -> None:
    long: dict[str, Any] = {"model": "demo", "max_output_tokens": 900, "extra_body": {"eos": []}}
    with sdk(server) as client:
        queued = client.responses.create(input="Hi", background=True, **long)
        with pytest.raises(openai.BadRequestError, match="in progress"):
            client.responses.create(input="x", previous_response_id=queued.id, **SHORT)
        assert client.responses.cancel(queued.id).status == "cancelled"
        assert client.responses.retrieve(queued.id).status == "cancelled"
        deleted = client.responses.create(input="Hi", background=True, **long)
        client.responses.delete(deleted.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(deleted.id)
    server.wait_idle()
    assert server.app.service.background is not None
    assert not server.app.service.background.running


def test_shutdown_ends_background_responses(lm: onward.LanguageModel, tmp_path: Path) -> None:
    body = {"input": "Hi", "background": True, "max_output_tokens": 900, "eos": []}
    with LiveServer({"demo": lm}, response_store=str(tmp_path / "r.db")) as server:
        id = server.post(PATH, body).json()["id"]
        for active in list(server.app.service.live):
            active.subscribers.clear()
        server.app.service.cancel_all()
        server.wait_idle()
    with LiveServer({"demo": lm}, response_store=str(tmp_path / "r.db")) as server:
        ended = server.get(f"{PATH}/{id}").json()
        assert ended["status"] == "failed"
        assert ended["error"]["code"] == "server_error"


def test_reasoning_makes_the_round_trip(server: LiveServer) -> None:
    """Reasoning in encrypted_content is the same as in content, on any server."""
    from onward.protocols.response_items import encoded_reasoning

    value = encoded_reasoning("Hm. Ünique")
    whole = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    sealed = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": encoded_reasoning("Hm.")}
    last = {"role": "assistant", "content": "Yes."}
    assert prompt_of(server, input=[USER, whole, last, USER]) == prompt_of(server, input=[USER, sealed, last, USER])
    for wrong in (value[:-4], value[:-6] + "AAAAAA", value.replace("1.", "1.AAAA"), "gAAAAABo", 5):
        answer = server.post(PATH, {"input": [USER, sealed | {"encrypted_content": wrong}]})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "input[1].encrypted_content")
        assert error["code"] == "invalid_encrypted_content"


def test_old_messages_are_dropped_on_request(server: LiveServer, lm: onward.LanguageModel) -> None:
    """Until the prompt fits with the output that is asked for: not one more, never the instructions, nor a tool's
    output without its call."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "x " * 50}
    turns = [[{"role": "user", "content": "word " * 60}, call, result, {"role": "assistant", "content": "y"}]] * 12
    items = [item for turn in turns for item in turn] + [{"role": "user", "content": "Last"}]
    body = {"input": items, "instructions": "Be brief.", "max_output_tokens": 40}
    refused = server.post(PATH, body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    reader = BodyReader(lm, "demo", streams=True)
    (request,) = reader.read(PATH, {**body, "truncation": "auto"}).requests
    context = lm.model.max_seq_len
    assert context is not None
    sizes = [len(item) for item in _suffixes(reader, body, items) if len(item) + 40 <= context]
    assert len(request.prompt) == max(sizes)
    assert lm.decode(list(request.prompt)).count("Be brief.") == 1
    assert server.post(PATH, {**body, "truncation": "auto", "max_output_tokens": 2}).status_code == 200
    alone = {**body, "truncation": "auto", "input": "word " * 3000}
    assert server.post(PATH, alone).json()["error"]["code"] == "context_length_exceeded"


def _suffixes(reader: BodyReader, body: dict[str, Any], items: list[Any]) -> list[Any]:
    prompts = []
    for start in range(len(items)):
        if items[start].get("type") != "function_call_output":
            try:
                prompts.append(reader.read(PATH, {**body, "input": items[start:]}).requests[0].prompt)
            except BodyError:
                continue
    return prompts


BAD: list[tuple[str, str, Any, int, str | None, str]] = [
    ("POST", PATH, {"input": "x", "previous_response_id": "resp_1"}, 404, "previous_response_id", "nothing is stored"),
    ("POST", PATH, {"input": "x", "previous_response_id": 5}, 400, "previous_response_id", "must be a string"),
    ("POST", PATH, {"input": "x", "conversation": "conv_1"}, 404, "conversation", "nothing is stored"),
    ("POST", PATH, {"input": "x", "conversation": {"id": "c", "x": 1}}, 400, "conversation.x", "is not a field"),
    (
        "POST",
        PATH,
        {"input": "x", "conversation": "c", "previous_response_id": "r"},
        400,
        "previous_response_id",
        "excl",
    ),
    ("POST", PATH, {"input": "x", "conversation": "c", "store": False}, 400, "conversation", "store: false"),
    ("POST", PATH, {"input": "x", "background": True, "store": False}, 400, "background", "store: false"),
    ("POST", PATH, {"input": "x", "background": True, "stream": True}, 400, "background", "stream"),
    ("POST", PATH, {}, 400, "input", "is required"),
    ("POST", PATH, {"input": [{"type": "item_reference"}]}, 400, "input[0]", "must have an id"),
    ("POST", PATH, {"input": [{"role": "user", "content": "x", "id": 5}]}, 400, "input[0].id", "must be a string"),
    ("POST", f"{PATH}/input_tokens", {"input": [{"role": "user", "content": 5}]}, 400, "input[0].content", "string"),
    ("GET", f"{PATH}/resp_0", None, 404, None, "resp_0"),
    ("GET", f"{PATH}/conv_0", None, 404, None, "conv_0"),
    ("GET", f"{PATH}/resp_0?stream=true", None, 400, "stream", "not supported"),
    ("DELETE", f"{PATH}/resp_0", None, 404, None, "resp_0"),
    ("POST", f"{PATH}/resp_0/cancel", None, 404, None, "resp_0"),
    ("POST", "/v1/conversations", {"items": [{"type": [{}], "x": 5}]}, 400, "items[0].type", "must be a string"),
    ("POST", "/v1/conversations", {"items": [{"role": "user"}]}, 400, "items[0].content", "must be a string"),
    ("POST", "/v1/conversations", {"items": [{"type": "item_reference", "id": "x"}]}, 400, "items[0]", "not supported"),
    ("POST", "/v1/conversations", {"metadata": {"a": 5}}, 400, "metadata.a", "must be a string"),
    ("POST", "/v1/conversations", {"metadata": {str(n): "" for n in range(17)}}, 400, "metadata", "at most 16"),
    ("POST", "/v1/conversations", {"name": "x"}, 400, "name", "name"),
    ("POST", "/v1/conversations/conv_0", {"metadata": {}}, 404, None, "conv_0"),
    ("POST", "/v1/conversations/conv_0/items", {"items": []}, 400, "items", "items"),
    ("GET", "/v1/conversations/conv_0/items", None, 404, None, "conv_0"),
    ("DELETE", "/v1/conversations/conv_0/items/x", None, 404, None, "conv_0"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "param", "message"), BAD)
def test_bad_requests(
    server: LiveServer, method: str, path: str, body: Any, status: int, param: str | None, message: str
) -> None:
    answer = server.send(method, path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert message in error["message"]


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=101", "order=up", "after=nothing"])
def test_bad_pages(server: LiveServer, query: str) -> None:
    talk = server.post("/v1/conversations", {"items": [USER]}).json()
    answer = server.get(f"/v1/conversations/{talk['id']}/items?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


def test_a_server_without_a_store_refuses_with_a_message(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, response_store=None)
    answer = server.post(PATH, {"input": "Hi", "max_output_tokens": 2})
    assert answer.json()["store"] is False
    for fields in ({"store": True}, {"previous_response_id": "resp_0"}, {"conversation": "c"}, {"background": True}):
        refused = server.post(PATH, {"input": "Hi", **fields})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(fields)))
        assert "--response-store" in refused.json()["error"]["message"]
    assert server.get(f"{PATH}/resp_0").json()["error"]["code"] == "not_stored"
    dropping = start({"demo": lm}, response_store=None, ignore_unsupported=True)
    answer = dropping.post(PATH, {"input": "Hi", "max_output_tokens": 2, "store": True})
    assert answer.headers["x-onward-ignored"] == "store"


def test_requests_of_codex_are_read(start: Start, lm: onward.LanguageModel) -> None:
    """Its tools that a server runs are refused by name, or dropped on request."""
    server = start({"demo": lm}, ignore_unsupported=True)
    function = {
        "type": "function",
        "name": "shell",
        "strict": False,
        "parameters": {"type": "object", "properties": {}},
    }
    body = {
        "model": "demo",
        "instructions": "You are a coding agent.",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        "tools": [function, {"type": "local_shell"}, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "client_metadata": {"x-codex-installation-id": "1"},
        "text": {"verbosity": "medium"},
        "max_output_tokens": 5,
    }
    answer = server.post(PATH, body)
    assert answer.status_code == 200
    assert answer.headers["x-onward-ignored"] == "tools[1], tools[2]"
    stream = Stream(200, {}, answer.text)
    assert json.loads(stream.events[-1])["response"]["prompt_cache_key"] == "0199"
    refused = start({"demo": lm}).post(PATH, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[1]")
