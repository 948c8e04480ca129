"""Updates of the weights over HTTP, and their versions for token ids and in the usage."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import MESSAGES, LiveServer, deltas
from safetensors.torch import load_file, save_file

import onward
from onward.testing import random_checkpoint

CHAT, TEXT, UPDATE = "/v1/chat/completions", "/v1/completions", "/v1/models/weights"
Start = Callable[..., LiveServer]


def test_tokens_have_the_version_of_their_weights(start: Callable[..., LiveServer]) -> None:
    lm = onward.load("demo")
    server = start({"demo": lm}, engine={"max_sequences": 4})
    weights = dict(onward.load("demo", trainable=True).named_parameters())
    for body, path in (({"messages": MESSAGES}, CHAT), ({"prompt": "The fox"}, TEXT)):
        asked = {**body, "max_tokens": 6, "return_token_ids": True, "n": 2, "seed": 1}
        before = server.post(path, asked).json()["choices"]
        updated = server.engines["demo"].weights_version > 0  # otherwise they are those loaded at the start
        assert all(("weights_versions" in choice) == updated for choice in before)
        version = server.engines["demo"].update_weights(weights)
        assert server.engines["demo"].weights_version == version
        for options in ({}, {"beams": 2, "seed": None, "n": 1}):
            choices = server.post(path, asked | options).json()["choices"]
            chunks = server.stream(path, asked | options).chunks
            for choice in choices:
                assert choice["weights_versions"] == [version] * len(choice["token_ids"])
                parts = [part for part in deltas(chunks, choice["index"]) if "token_ids" in part]
                assert [each for part in parts for each in part["weights_versions"]] == choice["weights_versions"]
        assert server.post(path, asked).json()["choices"][0]["token_ids"] == before[0]["token_ids"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints: two of one architecture, one of another, and damaged ones."""
    root = tmp_path_factory.mktemp("weights")
    lm = onward.load("demo", trainable=True)
    lm.save(root / "first")
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter *= 1.5
    lm.save(root / "second")
    (root / "outside").mkdir()
    shutil.copytree(root / "second", root / "outside" / "third")
    inside = root / "inside"
    inside.mkdir()
    for name in ("first", "second"):
        (root / name).rename(inside / name)
    random_checkpoint(inside / "other", "qwen3")
    (inside / "empty").mkdir()
    (inside / "link").symlink_to(root / "outside" / "third")
    tensors = load_file(inside / "second" / "model.safetensors")
    name = next(iter(tensors))
    changes: dict[str, dict[str, torch.Tensor]] = {
        "missing": {each: tensor for each, tensor in tensors.items() if each != name},
        "misshapen": tensors | {name: tensors[name][:-1].contiguous()},
        "unknown": tensors | {"other.weight": torch.ones(2, 2)},
        "infinite": tensors | {name: torch.full_like(tensors[name], torch.inf)},
    }
    for kind, changed in changes.items():
        shutil.copytree(inside / "second", inside / kind)
        save_file(changed, inside / kind / "model.safetensors", metadata={"format": "pt"})
    return inside


def tokens(server: LiveServer) -> Any:
    body = {"prompt": "The fox", "max_tokens": 8, "return_token_ids": True, "temperature": 0}
    return server.post(TEXT, body).json()["choices"][0]["token_ids"]


def test_weights_of_a_folder(start: Start, folder: Path) -> None:
    server = start({"demo": onward.load(folder / "first")}, management=True, weights_dir=folder)
    second = onward.load(folder / "second").generate("The fox", max_new_tokens=8, temperature=0.0).token_ids
    first = tokens(server)
    assert first != second
    answer = server.post(UPDATE, {"model": "demo", "weights_path": "second"})
    assert answer.status_code == 200, answer.text
    assert (answer.json()["id"], answer.json()["weights_version"]) == ("demo", 1)
    assert tokens(server) == second
    answer = server.post(UPDATE, {"model": "demo", "weights_path": "first", "in_flight": "keep", "version": 9})
    assert answer.json()["weights_version"] == 9
    assert tokens(server) == first


@pytest.mark.parametrize("in_flight", ["finish", "recompute", "keep"])
def test_running_requests(start: Start, folder: Path, in_flight: str) -> None:
    """A stream continues, and its usage has the number of the newest weights."""
    server = start({"demo": onward.load(folder / "first")}, management=True, weights_dir=folder)
    body = {"messages": MESSAGES, "max_tokens": 300, "ignore_eos": True, "return_token_ids": True}
    body |= {"stream_options": {"include_usage": True}, "stream": True, "model": "demo"}
    streams: list[Any] = []
    running = threading.Thread(target=lambda: streams.append(server.stream(CHAT, body)))
    running.start()
    while not server.engines["demo"].stats().running:
        pass
    answer = server.post(UPDATE, {"model": "demo", "weights_path": "second", "in_flight": in_flight})
    running.join(60)
    assert answer.json()["weights_version"] == 1
    parts = [part for part in deltas(streams[0].chunks) if "token_ids" in part]
    versions = [each for part in parts for each in part.get("weights_versions", [0] * len(part["token_ids"]))]
    assert len(versions) == 300
    assert versions == sorted(versions)
    if in_flight == "finish":
        assert set(versions) == {0}
    usage = streams[0].chunks[-1]["usage"]
    assert usage.get("weights_version", 0) == max(versions)
    for path, each in (
        (TEXT, {"prompt": "a", "max_tokens": 2}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}),
    ):
        assert server.post(path, {"model": "demo", **each}).json()["usage"]["weights_version"] == 1
    events = server.stream(
        "/v1/messages", {"model": "demo", "messages": MESSAGES, "max_tokens": 2, "stream": True}
    ).events
    assert json.loads(events[-2])["usage"]["weights_version"] == 1


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "missing": ({}, "weights_path", "not updated"),
    "misshapen": ({}, "weights_path", "not updated"),
    "unknown": ({}, "weights_path", "not updated"),
    "infinite": ({}, "weights_path", "not finite"),
    "other": ({}, "weights_path", "another architecture"),
    "empty": ({}, "weights_path", "not updated"),
    "link": ({}, "weights_path", "a folder within that of --weights-dir"),
    "../outside/third": ({}, "weights_path", "a folder within that of --weights-dir"),
    "nowhere": ({}, "weights_path", "a folder within that of --weights-dir"),
    "first/model.safetensors": ({}, "weights_path", "a folder within that of --weights-dir"),
    "a\0b": ({}, "weights_path", "null character"),
    "": ({}, "weights_path", ""),
    "second": ({"in_flight": "wait"}, "in_flight", "finish, recompute or keep"),
    "first": ({"version": 0}, "version", ""),
    "second/.": ({"model": "none"}, "model", "no model 'none'"),
    "./second": ({"more": 1}, "more", ""),
}


def test_refused_updates_change_nothing(start: Start, folder: Path) -> None:
    server = start({"demo": onward.load(folder / "first")}, management=True, weights_dir=folder)
    first = tokens(server)
    for path, (fields, param, says) in REFUSED.items():
        answer = server.post(UPDATE, {"model": "demo", "weights_path": path, **fields})
        assert answer.status_code == (404 if fields.get("model") else 400), (path, answer.text)
        error = answer.json()["error"]
        assert (error["param"], says in error["message"]) == (param, True), (path, error)
        assert str(folder) not in error["message"]
    assert server.post(UPDATE, {"model": "demo", "weights_path": "second", "version": 4}).status_code == 200
    answer = server.post(UPDATE, {"model": "demo", "weights_path": "first", "version": 4})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "version")
    assert server.post(UPDATE, {"model": "demo", "weights_path": "first", "version": 5}).status_code == 200
    assert tokens(server) == first


def test_updates_must_be_allowed(start: Start, folder: Path) -> None:
    body = {"model": "demo", "weights_path": "second"}
    for settings in ({"weights_dir": folder}, {"management": True}):
        server = start({"demo": onward.load(folder / "first")}, **settings)
        answer = server.post(UPDATE, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "management_disabled")
