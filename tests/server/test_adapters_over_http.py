"""Adapters by the name of a model, over HTTP."""

from collections.abc import Callable
from pathlib import Path

import pytest
from live_server import LiveServer

import onward
from demo_adapters import demo_adapter

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> onward.LanguageModel:
    place = tmp_path_factory.mktemp("adapters")
    return onward.load("demo", adapters={name: demo_adapter(place / name, at) for at, name in enumerate("ab")})


def test_a_models_name_calls_an_adapter(
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
        said = client.responses.create(model="b", input="Hi", max_output_tokens=4)
        assert said.model == "b"
    adapted.load_adapter("late", demo_adapter(tmp_path / "late", 7))
    assert server.post(TEXT, {"prompt": "x", "max_tokens": 1, "model": "late"}).status_code == 200
    adapted.drop_adapter("late")
    refused = server.post(TEXT, {"prompt": "x", "max_tokens": 1, "model": "late"})
    assert refused.status_code == 404
    assert "no model 'late'; available: 'demo', 'a', 'b'" in refused.json()["error"]["message"]


def test_of_several_models_the_one_that_has_it_is_called(
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
