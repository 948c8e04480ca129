"""The state in an ingress covers all its replicas, and its log has a line for each request."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_ingress import served

import onward
from onward.cluster.call import ProxiedRequest, ReplicaLostError, Reply, RouteAttempt
from onward.cluster.ingress import Ingress, RetryOptions
from onward.server import App, Settings, create_app

BODY = json.dumps({"prompt": "Once", "max_tokens": 3}).encode()
COUNTED = ("_total", "_bucket", "_sum", "_count")


class Fakes:
    """Replicas of this process. gone: no replicas any more. slow: they do not answer. dying: the next call kills it."""

    def __init__(self, apps: dict[str, App]) -> None:
        self.apps = apps
        self.gone: set[str] = set()
        self.slow: set[str] = set()
        self.dying: set[str] = set()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.apps) - self.gone

    async def serve(self, call: ProxiedRequest, route: RouteAttempt) -> AsyncGenerator[Reply, None]:
        name = route.only or min(self.names - route.avoid or self.names)
        route.assign(name)
        if name in self.slow:
            await asyncio.Event().wait()
        if name in self.dying or name in self.gone:
            self.gone.add(name)
            raise ReplicaLostError("it died", died=True)
        async for item in served(self.apps[name], call, name, "same"):
            yield item


class Reply:
    def __init__(self) -> None:
        self.status, self.headers, self.body = 0, dict[str, str](), b""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message["body"]


async def ask(app: Any, path: str, body: bytes = b"", query: bytes = b"", **headers: str) -> Reply:
    reply, bodies = Reply(), [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return bodies.pop() if bodies else await asyncio.Event().wait()

    named = {"authorization": "Bearer secret", "content-type": "application/json", **headers}
    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()]
    scope = {"type": "http", "method": "POST" if body else "GET", "path": path, "query_string": query}
    scope |= {"headers": encoded, "client": ("192.0.2.7", 1)}
    await asyncio.wait_for(app(scope, receive, reply.send), 30)
    return reply


class Deployment:
    """Two replicas of the demo model and their ingress."""

    def __init__(self, lm: onward.LanguageModel, settings: Settings) -> None:
        self.engines = {name: onward.Engine(lm) for name in "ab"}
        silent = replace(settings, access_log=False, api_keys=())  # as those of `Replica`
        self.fakes = Fakes({name: create_app({"demo": engine}, silent) for name, engine in self.engines.items()})
        self.ingress = Ingress(self.fakes, RetryOptions(), settings)
        self.ingress._state._timeout = 25.0  # for a busy machine

    async def ask(self, path: str, body: bytes = b"", query: bytes = b"", **headers: str) -> Reply:
        return await ask(self.ingress, path, body, query, **headers)

    async def write(self, name: str) -> None:
        """Have one replica write a text."""
        others, self.fakes.gone = self.fakes.gone, self.fakes.gone | (set("ab") - {name})
        assert (await self.ask("/v1/completions", BODY)).status == 200
        self.fakes.gone = others

    async def samples(self, query: bytes = b"") -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        reply = await self.ask("/metrics", query=query)
        assert reply.status == 200
        return samples_of(reply.body)


def samples_of(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = list(text_string_to_metric_families(text.decode()))
    assert len({family.name for family in families}) == len(families)
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(found) == len(samples), "each has its labels once"
    return found


@pytest.fixture(scope="module")
def lm() -> onward.LanguageModel:
    return onward.load("demo")


@pytest.fixture
def deployment(lm: onward.LanguageModel) -> Iterator[Deployment]:
    made = Deployment(lm, Settings(api_keys=("secret",), access_log=True, log_prompts=True, max_body=1000))
    yield made
    for engine in made.engines.values():
        engine.close()


def test_totals_are_sums_over_replicas(deployment: Deployment) -> None:
    async def run() -> None:
        for name in "aab":
            await deployment.write(name)
        parts = [samples_of(app.service.metrics.snapshot()()) for app in deployment.fakes.apps.values()]
        merged, by_replica = await deployment.samples(), await deployment.samples(b"by=replica")
        own = {key for key in merged if key[0].startswith("onward_replicas")}
        assert merged.keys() - own == parts[0].keys() | parts[1].keys(), "names and labels are those of one server"
        for (name, labels), number in merged.items():
            each = [part.get((name, labels), 0.0) for part in parts]
            if name == "onward_prefix_hit_ratio":
                assert number == pytest.approx(sum(each) / 2)
            elif name not in ("onward_http_responses_total", "onward_replicas", "onward_replicas_unreachable"):
                assert number == pytest.approx(sum(each)), name  # the sums of floats
        for replica, part in zip("ab", parts, strict=True):
            for (name, labels), number in part.items():
                if name != "onward_http_responses_total":
                    assert by_replica[name, tuple(sorted((*labels, ("replica", replica))))] == pytest.approx(number)
        assert (merged["onward_replicas", ()], merged["onward_replicas_unreachable", ()]) == (2, 0)
        stats = json.loads((await deployment.ask("/stats")).body)["demo"]
        each_stats = json.loads((await deployment.ask("/stats", query=b"by=replica")).body)
        assert list(each_stats) == ["a", "b"]
        assert list(stats) == list(each_stats["a"]["demo"]), "the fields of one server, in their order"
        assert stats["tokens"] == sum(of_one["demo"]["tokens"] for of_one in each_stats.values()) == 9
        assert isinstance(stats["tokens"], int)
        assert stats["seconds"]["step"] == pytest.approx(sum(s["demo"]["seconds"]["step"] for s in each_stats.values()))

    asyncio.run(run())


def test_counts_never_decrease_while_replicas_die_or_are_slow(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment.ingress._state._timeout = 2.0

    async def run() -> None:
        before: dict[Any, float] = {}
        stats_before = 0
        fakes = deployment.fakes
        for turn in range(6):
            if turn < 2:
                await deployment.write("ab"[turn])
            if turn == 2:
                fakes.slow = {"a"}
            if turn == 3:
                fakes.slow, fakes.dying = set(), {"a"}
            if turn == 4:
                fakes.apps = {"b": fakes.apps["b"], "c": create_app({"demo": deployment.engines["b"]})}
                fakes.gone = set()
            now = await deployment.samples()
            for key, number in before.items():
                if key[0].endswith(COUNTED):
                    assert now[key] >= number, (turn, key)
            if turn == 1:
                tokens_total = now["onward_engine_tokens_total", (("model", "demo"),)]
            elif turn in (2, 3):
                assert now["onward_engine_tokens_total", (("model", "demo"),)] == tokens_total == 6
                assert now["onward_replicas_unreachable", ()] == 1
            stats = json.loads((await deployment.ask("/stats")).body)["demo"]["tokens"]
            assert stats >= stats_before
            before, stats_before = now, stats

    asyncio.run(run())


def test_health_combines_all_replicas(deployment: Deployment) -> None:
    async def run() -> None:
        health = await deployment.ask("/health")
        content = json.loads(health.body)
        assert (health.status, content["status"], sorted(content["replicas"])) == (200, "ok", ["a", "b"])
        assert content["models"]["demo"]["state"] in ("idle", "running")
        deployment.ingress._state._timeout = 2.0
        deployment.fakes.slow = {"a"}
        ready = await deployment.ask("/ready")
        assert (ready.status, json.loads(ready.body)["replicas"]["a"]) == (200, "unreachable")
        deployment.engines["b"].close()
        busy = await deployment.ask("/health")
        assert (busy.status, json.loads(busy.body)["status"]) == (200, "ok"), "a was healthy a moment ago"
        assert json.loads(busy.body)["replicas"] == {"a": "unreachable", "b": "failing"}
        deployment.ingress._state._grace = 0.0
        failing = await deployment.ask("/health")
        assert (failing.status, json.loads(failing.body)["status"]) == (503, "failing")
        deployment.fakes.gone = {"a", "b"}
        assert (await deployment.ask("/health")).status == 503

    asyncio.run(run())


def test_concurrent_health_checks_share_one_reading(deployment: Deployment) -> None:
    asked: list[str] = []
    serve = deployment.fakes.serve

    def counted(call: ProxiedRequest, route: RouteAttempt) -> AsyncGenerator[Reply, None]:
        asked.append(call.path)
        return serve(call, route)

    deployment.fakes.serve = counted  # type: ignore[method-assign]

    async def run() -> None:
        replies = await asyncio.gather(*(deployment.ask("/health") for _ in range(50)))
        assert {reply.status for reply in replies} == {200}
        assert asked == ["/health"] * 2, "each replica once"
        assert (await deployment.ask("/health")).status == 200
        assert asked == ["/health"] * 4, "a later one gets a new answer"

    asyncio.run(run())


def test_refusals_of_replicas_are_passed_on(deployment: Deployment) -> None:
    async def run() -> None:
        reply = await deployment.ask("/metrics", authorization="Bearer other")
        assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
        reply = await deployment.ask("/metrics", query=b"by=model")
        assert (reply.status, json.loads(reply.body)["error"]["param"]) == (400, "by")
        assert (await deployment.ask("/metrics", b"{}")).status == 405

    asyncio.run(run())


def test_each_request_is_one_line_of_the_log(deployment: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="onward.server")
    stream = json.dumps({"prompt": "Once", "max_tokens": 3, "stream": True}).encode()
    server = create_app({"demo": deployment.engines["b"]}, Settings(api_keys=("secret",)))

    async def run() -> list[Reply]:
        replies = [await deployment.ask("/v1/completions", BODY, x_request_id="mine")]
        replies.append(await deployment.ask("/v1/completions", stream))
        replies.append(await deployment.ask("/v1/completions", BODY, authorization="Bearer other"))
        replies.append(await deployment.ask("/v1/completions", b"x" * 1001))
        replies.append(await deployment.ask("/v1/nothing"))
        replies.append(await deployment.ask("/v1/completions", b'{"prompt": "Once", "max_tokens": "x"}'))
        deployment.fakes.dying = {"a"}
        replies.append(await deployment.ask("/v1/completions", BODY))
        await ask(server, "/v1/completions", BODY)
        return replies

    replies = asyncio.run(run())
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    *of_ingress, one_server = [line for line in lines if line["event"] == "request"]
    assert [line["status"] for line in of_ingress] == [200, 200, 401, 413, 404, 400, 200]
    assert [line["status"] for line in of_ingress] == [reply.status for reply in replies]
    assert [line["id"] for line in of_ingress] == [reply.headers["x-request-id"] for reply in replies]
    assert of_ingress[0]["id"] == "mine"
    assert len({line["id"] for line in of_ingress}) == 7
    assert set(of_ingress[0]) - {"replica", "retries", "body"} == set(one_server)
    for line, is_stream in zip(of_ingress, (False, True), strict=False):
        assert (line["completion_tokens"], line["stream"], line["finish"]) == (3, is_stream, ["length"])
        assert (line["replica"], line["retries"]) == ("a", 0)
        assert (line["client"], line["method"], line["path"]) == ("192.0.2.7", "POST", "/v1/completions")
    assert of_ingress[0]["body"] == BODY.decode()
    assert of_ingress[5]["error"]["reason"].endswith("got 'x'"), "with --log-prompts, as a single server's"
    assert of_ingress[3]["error"] == {
        "code": "body_too_large",
        "reason": "the body is too large: at most 1000 bytes are allowed",
    }
    assert (of_ingress[6]["replica"], of_ingress[6]["retries"]) == ("b", 1)
