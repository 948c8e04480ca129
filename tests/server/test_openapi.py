"""The document at /openapi.json is FastAPI's own: it has each path, each field and each status."""

import json
import re
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from live_server import MESSAGES, LiveServer

import onward
from onward.protocols.options import field_options

Start = Callable[..., LiveServer]
LEAST: dict[str, Any] = {"prompt": "x", "messages": MESSAGES, "input": "x", "tokens": [1], "metadata": {}}
LEAST |= {"items": MESSAGES, "max_tokens": 2, "query": "x", "documents": ["x"]}
LEAST |= {"model": "demo", "lora_name": "x", "lora_path": "x", "weights_path": "x"}
LEAST |= {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}


def document(server: LiveServer) -> dict[str, Any]:
    return server.get("/openapi.json").json()  # type: ignore[no-any-return]


def body_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    """The schema of an endpoint's body."""
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = content["schema"]["$ref"].rpartition("/")[2]
    return document["components"]["schemas"][name]  # type: ignore[no-any-return]


def least(schema: dict[str, Any]) -> dict[str, Any]:
    """The smallest body."""
    required = schema.get("required") or schema.get("anyOf", [{"required": []}])[0]["required"]
    return {name: LEAST[name] for name in required} | (
        {"max_tokens": 2} if "max_tokens" in schema["properties"] else {}
    )


def test_every_reference_resolves(server: LiveServer) -> None:
    whole = document(server)
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(whole)))
    assert {"ErrorBody", "MessageErrorBody"} <= names <= set(whole["components"]["schemas"])


def test_every_path_is_documented(server: LiveServer) -> None:
    paths = document(server)["paths"]
    for path in (
        "/chat/completions",
        "/completions",
        "/responses",
        "/messages",
        "/messages/count_tokens",
        "/embeddings",
        "/rerank",
        "/tokenize",
        "/detokenize",
        "/models",
        "/conversations",
        "/files",
        "/batches",
    ):
        assert set(paths[path]) == set(paths[f"/v1{path}"])
    assert {"/health", "/ready", "/metrics", "/stats", "/detokenize", "/v1/models/{name}"} <= set(paths)
    assert set(paths["/v1/files/{id}"]) == {"get", "delete"}
    assert set(paths["/v1/files"]["post"]["requestBody"]["content"]) == {"multipart/form-data"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_documented_fields_are_those_that_are_read(server: LiveServer, path: str) -> None:
    schema = body_of(document(server), path)
    assert set(field_options()) <= set(schema["properties"])
    assert schema["additionalProperties"] is False
    for name in schema["properties"]:
        answer = server.post(path, {**least(schema), "max_tokens": 0, name: [["no such value"]]})
        error = {} if answer.status_code == 200 else answer.json()["error"]
        assert (error.get("code"), error.get("param")) != ("unknown_parameter", name)
    answer = server.post(path, {**least(schema), "no_such_field": 1})
    assert answer.json()["error"]["code"] == "unknown_parameter"


def test_ranges_of_options_and_limits_are_documented(server: LiveServer) -> None:
    fields = body_of(document(server), "/v1/chat/completions")["properties"]
    assert {"type": "integer", "minimum": 1, "maximum": 128} in fields["n"]["anyOf"]
    assert {"type": "number", "minimum": 0, "maximum": 1} in fields["top_p"]["anyOf"]
    assert fields["messages"]["maxItems"] == 4096
    assert fields["store"]["enum"] == [False, None]


def test_a_changed_limit_is_documented_and_enforced(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, limits={"stop_strings": 2})
    fields = body_of(document(server), "/v1/completions")["properties"]
    assert [each["maxItems"] for each in fields["stop"]["anyOf"] if each["type"] == "array"] == [2]
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "stop": ["a", "b"]}).status_code == 200
    answer = server.post("/v1/completions", {"prompt": "x", "stop": ["a", "b", "c"]})
    assert answer.json()["error"]["param"] == "stop"
    assert "at most 2" in answer.json()["error"]["message"]


def test_unsupported_hints_are_dropped_on_request(start: Start, lm: onward.LanguageModel) -> None:
    hints = {"service_tier": "flex", "store": True, "verbosity": "low"}
    body = {"messages": MESSAGES, "max_tokens": 2, "seed": 1}
    server = start({"demo": lm}, ignore_unsupported=True)
    for stream in (False, True):
        answer = server.post("/v1/chat/completions", {**body, **hints, "stream": stream})
        assert answer.status_code == 200
        assert set(answer.headers["x-onward-ignored"].split(", ")) == set(hints)
    assert "x-onward-ignored" not in server.post("/v1/chat/completions", body).headers
    for field, value in {"audio": {}, "modalities": ["audio"], "web_search_options": {}}.items():
        refused = server.post("/v1/chat/completions", {**body, field: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), "it constrains the output"
    strict = start({"demo": lm}).post("/v1/chat/completions", {**body, **hints})
    assert (strict.status_code, strict.json()["error"]["code"]) == (400, "unsupported_value")


def has_json(methods: dict[str, Any]) -> bool:
    return "application/json" in methods.get("post", {}).get("requestBody", {}).get("content", {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@hypothesis.settings(max_examples=150, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(data=st.data())
def test_any_body_gets_a_documented_answer(server: LiveServer, data: st.DataObject) -> None:
    whole = document(server)
    path = data.draw(st.sampled_from(sorted(path for path, methods in whole["paths"].items() if has_json(methods))))
    operation, schema = whole["paths"][path]["post"], body_of(whole, path)
    body = least(schema) | data.draw(st.dictionaries(st.sampled_from(sorted(schema["properties"])), JSON, max_size=3))
    answer = server.post(path, body)
    assert str(answer.status_code) in operation["responses"]
    assert answer.status_code < 500
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in operation["responses"][str(answer.status_code)]["content"]
