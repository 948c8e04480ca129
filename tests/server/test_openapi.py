"""The document at /openapi.json is of what is there: each path, each field, each status."""

import json
from typing import Any

import hypothesis
import pytest
from fastapi.openapi.utils import get_openapi
from hypothesis import strategies as st
from live_server import MESSAGES, LiveServer

from onward.protocols.schema import field_options
from onward.server.openapi import document


def test_every_path_is_in_it_and_nothing_else(server: LiveServer) -> None:
    said = server.get("/openapi.json").json()
    assert said == json.loads(json.dumps(document()))
    of_routes = get_openapi(title="x", version="1", routes=server.app.routes.routes)["paths"]
    there = {(path.replace(":path", ""), method) for path, methods in of_routes.items() for method in methods}
    assert {(path, method) for path, methods in said["paths"].items() for method in methods} == there


@pytest.mark.parametrize(("path", "schema"), [("/v1/chat/completions", "ChatBody"), ("/v1/completions", "TextBody")])
def test_the_fields_of_a_body_are_those_that_are_read(server: LiveServer, path: str, schema: str) -> None:
    fields = document()["components"]["schemas"][schema]["properties"]
    assert set(field_options()) <= set(fields)
    least: dict[str, Any] = {"messages": MESSAGES} if "chat" in path else {"prompt": "x"}
    for name in fields:
        answer = server.post(path, {**least, "max_tokens": 0, name: {"no": "such value"}})
        code = None if answer.status_code == 200 else answer.json()["error"]["code"]
        assert code != "unknown_parameter", name
    answer = server.post(path, {**least, "no_such_field": 1})
    assert answer.json()["error"]["code"] == "unknown_parameter"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@hypothesis.settings(max_examples=150, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(data=st.data())
def test_any_body_gets_an_answer_that_is_in_it(server: LiveServer, data: st.DataObject) -> None:
    said = document()
    paths = sorted(path for path, methods in said["paths"].items() if "post" in methods)
    path = data.draw(st.sampled_from(paths))
    operation = said["paths"][path]["post"]
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    schema = said["components"]["schemas"][name]
    schema = schema["anyOf"][0] if "anyOf" in schema else schema
    least = {"prompt": "x", "messages": MESSAGES, "input": "x", "tokens": [1]}
    body = {field: least[field] for field in schema["required"]}
    body |= {"max_tokens": 2} if "max_tokens" in schema["properties"] else {}
    body |= data.draw(st.dictionaries(st.sampled_from(sorted(schema["properties"])), JSON, max_size=3))
    answer = server.post(path, body)
    assert str(answer.status_code) in operation["responses"]
    assert answer.status_code < 500
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in operation["responses"][str(answer.status_code)]["content"]
