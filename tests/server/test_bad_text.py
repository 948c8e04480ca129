"""Invalid text in every field of every endpoint: one error of the request, or an answer; never an internal error."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from live_server import MESSAGES, SECONDS, LiveServer

from onward.util.text_input import MAX_DEPTH

HERE = "<here>"
CHAT = {"messages": MESSAGES, "max_tokens": 1, "temperature": 1}
TEXT = {"prompt": "x", "max_tokens": 1, "temperature": 1}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def function(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": SCHEMA} | changes}


def message(**changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"} | changes]}


def call(arguments: Any) -> dict[str, Any]:
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    turns = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": "a", "content": "b"}]
    return {"messages": [*MESSAGES, *turns]}


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}}


ANTHROPIC: dict[str, Any] = {**message(), "max_tokens": 1}
# Bodies with a place for any value. Every option of a request is among them.
OPTIONS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold", "seed", "n", "beams"),
    *("length_penalty", "early_stopping", "min_new_tokens", "max_tokens", "max_completion_tokens", "max_new_tokens"),
    *("eos", "ignore_eos", "stop", "bad_words", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("no_repeat_ngram_size", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_sequence_breakers"),
    *("logit_bias", "regex", "grammar", "choice", "json_schema", "logprobs", "stream", "stream_options", "user"),
    *("metadata", "model", "priority", "adapter", "return_token_ids", "prompt_cache_key", "safety_identifier"),
)
IN_LISTS = ("eos", "stop", "bad_words", "choice", "dry_sequence_breakers")
PLACES: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/chat/completions", CHAT | {name: HERE}) for name in OPTIONS),
    *(("/v1/completions", TEXT | {name: [HERE]}) for name in IN_LISTS),
    *(("/v1/completions", TEXT | {"bad_words": [[HERE]]}), ("/v1/completions", TEXT | {"logit_bias": {"5": HERE}})),
    *(("/v1/completions", TEXT | {name: HERE}) for name in ("prompt", "suffix", "echo", "best_of", "logprobs")),
    *(("/v1/completions", TEXT | {"prompt": [HERE]}), ("/v1/completions", TEXT | {"prompt": [1, HERE]})),
    *(("/v1/completions", TEXT | {"presence_penalty": 1, name: HERE}) for name in ("frequency_penalty", "top_k")),
    *(("/v1/completions", TEXT | {"xtc_probability": 0.5, name: HERE}) for name in ("xtc_threshold", "min_p")),
    *(("/v1/completions", TEXT | {"dry_multiplier": 0.5, name: HERE}) for name in ("dry_base", "dry_allowed_length")),
    *(("/v1/completions", TEXT | {"temperature": 0, "beams": 2, name: HERE}) for name in ("length_penalty", "n")),
    *(("/v1/chat/completions", CHAT | message(**{name: HERE})) for name in ("role", "content", "name", "extra")),
    ("/v1/chat/completions", CHAT | message(content=[{"type": "text", "text": HERE}])),
    ("/v1/chat/completions", CHAT | call(HERE)),
    ("/v1/chat/completions", CHAT | call({"a": HERE})),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": HERE}),
    ("/v1/chat/completions", CHAT | {"chat_template_kwargs": HERE}),
    ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"documents": HERE}}),
    ("/v1/chat/completions", CHAT | {"prediction": {"type": "content", "content": HERE}}),
    *(("/v1/chat/completions", CHAT | schema(value)) for value in (HERE, {"const": HERE}, {"maximum": HERE})),
    ("/v1/chat/completions", CHAT | schema({"type": "object", "properties": {"a": HERE}, "required": ["a"]})),
    ("/v1/chat/completions", CHAT | {"tools": HERE}),
    *(("/v1/chat/completions", CHAT | {"tools": [function(**{n: HERE})]}) for n in ("name", "description", "strict")),
    ("/v1/chat/completions", CHAT | {"tools": [function(parameters=SCHEMA | {"description": HERE})]}),
    ("/v1/chat/completions", CHAT | {"tools": [function(parameters=SCHEMA | {"extra": HERE}, strict=True)]}),
    ("/v1/chat/completions", CHAT | {"tools": [function()], "tool_choice": HERE}),
    *(("/v1/responses", {"input": "x", "max_output_tokens": 1} | {name: HERE}) for name in ("input", "instructions")),
    *(("/v1/responses", {"input": "x", "max_output_tokens": 1} | {name: HERE}) for name in ("metadata", "reasoning")),
    *(("/v1/responses", {"input": "x", "max_output_tokens": 1} | {name: HERE}) for name in ("text", "tools", "user")),
    ("/v1/responses", {"max_output_tokens": 1, "input": [{"role": "user", "content": HERE}]}),
    ("/v1/responses", {"max_output_tokens": HERE, "input": "x"}),
    *(("/v1/messages", {**ANTHROPIC, name: HERE}) for name in ("system", "tools", "tool_choice", "stop_sequences")),
    *(("/v1/messages", {**ANTHROPIC, name: HERE}) for name in ("thinking", "output_config", "metadata", "max_tokens")),
    *(("/v1/messages", {**ANTHROPIC, **message(**{name: HERE})}) for name in ("role", "content", "extra")),
    ("/v1/messages", {**ANTHROPIC, **message(content=[{"type": "text", "text": HERE}])}),
    ("/v1/messages", {**ANTHROPIC, **message(content=[{"type": "tool_result", "tool_use_id": "a", "content": HERE}])}),
    ("/v1/messages", {**ANTHROPIC, "tools": [{"name": "f", "input_schema": SCHEMA | {"extra": HERE}, "strict": True}]}),
    ("/v1/messages/count_tokens", message(content=HERE)),
    *(("/tokenize", value) for value in ({"prompt": HERE}, message(content=HERE), message(extra=HERE))),
    *(("/detokenize", value) for value in ({"tokens": HERE}, {"tokens": [HERE]})),
]


def nested(depth: int) -> Iterator[str]:
    """Values of JSON of a depth, as text."""
    yield "[" * depth + "]" * depth
    yield '{"a":' * depth + "1" + "}" * depth


# Values in JSON, and whether a body with the value in any place is rejected.
BAD = {
    '"\\ud800"': True,
    '"a\\udfffb"': True,
    '{"\\udc00": 1}': True,
    "NaN": True,
    "-Infinity": True,
    "1e999": True,
    "9" * 5000: True,
    **dict.fromkeys(nested(MAX_DEPTH + 1), True),
    **dict.fromkeys(nested(900), True),
    **dict.fromkeys(nested(60), False),
    "1" + "0" * 400: False,
    "-1" + "0" * 4000: False,
    str(2**63): False,
    str(10**30): False,
    "1e300": False,
    "1e-320": False,
    "-0": False,
    "true": False,
    '"\\u0000"': False,
    '"\\ufeff"': False,
}


@pytest.mark.parametrize("bad", BAD, ids=lambda value: value[:12])
def test_invalid_text_in_any_field_is_an_error_of_its_request(server: LiveServer, bad: str) -> None:
    headers = {"Content-Type": "application/json"}
    with httpx2.Client(base_url=server.url, timeout=SECONDS, headers=headers) as client:
        for path, body in PLACES:
            # How many texts there may be, and large numbers in schemas, are bounded elsewhere.
            if not BAD[bad] and bad.lstrip("-").isdigit() and (body.get("n") == HERE or "response_format" in body):
                continue
            content = json.dumps(body).replace(json.dumps(HERE), bad)
            answer = client.post(path, content=content.encode())
            assert answer.status_code in ((400,) if BAD[bad] else (200, 400, 404)), (path, content[:300], answer.text)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert error["message"], content
                assert len(error["message"]) <= 1001
        assert client.get("/health").status_code == 200
        after = client.post("/v1/completions", json=TEXT | {"temperature": 0, "max_tokens": 4})
    assert (
        after.json()["choices"][0]["text"]
        == server.engines["demo"].lm.generate("x", max_new_tokens=4, temperature=0).text
    )
