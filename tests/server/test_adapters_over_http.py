"""Adapters and control vectors by name over HTTP."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from live_server import LiveServer

import onward
from demo_adapters import demo_adapter

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> onward.LanguageModel:
    place = tmp_path_factory.mktemp("adapters")
    return onward.load("demo", adapters={name: demo_adapter(place / name, at) for at, name in enumerate("ab")})


def test_the_model_name_selects_an_adapter(
    start: Callable[..., LiveServer], adapted: onward.LanguageModel, tmp_path: Path
) -> None:
    server = start({"demo": adapted})
    listed = server.get("/v1/models").json()["data"]
    assert [(model["id"], model.get("parent")) for model in listed] == [("demo", None), ("a", "demo"), ("b", "demo")]
    assert server.get("/v1/models/b").json()["parent"] == "demo"
    answers = set()
    for name, adapter in (("demo", None), ("a", "a"), ("b", "b")):
        body = {"prompt": "The fox", "max_tokens": 12, "temperature": 0, "model": name}
        answer = server.post(TEXT, body).json()
        assert answer["model"] == name
        expected = adapted.generate("The fox", max_new_tokens=12, temperature=0, adapter=adapter).text
        assert answer["choices"][0]["text"] == expected
        answers.add(expected)
    assert len(answers) == 3
    chat = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "model": "a"}).json()
    assert chat["model"] == "a"
    with server.openai() as client:
        response = client.responses.create(model="b", input="Hi", max_output_tokens=4)
        assert response.model == "b"
    adapted.load_adapter("late", demo_adapter(tmp_path / "late", 7))
    assert server.post(TEXT, {"prompt": "x", "max_tokens": 1, "model": "late"}).status_code == 200
    adapted.drop_adapter("late")
    refused = server.post(TEXT, {"prompt": "x", "max_tokens": 1, "model": "late"})
    assert refused.status_code == 404
    assert "no model 'late'; available: 'demo', 'a', 'b'" in refused.json()["error"]["message"]


def test_the_model_that_has_the_adapter_is_used(
    start: Callable[..., LiveServer], adapted: onward.LanguageModel, tmp_path: Path
) -> None:
    other = onward.load("demo", adapters={"b": demo_adapter(tmp_path / "b", 5), "c": demo_adapter(tmp_path / "c", 6)})
    server = start({"one": adapted, "two": other})
    for name, model in (("a", adapted), ("c", other)):
        body = {"prompt": "The fox", "max_tokens": 12, "temperature": 0, "model": name}
        expected = model.generate("The fox", max_new_tokens=12, temperature=0, adapter=name).text
        assert server.post(TEXT, body).json()["choices"][0]["text"] == expected
    refused = server.post(TEXT, {"prompt": "x", "model": "b"})
    assert refused.status_code == 400
    assert "the adapter name 'b' is ambiguous: 'one' and 'two' each have one" in refused.json()["error"]["message"]


def test_a_request_may_name_a_control_vector_of_the_server(
    start: Callable[..., LiveServer], adapted: onward.LanguageModel, tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf")
    vectors = torch.randn(2, 192, generator=torch.Generator().manual_seed(1)) * 2
    for name, vector in zip(("happy", "sad"), vectors, strict=True):
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", "controlvector")
        writer.add_tensor("direction.2", vector.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    lm = onward.LanguageModel(adapted.model, adapted.tokenizer, adapted.chat_template)
    lm.load_adapter("a", adapted.adapters["a"].folder)
    for name in ("happy", "sad"):
        lm.load_control_vector(name, tmp_path / f"{name}.gguf")
    server = start({"demo": lm})
    steers = [
        ({}, None),
        ({"control_vector": "happy"}, {"layers.2": vectors[0]}),
        ({"control_vector": "sad"}, {"layers.2": vectors[1]}),
        (
            {"control_vector": {"name": "happy", "scale": -0.5, "at": "new"}},
            {"layers.2": onward.Steer(vectors[0], scale=-0.5, at="new")},
        ),
    ]
    for model in ("demo", "a"):
        texts = []
        for fields, steer in steers:
            body = {"prompt": "The fox", "max_tokens": 12, "temperature": 0, "model": model, **fields}
            text = server.post(TEXT, body).json()["choices"][0]["text"]
            adapter = None if model == "demo" else model
            assert text == lm.generate("The fox", max_new_tokens=12, temperature=0, adapter=adapter, steer=steer).text
            texts.append(text)
        assert len(set(texts)) == len(texts)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
    plain, steered = (
        server.post("/v1/chat/completions", chat | fields).json()["choices"][0]["message"]["content"]
        for fields in ({}, {"control_vector": "sad"})
    )
    assert plain != steered
    for value, problem in (
        ("angry", "control_vector names no loaded control vector: 'angry'; loaded: 'happy', 'sad'"),
        (str(tmp_path / "happy.gguf"), "names no loaded control vector"),
        ({"name": "happy", "scale": 1e39}, "not finite"),
        ({"name": "happy", "at": "last"}, "at"),
        ({"layers.2": [1.0]}, "control_vector"),
    ):
        refused = server.post(TEXT, {"prompt": "The fox", "control_vector": value})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert problem in error["message"]
        assert error["param"].startswith("control_vector")
