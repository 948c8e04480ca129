"""Files over HTTP, with OpenAI's client and by hand: uploads, limits, owners, expiry, and restarts."""

import contextlib
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import PLAIN, LiveServer

import onward
from onward.errors import RequestError
from onward.protocols import BodyError
from onward.server.files.store import FileStore
from onward.server.files.upload import MultipartReader, Part

Start = Callable[..., LiveServer]
KEYS = ("first-key", "second-key")
HOUR = 3600


def upload(server: LiveServer, content: bytes = b"{}\n", key: str = "none", **fields: Any) -> httpx2.Response:
    form = {"purpose": "batch", **fields}
    headers = {"authorization": f"Bearer {key}"}
    files = {"file": ("in.jsonl", content)}
    return httpx2.post(f"{server.url}/v1/files", data=form, files=files, headers=headers, **PLAIN)


def folder_of(server: LiveServer) -> Path:
    return server.app.files.folder


def names(server: LiveServer) -> list[str]:
    return sorted(path.name for path in folder_of(server).iterdir())


def test_a_file_makes_the_round_trip(server: LiveServer) -> None:
    content = os.urandom(3 * 2**20) + b"\r\n--boundary\r\n"
    with server.openai() as client:
        file = client.files.create(file=('ä "x".jsonl', content), purpose="batch")
        assert (file.bytes, file.filename, file.purpose) == (len(content), 'ä "x".jsonl', "batch")
        assert file.expires_at == file.created_at + 30 * 24 * HOUR
        assert client.files.retrieve(file.id) == file
        answer = client.files.content(file.id)
        assert answer.read() == content
        assert answer.response.headers["content-type"] == "application/octet-stream"
        assert answer.response.headers["x-content-type-options"] == "nosniff"
        assert file in list(client.files.list())
        assert client.files.delete(file.id).deleted
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file.id)
        assert file not in list(client.files.list())


def test_files_are_private_and_their_folder_is_removed(start: Start, lm: onward.LanguageModel) -> None:
    server = LiveServer({"demo": lm})
    with server:
        upload(server)
        folder = folder_of(server)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()] == [0o600, 0o600]
    assert not folder.exists()


def test_an_owner_is_an_api_key(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, api_keys=KEYS)
    with server.openai(KEYS[0]) as first, server.openai(KEYS[1]) as second:
        file = first.files.create(file=("a", b"{}"), purpose="batch")
        assert [each.id for each in first.files.list()] == [file.id]
        assert list(second.files.list()) == []
        for call in (second.files.retrieve, second.files.content, second.files.delete):
            with pytest.raises(openai.NotFoundError) as caught:
                call(file.id)
            unknown = file.id[:-1] + ("0" if file.id[-1] != "0" else "1")
            with pytest.raises(openai.NotFoundError) as other:
                call(unknown)
            assert caught.value.message.replace(file.id, unknown) == other.value.message, "it says nothing else"
        with pytest.raises(openai.NotFoundError):
            second.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    assert httpx2.get(f"{server.url}/v1/files", **PLAIN).status_code == 401


def test_pages_add_up_to_the_whole_list(server: LiveServer) -> None:
    with server.openai() as client:
        for file in client.files.list():
            client.files.delete(file.id)
        ids = [client.files.create(file=("a", b"{}"), purpose="batch").id for _ in range(5)]
        assert [file.id for file in client.files.list(order="asc")] == ids
        assert [file.id for file in client.files.list(limit=2)] == ids[::-1], "the client asks for each page"
        assert list(client.files.list(purpose="batch_output")) == []
    for query in ("limit=0", "limit=10001", "limit=x", "after=file-1", "order=up", "no_such=1"):
        answer = server.get(f"/v1/files?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


def test_a_file_expires(start: Start, lm: onward.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start({"demo": lm})
    with server.openai() as client:
        after: Any = {"anchor": "created_at", "seconds": HOUR}
        file = client.files.create(file=("a", b"{}"), purpose="batch", expires_after=after)
        assert file.expires_at == file.created_at + HOUR
        now = time.time()
        monkeypatch.setattr("onward.server.files.store.time.time", lambda: now + HOUR - 5)
        assert client.files.retrieve(file.id) == file
        monkeypatch.setattr("onward.server.files.store.time.time", lambda: now + HOUR + 5)
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
        server.app.files.expire()
    assert names(server) == []
    assert server.app.files.used == 0


def form(*parts: tuple[str, bytes], boundary: str = "b") -> bytes:
    head = "".join
    lines = [f"--{boundary}\r\n".encode() + head(name).encode() + b"\r\n\r\n" + content for name, content in parts]
    return b"".join(line + b"\r\n" for line in lines) + f"--{boundary}--\r\n".encode()


FILE = ('Content-Disposition: form-data; name="file"; filename="a"', b"{}")
PURPOSE = ('Content-Disposition: form-data; name="purpose"', b"batch")
TYPE = "multipart/form-data; boundary=b"


def field(name: str, value: bytes) -> tuple[str, bytes]:
    return (f'Content-Disposition: form-data; name="{name}"', value)


# Content-Type, body, status, param, part of the message.
BAD: list[tuple[str, bytes, int, str | None, str]] = [
    ("", form(FILE, PURPOSE), 415, None, "none"),
    ("application/json", b"{}", 415, None, "multipart/form-data"),
    ("multipart/mixed; boundary=b", form(FILE, PURPOSE), 415, None, "multipart/mixed"),
    ("multipart/form-data", form(FILE, PURPOSE), 400, None, "no boundary"),
    ("multipart/form-data; boundary=", form(FILE, PURPOSE), 400, None, "no boundary"),
    (f"multipart/form-data; boundary={'b' * 71}", form(FILE, PURPOSE), 400, None, "no boundary"),
    (TYPE, b"", 400, None, "before its last boundary"),
    (TYPE, b"{}", 400, None, "does not start"),
    (TYPE, form(FILE, PURPOSE, boundary="c"), 400, None, "does not start"),
    (TYPE, form(FILE, PURPOSE)[:-4], 400, None, "before its last boundary"),
    (TYPE, b"--bx\r\n" + form(FILE), 400, None, "something else"),
    (TYPE, b"--b\r\n" + b"x: " + b"y" * 9000 + b"\r\n\r\n", 400, None, "8192 bytes"),
    (TYPE, form(*([FILE] * 17)), 400, "file", "twice"),
    (TYPE, form(*(field(f"f{at}", b"") for at in range(20))), 400, "f0", "not a field"),
    (TYPE, form(("no header", b"")), 400, None, "invalid header"),
    (TYPE, form(("a: \x00", b"")), 400, None, "invalid header"),
    (TYPE, form(("", b"")), 400, None, "form-data"),
    (TYPE, form(("Content-Disposition: form-data", b"")), 400, None, "no name"),
    (TYPE, form((FILE[0] + "\r\nContent-Transfer-Encoding: base64", b"e30=")), 400, None, "Transfer-Encoding"),
    (TYPE, form(("Content-Disposition: attachment; name=file; filename=a", b"{}")), 400, None, "form-data"),
    (TYPE, form(FILE), 400, "purpose", "required"),
    (TYPE, form(PURPOSE), 400, "file", "required"),
    (TYPE, form(field("file", b"{}"), PURPOSE), 400, "file", "filename"),
    (TYPE, form(FILE, FILE, PURPOSE), 400, "file", "twice"),
    (TYPE, form(PURPOSE, PURPOSE, FILE), 400, "purpose", "twice"),
    (TYPE, form(FILE, field("purpose", b"vision")), 400, "purpose", "batch"),
    (TYPE, form(FILE, field("purpose", b"x" * 2000)), 400, None, "1024 bytes"),
    (TYPE, form(FILE, PURPOSE, field("expires_after[seconds]", b"3600")), 400, "expires_after", "anchor"),
    (TYPE, form(FILE, PURPOSE, field("expires_after[anchor]", b"created_at")), 400, "expires_after", "seconds"),
]


@pytest.mark.parametrize("bad", BAD, ids=[f"{at}-{each[4]}" for at, each in enumerate(BAD)])
def test_an_invalid_form_is_refused_and_leaves_nothing(server: LiveServer, bad: Any) -> None:
    kind, body, status, param, message = bad
    before = names(server)
    answer = server.post("/v1/files", content=body, headers={"content-type": kind})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert message in error["message"]
    assert names(server) == before


def test_too_many_parts_are_refused() -> None:
    reader = MultipartReader(TYPE)
    with pytest.raises(BodyError, match="16 parts"):
        list(reader.feed(form(*([FILE] * 17))))


contents = st.lists(st.sampled_from([b"a", b"\r", b"\n", b"-", b"\r\n--b", b"--b--", b"\r\n--bx"]), max_size=8)


def read(pieces: list[bytes]) -> list[tuple[str, str | None, bytes]] | str:
    """The parts of a body that arrives in pieces, or the error."""
    reader, parts = MultipartReader(TYPE), list[tuple[str, str | None, bytes]]()
    try:
        for piece in pieces:
            for event in reader.feed(piece):
                if isinstance(event, Part):
                    parts.append((event.name, event.filename, b""))
                else:
                    parts[-1] = (*parts[-1][:2], parts[-1][2] + event)
        reader.finish()
    except BodyError as error:
        return str(error)
    return parts


@given(parts=st.lists(contents, max_size=3), cuts=st.lists(st.integers(0, 300), max_size=30), data=st.binary())
def test_a_form_does_not_depend_on_its_chunks(parts: list[list[bytes]], cuts: list[int], data: bytes) -> None:
    for body in (form(*(field(f"f{at}", b"".join(each)) for at, each in enumerate(parts))), form(FILE)[:-7] + data):
        ends = sorted(min(cut, len(body)) for cut in cuts)
        pieces = [body[a:b] for a, b in zip([0, *ends], [*ends, len(body)], strict=True)]
        assert read(pieces) == read([body]) == read([body[at : at + 1] for at in range(len(body))])


@given(parts=st.lists(contents, max_size=3))
def test_parsed_parts_equal_those_sent(parts: list[list[bytes]]) -> None:
    sent = [b"".join(each) for each in parts]
    body = form(*(field(f"f{at}", each) for at, each in enumerate(sent)), boundary="boundary")
    reader = MultipartReader("multipart/form-data; boundary=boundary")
    got: list[bytes] = []
    for event in reader.feed(body):
        if isinstance(event, Part):
            got.append(b"")
        else:
            got[-1] += event
    reader.finish()
    assert got == sent


def test_a_too_large_file_is_refused_before_it_is_read(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, max_file=2**20, files_space=3 * 2**20, max_body=4096)
    assert upload(server, b"x" * 2**20).status_code == 200, "max_body is that of other bodies"
    head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: {TYPE}\r\n"
    for length, body in ((2**21, b""), (None, b"x" * 2**21)):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            size = f"content-length: {length}\r\n" if length else "transfer-encoding: chunked\r\n"
            connection.sendall(f"{head}{size}\r\n".encode())
            if body:
                start_of = form(FILE)[:-8]
                sent = start_of + body
                with_size = f"{len(sent):x}\r\n".encode() + sent  # the chunk, and no end
                with contextlib.suppress(OSError):
                    connection.sendall(with_size)
            answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413"), answer
    assert upload(server, b"x" * 2**20).status_code == 200
    full = upload(server, b"x" * 2**20)
    assert (full.status_code, full.json()["error"]["code"]) == (413, "files_space")
    with server.openai() as client:
        for file in client.files.list():
            client.files.delete(file.id)
    assert upload(server, b"x" * 2**20).status_code == 200


def test_one_key_leaves_space_for_others(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, api_keys=KEYS, files_space=2**20)
    content = b"x" * 400_000
    assert upload(server, content, KEYS[0]).status_code == 200
    assert upload(server, content, KEYS[0]).json()["error"]["code"] == "files_space"
    assert upload(server, content, KEYS[1]).status_code == 200


def test_disconnected_and_slow_clients_leave_nothing(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, body_seconds=1.0)
    head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: {TYPE}\r\ncontent-length: 9000000\r\n\r\n".encode()
    begun = form(PURPOSE, (FILE[0], b"x" * 600_000))[:-7]
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head + begun)
        until(lambda: any(name.startswith(".upload-") for name in names(server)))
    until(lambda: names(server) == [])
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head + begun)
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")
    assert names(server) == []
    assert server.app.files.used == 0
    until(lambda: server.app.service.memory.used == 0)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_restart_keeps_files_and_removes_leftovers(tmp_path: Path, lm: onward.LanguageModel) -> None:
    folder = tmp_path / "files"
    with LiveServer({"demo": lm}, files_dir=folder) as server:
        upload(server, b"one\n")
        with server.openai() as client:
            before = list(client.files.list())
        with pytest.raises(RequestError, match="another server"):
            FileStore(folder, 2**20).open()
    (folder / ".upload-0123").write_text("cut off")
    (folder / f"file-{'0' * 24}").write_text("without metadata")
    (folder / f"file-{'1' * 24}.json").write_text("{")
    with LiveServer({"demo": lm}, files_dir=folder) as server, server.openai() as client:
        assert list(client.files.list()) == before
        assert client.files.content(before[0].id).text == "one\n"
        assert len([name for name in names(server) if not name.endswith(".lock")]) == 2


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file-of-mine").write_text("x")
    with pytest.raises(RequestError, match="other files"):
        FileStore(tmp_path, 2**20).open()
    assert (tmp_path / "file-of-mine").exists()
    with pytest.raises(RequestError, match="cannot be stored"):
        FileStore(tmp_path / "file-of-mine", 2**20).open()
