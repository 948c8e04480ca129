"""Fields of other servers' bodies: their effects, their errors, and their streams."""

import json
from typing import Any

import pytest
from live_server import MESSAGES, LiveServer, text_of

import onward

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, TEXT: {"prompt": "Once upon a time"}}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}},
    "required": ["a"],
    "additionalProperties": False,
}
MANY = list(range(0, 2000, 3))
LARK = 'start: "a" /[bc]{3}/'
# A body with the field, and one with Onward's own fields that has the same answer.
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "min_tokens": ({"min_tokens": 9, "eos": MANY}, {"min_new_tokens": 9, "eos": MANY}),
    "stop_token_ids": ({"eos": [7], "stop_token_ids": MANY}, {"eos": [7, *MANY]}),
    "ignore_eos": ({"ignore_eos": True, "stop_token_ids": MANY}, {"eos": MANY}),
    "top_k": ({"top_k": -1}, {"top_k": 0}),
    "top_p": ({"top_p": 0}, {"top_k": 1}),
    "max_tokens": ({"max_tokens": -1, "stop": "."}, {"max_tokens": None, "stop": "."}),
    "max_completion": ({"max_completion_tokens": -1, "max_tokens": -1, "stop": "."}, {"max_tokens": None, "stop": "."}),
    "guided_json": ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
    "guided_json text": ({"guided_json": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
    "guided_regex": ({"guided_regex": "[ab]{5}"}, {"regex": "[ab]{5}"}),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
    "guided_grammar": ({"guided_grammar": LARK}, {"grammar": LARK}),
    "structured json": ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
    "structured regex": ({"structured_outputs": {"regex": "[ab]{5}", "json": None}}, {"regex": "[ab]{5}"}),
    "structured choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choice": ["yes", "no"]}),
    "structured grammar": ({"structured_outputs": {"grammar": LARK}}, {"grammar": LARK}),
    "structured object": ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
}  # fmt: skip


def choices(answer: dict[str, Any]) -> list[Any]:
    return [
        (choice.get("text") or choice["message"], choice["finish_reason"], choice["token_ids"])
        for choice in answer["choices"]
    ]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("name", SAME)
def test_fields_of_other_servers_are_aliases_of_options(server: LiveServer, path: str, name: str) -> None:
    common = {**BODIES[path], "max_tokens": 24, "seed": 5, "temperature": 1.0, "return_token_ids": True}
    theirs, ours = (common | fields for fields in SAME[name])
    answer, expected = server.post(path, theirs), server.post(path, ours)
    assert (answer.status_code, expected.status_code) == (200, 200), (answer.text, expected.text)
    assert choices(answer.json()) == choices(expected.json())
    plain = server.post(path, common)
    if name != "top_k":
        assert choices(answer.json()) != choices(plain.json()), "the field has an effect"
    text = answer.json()["choices"][0]
    assert text_of(server.stream(path, theirs).chunks) == text.get("text", text.get("message", {}).get("content"))


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_texts_of_temperature_0_are_equal(server: LiveServer, path: str) -> None:
    body = {**BODIES[path], "max_tokens": 8, "temperature": 0, "n": 3}
    answer = server.post(path, body).json()
    one = server.post(path, body | {"n": 1}).json()
    texts = [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]
    assert texts == [one["choices"][0].get("text") or one["choices"][0]["message"]["content"]] * 3
    chunks = server.stream(path, body).chunks
    assert [text_of(chunks, index) for index in range(3)] == texts


def test_seed_minus_1_means_a_fresh_seed(server: LiveServer) -> None:
    body = {"prompt": "Once", "max_tokens": 4, "temperature": 1.0, "seed": -1}
    first, second = (server.post(TEXT, body).json() for _ in range(2))
    assert first["seed"] != second["seed"]
    again = server.post(TEXT, body | {"seed": first["seed"]}).json()
    assert again["choices"] == first["choices"]
    options = {"temperature": 1.0, "seed": first["seed"], "max_new_tokens": 4}
    lm: onward.LanguageModel = server.engines["demo"].lm
    assert first["choices"][0]["text"] == lm.generate("Once", **options).text


# Fields, the field to blame and a part of the message; of both endpoints.
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"min_tokens": 5, "min_new_tokens": 6}, "min_tokens", "mean the same, but differ"),
    ({"min_tokens": -1}, "min_tokens", "must be a whole number of 0 or more; got -1"),
    ({"min_tokens": 50, "max_tokens": 4}, "min_tokens", "is 50, but max_new_tokens is 4"),
    ({"max_tokens": -2}, "max_tokens", "must be a whole number of 0 or more; got -2"),
    ({"top_k": -2}, "top_k", "must be a whole number of 0 or more; got -2"),
    ({"seed": -2}, "seed", "must be a whole number in [0, 2^64); got -2"),
    ({"top_p": -0.1}, "top_p", "must be a number in [0, 1]"),
    ({"stop_token_ids": 5}, "stop_token_ids", "must be a list"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "must be a whole number of 0 or more"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids", "names id 1000000, but the vocabulary ends at"),
    ({"guided_regex": "a", "regex": "b"}, "regex", "and guided_regex exclude each other: use one"),
    ({"guided_json": {}, "guided_choice": ["a"]}, "guided_json", "and guided_choice exclude each other"),
    ({"guided_json": "{"}, "guided_json", "must be a JSON Schema, also as a text"),
    ({"guided_json": 5}, "guided_json", "must be an object, true or false; got 5"),
    ({"guided_json": {"type": "nothing"}}, "guided_json", "guided_json.type"),
    ({"guided_regex": "["}, "guided_regex", "regex"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "cannot be compiled"),
    ({"guided_choice": []}, "guided_choice", "one or more"),
    ({"structured_outputs": {}}, "structured_outputs", "must have exactly one of json, regex"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "must have exactly one of json, regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "must have exactly one of"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs", "structured_outputs.regex must be a string; got 5"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "structural_tag is not a field"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "is not supported: remove it, or use true"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output", "is not supported: remove it, or use false"),
    ({"spaces_between_special_tokens": 5}, "spaces_between_special_tokens", "remove it, or use true or false"),
    ({"structured_outputs": {"regex": "a"}, "grammar": "b"}, "grammar", "and structured_outputs exclude each other"),
]
OF_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json", "and response_format exclude"),
]


@pytest.mark.parametrize(("fields", "param", "message"), [*BAD, *OF_CHATS])
def test_an_invalid_value_is_refused_by_the_fields_name(
    server: LiveServer, fields: dict[str, Any], param: str, message: str
) -> None:
    for path in (CHAT,) if (fields, param, message) in OF_CHATS else (CHAT, TEXT):
        answer = server.post(path, BODIES[path] | fields)
        assert answer.status_code == 400, (path, fields)
        error = answer.json()["error"]
        assert (error["param"], message in error["message"]) == (param, True), error
