"""An ingress rejects requests as a server does, before reading the body; keys are never stored or shown."""

import asyncio
import hashlib
import io
import json
import logging
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_ingress import Fakes

import onward
from onward.cli.flags import BodyFlags
from onward.cli.serve import ServerFlags
from onward.cluster.ingress import Ingress, RetryOptions
from onward.errors import OnwardError
from onward.server import App, Settings, create_app
from onward.util.api_keys import ApiKeys

pytest.importorskip("ray")
with warnings.catch_warnings(action="ignore"):  # of Ray's own
    from ray import cloudpickle, serve

    from onward.cluster.deployment import application, build_app, replicas_of
    from onward.cluster.options import DeployOptions

KEY = "sk-right"
KEYS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=12, max_size=40)


@pytest.fixture(scope="module")
def engine() -> Iterator[onward.Engine]:
    with onward.Engine(onward.load("demo")) as made:
        yield made


class Answer:
    """The data that a client has received. received: the number of parts of the body that the application read."""

    def __init__(self) -> None:
        self.status, self.body, self.received = 0, b"", 0
        self.headers: list[tuple[bytes, bytes]] = []

    def shown(self) -> Any:
        ids = (b"x-request-id", b"request-id")
        return self.status, sorted(header for header in self.headers if header[0] not in ids), self.body


def ask(app: Any, method: str, path: str, headers: dict[str, str], body: bytes = b"{}") -> Answer:
    answer = Answer()
    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]

    async def receive() -> Any:
        answer.received += 1
        if answer.received == 1:
            return {"type": "http.request", "body": body, "more_body": False}
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status, answer.headers = message["status"], list(message["headers"])
        else:
            answer.body += message.get("body", b"")

    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": encoded, "client": None}
    scope |= {"raw_path": path.encode(), "root_path": "", "scheme": "http", "http_version": "1.1", "server": None}
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 30))
    return answer


def both(engine: onward.Engine, settings: Settings) -> tuple[App, Ingress]:
    return create_app({"demo": engine}, settings), Ingress(Fakes([]), RetryOptions(), settings)


REFUSED: list[tuple[dict[str, str], int]] = [
    ({}, 401),
    ({"authorization": "Bearer sk-wrong"}, 401),
    ({"authorization": "Bearer"}, 401),
    ({"authorization": f"Basic {KEY}"}, 401),
    ({"authorization": f"Bearer sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"}, 401),
    ({"authorization": "Bearer sk-wrong", "origin": "https://a.example"}, 401),
    ({"authorization": "Bearer \xff"}, 401),
    ({"x-api-key": "sk-wrong"}, 401),
    ({"authorization": "Bearer sk-wrong", "x-api-key": KEY}, 401),
    ({"authorization": f"Bearer {KEY}", "host": "evil.example"}, 403),
    ({"host": "evil.example", "origin": "https://a.example"}, 403),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/metrics", "/stats", "/tokenize", "/nothing"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE"])
def test_an_ingress_refuses_like_a_server(engine: onward.Engine, method: str, path: str) -> None:
    settings = Settings(api_keys=(KEY,), hosts=("here.example",), cors_origins=("https://a.example",), access_log=False)
    server, ingress = both(engine, settings)
    for headers, status in REFUSED:
        sent = {"host": "here.example", "content-type": "application/json", **headers}
        one, other = (ask(app, method, path, sent) for app in (server, ingress))
        assert one.shown() == other.shown()
        assert other.status == status
        assert other.received == 0, "its body was not read"
        assert (other.body == b"") == (method == "HEAD")
        assert ("origin" in headers) == (b"access-control-allow-origin" in dict(other.headers))


def test_too_large_or_too_many_requests_are_refused_unread(engine: onward.Engine) -> None:
    settings = Settings(api_keys=(KEY,), max_body=10, max_requests=1, access_log=False)
    server, ingress = both(engine, settings)
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json", "content-length": "11"}
    for in_flight, status in ((0, 413), (1, 503)):
        server.gate.in_flight = ingress.gate.in_flight = in_flight
        one, other = (ask(app, "POST", "/v1/completions", headers) for app in (server, ingress))
        assert one.shown() == other.shown()
        assert (other.status, other.received) == (status, 0)


def test_open_paths_need_no_key_and_read_no_body() -> None:
    replicas = Fakes([], names=("a",))
    ingress = Ingress(replicas, RetryOptions(), Settings(api_keys=(KEY,), access_log=False))

    async def no_such_method(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 405, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    replicas.app = no_such_method
    assert ask(ingress, "POST", "/health", {}, b"x" * 1000).status == 405
    ((_, call),) = replicas.calls
    assert call.body == b""


def test_replicas_do_not_get_the_clients_credentials() -> None:
    replicas = Fakes([])

    async def answers(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    replicas.app = answers
    ingress = Ingress(replicas, RetryOptions(), Settings(api_keys=(KEY,)))
    headers = {"authorization": f"Bearer {KEY}", "cookie": KEY, "proxy-authorization": KEY, "x-session-id": "s"}
    headers["x-api-key"] = KEY
    assert ask(ingress, "POST", "/v1/completions", headers).status == 200
    ((_, call),) = replicas.calls
    assert set(dict(call.headers)) == {b"x-session-id", b"x-request-id"}
    assert KEY.encode() not in cloudpickle.dumps(call)


def texts_of(value: Any) -> Iterator[str]:
    yield from (repr(value), str(value), f"{value}", pickle.dumps(value).decode("latin-1"))
    yield cloudpickle.dumps(value).decode("latin-1")
    yield json.dumps(asdict(value))
    yield repr(vars(value))


@given(st.lists(KEYS, min_size=1, max_size=3))
def test_no_key_is_in_objects_that_store_it(keys: list[str]) -> None:
    settings = Settings(api_keys=tuple(keys))
    options = DeployOptions(settings={"api_keys": keys, "max_body": 1000})
    shown = [text for value in (settings, replace(settings, max_body=5), options) for text in texts_of(value)]
    shown += [cloudpickle.dumps(make(options)).decode("latin-1") for make in (application, replicas_of)]
    shown.append(repr(ServerFlags(api_key=keys)))
    shown.append(json.dumps(ServerFlags(api_key=keys).settings(BodyFlags())))
    for key in keys:
        assert settings.api_keys.contains(key.encode())  # type: ignore[attr-defined]
        assert not any(key in text for text in shown)
    assert pickle.loads(pickle.dumps(settings)) == settings == Settings(**asdict(settings))
    digests = list(settings.api_keys)
    assert not any(digest in repr(value) for digest in digests for value in (settings, options))
    assert not any(digest in cloudpickle.dumps(replicas_of(options)).decode("latin-1") for digest in digests)


MISTAKES: list[Callable[[str], object]] = [
    lambda key: Settings(api_keys=key),  # type: ignore[arg-type]
    lambda key: Settings(api_keys=(key, 5)),  # type: ignore[arg-type]
    lambda key: Settings(api_keys=(f"sha256:{key}",)),
    lambda key: DeployOptions(settings=f"api_keys: [{key}]"),  # type: ignore[arg-type]
    lambda key: DeployOptions(settings={"api_keys": [f"{key} {key}"]}),
    lambda key: DeployOptions.of({"settings": f'{{"api_keys": ["{key}'}),
    lambda key: build_app({"settings": {"api_keys": [key], "max_body": 10}}),
]


@given(KEYS, st.sampled_from(MISTAKES))
def test_no_key_is_in_an_error(key: str, mistake: Callable[[str], object]) -> None:
    assume(not key.startswith("sha256:"))
    with pytest.raises(OnwardError) as raised:
        mistake(key)
    output = io.StringIO()
    traceback.print_exception(raised.value, file=output)
    messages = [line for line in output.getvalue().splitlines() if not line.startswith(" ")]  # the others are code
    for text in (str(raised.value), repr(raised.value), *messages):
        assert key not in text


@pytest.mark.parametrize("of", ["server", "ingress"])
def test_no_key_is_in_the_log(engine: onward.Engine, of: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a right nor a wrong one, also with --log-prompts."""
    caplog.set_level(logging.DEBUG)
    settings = Settings(api_keys=(KEY,), log_prompts=True)
    replicas = Fakes([], apps=dict.fromkeys("abcd", create_app({"demo": engine}, Settings(access_log=False))))
    server, ingress = create_app({"demo": engine}, settings), Ingress(replicas, RetryOptions(), settings)
    app: Any = server if of == "server" else ingress
    for key in (KEY, "sk-wrong-one"):
        for path in ("/v1/completions", "/v1/models", "/metrics"):
            ask(app, "POST" if "completions" in path else "GET", path, {"authorization": f"Bearer {key}"}, b"body")
    assert len([record for record in caplog.records if '"event": "request"' in record.getMessage()]) >= 6
    for record in caplog.records:
        assert KEY not in record.getMessage()
        assert "sk-wrong-one" not in record.getMessage()


def test_a_configuration_stores_digests() -> None:
    digest = f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"
    assert isinstance(build_app({"settings": {"api_keys": [digest]}}), serve.Application)
    assert ApiKeys([digest]) == ApiKeys([KEY]) == (digest,)
    assert ApiKeys([digest]).contains(KEY.encode())
    assert not ApiKeys([digest]).contains(digest.encode())
    assert not ApiKeys().contains(b"")
