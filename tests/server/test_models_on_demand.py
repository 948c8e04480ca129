"""Models on demand over HTTP: loaded at the first request, unloaded when idle or for room, never while in use."""

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from live_server import PLAIN, SECONDS, LiveServer

import onward
from demo_adapters import demo_adapter
from held_engine import held
from onward.errors import CheckpointError, RequestError
from onward.protocols import BodyError
from onward.server import OnDemand
from tiny_checkpoint import make_checkpoint

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "The fox", "max_tokens": 4, "temperature": 0}
LONG = {"prompt": "The fox", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
Start = Callable[..., LiveServer]


class Opener:
    """Loads models, and counts that. gate: closed, it holds every load. fail: names whose load raises."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fail: dict[str, Exception] = {}

    def __call__(
        self, name: str, path: Path, progress: Callable[[float], None]
    ) -> tuple[onward.Engine, Mapping[str, Any]]:
        self.opened.append(name)
        progress(0.5)
        assert self.gate.wait(SECONDS)
        if name in self.fail:
            raise self.fail[name]
        return onward.Engine(onward.load(path, progress=progress)), {}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models that write different texts, and things that are no models."""
    folder = tmp_path_factory.mktemp("made")
    for name, width in (("a", 24), ("b", 32), ("c", 40)):
        make_checkpoint(folder / name, intermediate_size=width)
    (folder / "no-model").mkdir()
    (folder / "notes.txt").write_text("x")
    make_checkpoint(folder / ".hidden")
    return folder


@pytest.fixture
def models_dir(made: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    return shutil.copytree(made, tmp_path / "models")


@pytest.fixture
def opener() -> Opener:
    return Opener()


@pytest.fixture
def serve(start: Start, models_dir: Path, opener: Opener) -> Callable[..., LiveServer]:
    def serve(models: Mapping[str, Any] = {}, settings: Mapping[str, Any] = {}, **options: Any) -> LiveServer:
        on_demand = OnDemand(**{"folder": models_dir, "open": opener, "memory": 2**40} | options)
        return start(models, on_demand=on_demand, management=True, **settings)

    return serve


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def states(server: LiveServer) -> dict[str, str]:
    return {entry["id"]: entry["status"] for entry in server.get("/v1/models").json()["data"]}


def expected(folder: Path, body: Mapping[str, Any] = BODY) -> str:
    options = {"max_new_tokens": body["max_tokens"], "ignore_eos": body.get("ignore_eos", False)}
    return onward.load(folder).generate(body["prompt"], temperature=0, **options).text


def text(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]  # type: ignore[no-any-return]


def test_a_model_is_loaded_at_its_first_request(serve: Any, models_dir: Path, opener: Opener) -> None:
    server = serve()
    assert states(server) == {"a": "unloaded", "b": "unloaded", "c": "unloaded"}
    assert not opener.opened
    for name in ("a", "b", "a"):
        assert text(server.post(TEXT, {**BODY, "model": name})) == expected(models_dir / name)
    assert opener.opened == ["a", "b"]
    assert states(server) == {"a": "loaded", "b": "loaded", "c": "unloaded"}
    entry = server.get("/v1/models/a").json()
    assert entry["size_bytes"] == (models_dir / "a" / "model.safetensors").stat().st_size
    assert entry["max_model_len"] == 64
    assert "max_model_len" not in server.get("/v1/models/c").json()
    health = server.get("/health").json()
    assert {name: each["state"] for name, each in health["models"].items()} == {
        "a": "idle",
        "b": "idle",
        "c": "unloaded",
    }
    assert set(server.get("/stats").json()) == {"a", "b"}
    ids = server.post("/tokenize", {"model": "c", "prompt": "The fox"}).json()["tokens"]
    assert server.post("/detokenize", {"model": "c", "tokens": ids}).json()["prompt"].endswith("The fox")
    with server.openai() as client:
        assert [model.id for model in client.models.list()] == ["a", "b", "c"]


def test_concurrent_first_requests_load_once(serve: Any, models_dir: Path, opener: Opener) -> None:
    server = serve()
    opener.gate.clear()
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(server.post, TEXT, {**BODY, "model": "a"}) for _ in range(8)]
        until(lambda: server.app.gate.in_flight == 8)
        assert states(server)["a"] == "loading"
        opener.gate.set()
        assert {text(answer.result()) for answer in answers} == {expected(models_dir / "a")}
    assert opener.opened == ["a"]


def test_a_stream_gets_comments_while_it_waits(serve: Any, models_dir: Path, opener: Opener) -> None:
    server = serve()
    opener.gate.clear()
    lines: list[str] = []
    with httpx2.stream("POST", f"{server.url}{TEXT}", json={**BODY, "model": "a", "stream": True}, **PLAIN) as stream:
        assert stream.status_code == 200
        for line in stream.iter_lines():
            lines.append(line)
            opener.gate.set()
    comments = [line for line in lines if line.startswith(":")]
    assert comments[0] == ": loading a 50 %"
    resumed = server.stream(TEXT, {**BODY, "model": "a"})
    begun = [line for line in lines if line.startswith("data: ")]
    assert len(begun) == len(resumed.events)
    assert begun[-1] == "data: [DONE]"


def test_a_stream_with_a_ready_model_has_no_comments(serve: Any, opener: Opener) -> None:
    server = serve()
    for _ in range(2):  # the first one loads it, in less than a second
        assert server.stream(TEXT, {**BODY, "model": "a"}).comments == 0


def test_invalid_bodies_load_nothing(serve: Any, opener: Opener) -> None:
    server = serve()
    for body, status in (
        ({"prompt": "x", "max_tokens": -5}, 400),
        ({"prompt": "x", "no_such_field": 1}, 400),
        ({"prompt": "x", "n": 10**6}, 400),
        ({"prompt": "x", "stream": "yes"}, 400),
    ):
        assert server.post(TEXT, {"model": "a", **body}).status_code == status
    assert server.post(TEXT, BODY).json()["error"]["message"] == "model is required: this server has 'a', 'b', 'c'"
    for name in ("d", "../a", ".hidden", "no-model", "/etc", "a/", ""):
        answer = server.post(TEXT, {**BODY, "model": name})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert not opener.opened


def test_the_least_recently_used_model_is_unloaded(serve: Any, opener: Opener) -> None:
    server = serve(max_models=2)
    for name in ("a", "b", "a", "c"):
        assert server.post(TEXT, {**BODY, "model": name}).status_code == 200
    assert states(server) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
    assert server.post(TEXT, {**BODY, "model": "b"}).status_code == 200
    assert states(server) == {"a": "unloaded", "b": "loaded", "c": "loaded"}
    assert opener.opened == ["a", "b", "c", "b"]


def test_memory_is_limited(serve: Any, models_dir: Path) -> None:
    one = onward.Engine(onward.load(models_dir / "c"))
    one.close()
    server = serve(memory=2 * one.memory, cache_memory=one.memory)
    for name in "abc":
        assert server.post(TEXT, {**BODY, "model": name}).status_code == 200
        loaded = [name for name, status in states(server).items() if status == "loaded"]
        assert len(loaded) <= 2
        assert name in loaded
    tight = serve(memory=1)
    for name in "abc":
        assert server.post(TEXT, {**BODY, "model": name}).status_code == 200
        assert text(tight.post(TEXT, {**BODY, "model": name})) == expected(models_dir / name)
        assert list(states(tight).values()).count("loaded") == 1, "alone, it may exceed the limit"


def test_an_idle_model_is_unloaded_after_a_while(serve: Any) -> None:
    server = serve(ttl=0.05)
    assert server.post(TEXT, {**BODY, "model": "a"}).status_code == 200
    until(lambda: states(server)["a"] == "unloaded")


def test_a_busy_model_is_not_unloaded(
    serve: Any, models_dir: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = onward.decoding.sequence.Sequence.accept

    def slowly(sequence: Any, *token: Any) -> str:
        time.sleep(0.02)
        return accept(sequence, *token)

    monkeypatch.setattr(onward.decoding.sequence.Sequence, "accept", slowly)
    server = serve(max_models=1, ttl=0)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.stream, TEXT, {**LONG, "model": "a"})
        until(lambda: states(server)["a"] == "loaded")
        refused = server.post("/v1/models/unload", {"model": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_busy")
        second = pool.submit(server.post, TEXT, {**BODY, "model": "b"})
        until(lambda: states(server)["b"] == "loading")
        time.sleep(0.1)
        assert opener.opened == ["a"]
        pieces = [chunk["choices"][0]["text"] for chunk in first.result().chunks]
        assert "".join(pieces) == expected(models_dir / "a", LONG)
        assert text(second.result()) == expected(models_dir / "b")


def test_a_request_without_room_is_503(serve: Any, opener: Opener) -> None:
    server = serve(max_models=1, wait=0.1)
    opener.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.post, TEXT, {**BODY, "model": "a"})
        until(lambda: bool(opener.opened))
        answer = server.post(TEXT, {**BODY, "model": "b"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "models_busy")
        assert int(answer.headers["retry-after"]) >= 1
        opener.gate.set()
        assert first.result().status_code == 200
    # Until the model has been unloaded, which may take longer than the wait, the answer is the same.
    until(lambda: server.post(TEXT, {**BODY, "model": "b"}).status_code == 200)


def test_a_failed_load_is_one_clear_error_and_can_be_retried(serve: Any, models_dir: Path, opener: Opener) -> None:
    server = serve()
    opener.gate.clear()
    opener.fail["a"] = CheckpointError(f"{models_dir / 'a'}/model.safetensors is truncated")
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(server.post, TEXT, {**BODY, "model": "a"}) for _ in range(3)]
        stream = pool.submit(server.stream, TEXT, {**BODY, "model": "a"})
        response = pool.submit(server.stream, "/v1/responses", {"input": "x", "model": "a"})
        until(lambda: server.app.gate.in_flight == 5)
        time.sleep(1.2)  # the stream begins
        opener.gate.set()
        for each in answers:
            answer = each.result()
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "model_load_failed"
            assert answer.json()["error"]["message"] == (
                "the model 'a' cannot be loaded: a/model.safetensors is truncated"
            )
            assert "retry-after" in answer.headers
        assert stream.result().comments
        assert json.loads(stream.result().events[-1])["error"]["code"] == "model_load_failed"
        event = json.loads(response.result().events[-1])
        assert (event["type"], event["code"]) == ("error", "model_load_failed")
    assert server.post(TEXT, {**BODY, "model": "a"}).status_code == 503
    assert opener.opened == ["a"], "not tried again at once"
    assert server.post(TEXT, {**BODY, "model": "b"}).status_code == 200
    del opener.fail["a"]
    (models_dir / "a" / "README.md").write_text("repaired")
    assert text(server.post(TEXT, {**BODY, "model": "a"})) == expected(models_dir / "a")
    assert 'onward_model_loads_total{model="a",result="failed"} 1.0' in server.get("/metrics").text
    assert server.get("/health").status_code == 200


def test_damaged_folders_do_not_stop_the_server(serve: Any, models_dir: Path) -> None:
    server = serve()
    (models_dir / "empty").mkdir()
    (models_dir / "empty" / "config.json").write_text("{}")
    (models_dir / "torn.gguf").write_bytes(b"GGUF")
    make_checkpoint(models_dir / "cut")
    with (models_dir / "cut" / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    make_checkpoint(models_dir / "speechless", tokenizer=False)
    for name in ("empty", "torn", "cut", "speechless"):
        answer = server.post(TEXT, {**BODY, "model": name})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_load_failed")
        assert str(models_dir) not in answer.text
    assert text(server.post(TEXT, {**BODY, "model": "a"})) == expected(models_dir / "a")
    assert {states(server)[name] for name in ("empty", "torn", "cut")} == {"unloaded"}


def test_a_disconnected_client_does_not_cancel_the_load(serve: Any, opener: Opener) -> None:
    server = serve()
    opener.gate.clear()
    with pytest.raises(httpx2.ReadTimeout):
        server.post(TEXT, {**BODY, "model": "a"}, timeout=0.2)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.post, TEXT, {**BODY, "model": "a"})
        until(lambda: server.app.gate.in_flight == 1)
        opener.gate.set()
        assert other.result().status_code == 200
    assert opener.opened == ["a"]
    assert server.post("/v1/models/unload", {"model": "a"}).status_code == 200, "no request holds it"


def test_changed_files_are_noticed(serve: Any, models_dir: Path) -> None:
    server = serve()
    before = text(server.post(TEXT, {**LONG, "model": "a"}))
    make_checkpoint(models_dir / "a", intermediate_size=56)
    make_checkpoint(models_dir / "late")
    assert text(server.post(TEXT, {**LONG, "model": "a"})) == before, "not while it is loaded"
    assert server.post("/v1/models/unload", {"model": "a"}).json()["status"] == "unloaded"
    after = text(server.post(TEXT, {**LONG, "model": "a"}))
    assert after == expected(models_dir / "a", LONG) != before
    assert server.get("/v1/models/a").json()["size_bytes"] == (models_dir / "a" / "model.safetensors").stat().st_size
    assert server.post(TEXT, {**BODY, "model": "late"}).status_code == 200


def test_a_model_with_a_failed_engine_is_loaded_again(serve: Any, opener: Opener) -> None:
    server = serve()
    assert server.post(TEXT, {**BODY, "model": "a"}).status_code == 200
    next(iter(server.app.service.models)).engine.close()
    until(lambda: states(server)["a"] == "unloaded")
    assert server.post(TEXT, {**BODY, "model": "a"}).status_code == 200
    assert opener.opened == ["a", "a"]


def test_operators_load_and_unload(serve: Any, opener: Opener, lm: onward.LanguageModel) -> None:
    server = serve({"demo": lm})
    assert server.post("/v1/models/load", {"model": "a"}).json()["status"] == "loaded"
    assert opener.opened == ["a"]
    assert server.post("/models/unload", {"model": "a"}).json()["status"] == "unloaded"
    assert server.post("/v1/models/unload", {"model": "a"}).json()["status"] == "unloaded", "again"
    for path, body, status, code in (
        ("/v1/models/load", {"model": "d"}, 404, "model_not_found"),
        ("/v1/models/load", {}, 400, "missing_required_parameter"),
        ("/v1/models/load", {"model": "a", "x": 1}, 400, "unknown_parameter"),
        ("/v1/models/unload", {"model": "demo"}, 400, "unsupported_value"),
        ("/v1/models/unload", {"model": 3}, 400, "invalid_type"),
    ):
        answer = server.post(path, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), (path, body)
    assert text(server.post(TEXT, {**BODY, "model": "demo"}))


def test_management_must_be_allowed(start: Start, models_dir: Path, opener: Opener) -> None:
    server = start({}, on_demand=OnDemand(folder=models_dir, open=opener), api_keys=("k",))
    key = {"headers": {"authorization": "Bearer k"}}
    for path, body in (
        ("/v1/models/load", {"model": "a"}),
        ("/v1/models/unload", {"model": "a"}),
        ("/v1/models/weights", {"model": "a", "weights_path": "x"}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "x"}),
        ("/v1/unload_lora_adapter", {"lora_name": "x"}),
    ):
        assert server.post(path, body).status_code == 401
        answer = server.post(path, body, **key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "management_disabled")
    assert not opener.opened


def test_adapters_are_loaded_from_their_folder_only(start: Start, lm: onward.LanguageModel, tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    demo_adapter(adapters / "one", 1)
    demo_adapter(tmp_path / "outside", 2)
    (adapters / "link").symlink_to(tmp_path / "outside")
    (adapters / "empty").mkdir()
    model = onward.load("demo")
    server = start({"demo": model}, management=True, adapters_dir=adapters)
    for path in ("../outside", str(tmp_path / "outside"), "link", "none", "one/../../outside", "empty", "\0", "."):
        answer = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path"), path
        assert str(tmp_path) not in answer.text.replace(path, "")
    loaded = server.post("/v1/load_lora_adapter", {"lora_name": "poet", "lora_path": "one"})
    assert (loaded.status_code, loaded.json()["parent"]) == (200, "demo")
    answer = server.post(TEXT, {**BODY, "max_tokens": 12, "model": "poet"})
    assert text(answer) == model.generate("The fox", max_new_tokens=12, temperature=0, adapter="poet").text
    again = server.post("/v1/load_lora_adapter", {"lora_name": "poet", "lora_path": str(adapters / "one")})
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "demo"}).status_code == 400
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "poet"}).json()["deleted"] is True
    gone = server.post("/v1/unload_lora_adapter", {"lora_name": "poet"})
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "lora_name")
    baseless = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "one", "base_model_name": "none"})
    assert (baseless.status_code, baseless.json()["error"]["param"]) == (404, "base_model_name")
    assert server.post(TEXT, {**BODY, "model": "poet"}).status_code == 404


def test_adapters_are_restored_with_their_model(serve: Any, tmp_path: Path, opener: Opener) -> None:
    demo_adapter(tmp_path / "adapters" / "one", 1)
    source = Path(onward.__file__).parent / "demo" / "target"
    (tmp_path / "models" / "story").symlink_to(source)
    server = serve(settings={"adapters_dir": tmp_path / "adapters"})
    body = {"lora_name": "poet", "lora_path": "one", "base_model_name": "story"}
    assert server.post("/v1/load_lora_adapter", body).status_code == 200
    answer = {**BODY, "max_tokens": 12, "model": "poet"}
    before = text(server.post(TEXT, answer))
    assert server.post("/v1/models/unload", {"model": "story"}).status_code == 200
    listed = {entry["id"]: entry for entry in server.get("/v1/models").json()["data"]}
    assert (listed["poet"]["parent"], listed["poet"]["status"]) == ("story", "unloaded")
    assert text(server.post(TEXT, answer)) == before
    assert opener.opened == ["story", "story"]


def test_work_without_a_client_keeps_its_model(serve: Any, opener: Opener) -> None:
    server = serve(max_models=1, ttl=0)
    models = server.app.service.models
    with ThreadPoolExecutor(1) as pool, models.holding("a") as served:
        other = pool.submit(server.post, TEXT, {**BODY, "model": "b"})
        until(lambda: states(server)["b"] == "loading")
        time.sleep(1.5)  # past a tick
        assert served.engine.submit("The fox", max_new_tokens=2).result().token_ids
        assert states(server)["a"] == "loaded"
        assert server.post("/v1/models/unload", {"model": "a"}).status_code == 409
        assert not other.done()
    # Outside of the block, the other one gets its turn.
    with pytest.raises(BodyError, match="no model 'd'"), models.holding("d"):
        pass


def test_a_model_with_a_running_generation_stays(serve: Any, opener: Opener) -> None:
    """Also if no request holds it: a response without a client."""
    server = serve(ttl=0)
    with server.app.service.models.holding("a") as served:
        engine = served.engine
        stack = contextlib.ExitStack()
        reached = stack.enter_context(held(engine))
        running = engine.submit("The fox", max_new_tokens=2)
        assert reached.wait(SECONDS)
    with stack:
        time.sleep(1.5)
        assert text(server.post(TEXT, {**BODY, "model": "b"}))
        assert states(server)["a"] == "loaded"
    assert running.result().token_ids
    until(lambda: states(server)["a"] == "unloaded")
    assert opener.opened == ["a", "b"]


def test_counts_continue_after_an_unload(serve: Any) -> None:
    server = serve()

    def count(name: str) -> float:
        lines = server.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f'{name}{{model="a"')).split()[-1])

    names = ("onward_engine_tokens_total", "onward_output_tokens_total", "onward_engine_steps_total")
    before = dict.fromkeys(names, 0.0)
    for loads in (1, 2):
        assert server.post(TEXT, {**BODY, "model": "a"}).status_code == 200
        server.wait_idle()
        assert count("onward_model_loaded") == 1
        counts = {name: count(name) for name in names}
        assert all(counts[name] > before[name] for name in names)
        assert server.post("/v1/models/unload", {"model": "a"}).status_code == 200
        assert {name: count(name) for name in names} == counts
        assert count("onward_model_loaded") == 0
        assert count("onward_model_loads_total") == loads
        before = counts


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_models": 0}, "max_models must be"),
        ({"memory": 0}, "memory must be"),
        ({"ttl": float("nan")}, "ttl must be a number of 0 or more; got nan"),
        ({"wait": -1}, "wait must be a number of 0 or more; got -1"),
        ({"folder": Path("none")}, "the folder of models 'none' cannot be read"),
        ({"max_model": 1}, "max_models"),
    ],
)
def test_options_are_checked(models_dir: Path, opener: Opener, option: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        OnDemand(**{"folder": models_dir, "open": opener} | option)
