"""Streams of all three endpoints, and the status and field of many bodies, from `onward serve` on the frozen model."""

import http.client
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.golden import DEMO

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_SECONDS = 120

MESSAGES = [{"role": "user", "content": "What is the price of a kite at the harbour market?"}]
TOOL = {
    "name": "find_price",
    "description": "The price of a thing.",
    "parameters": {
        "type": "object",
        "properties": {"item": {"type": "string"}, "currency": {"enum": ["crowns", "pence"]}},
        "required": ["item"],
    },
}
_CHAT_TOOLS = [{"type": "function", "function": TOOL}]
_SEEDED = {"seed": 5, "temperature": 0.8}

STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES, "max_tokens": 30, **_SEEDED, "stream_options": {"include_usage": True}}),
    "chat-n2": (CHAT, {"messages": MESSAGES, "max_tokens": 20, "n": 2, **_SEEDED}),
    "chat-logprobs": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 8, **_SEEDED, "logprobs": True, "top_logprobs": 2},
    ),
    "chat-call": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 80, "seed": 5, "tools": _CHAT_TOOLS, "tool_choice": "required"},
    ),
    "chat-auto": (CHAT, {"messages": MESSAGES, "max_tokens": 60, "temperature": 0, "tools": _CHAT_TOOLS}),
    "chat-schema": (
        CHAT,
        {
            "messages": MESSAGES,
            "max_tokens": 40,
            "seed": 5,
            "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": TOOL["parameters"]}},
        },
    ),
    "text": (TEXT, {"prompt": "Once upon a time", "max_tokens": 30, **_SEEDED, "stop": ["."]}),
    "text-n2": (TEXT, {"prompt": "Once upon a time", "max_tokens": 12, "n": 2, **_SEEDED}),
    "text-logprobs": (TEXT, {"prompt": "The fox", "max_tokens": 6, "logprobs": 2, "echo": True, **_SEEDED}),
    "responses": (RESPONSES, {"input": "Tell me a story.", "max_output_tokens": 30, "store": False, **_SEEDED}),
    "responses-call": (
        RESPONSES,
        {
            "input": MESSAGES[0]["content"],
            "max_output_tokens": 80,
            "store": False,
            "seed": 5,
            "tools": [{"type": "function", **TOOL}],
            "tool_choice": "required",
        },
    ),
    "responses-logprobs": (
        RESPONSES,
        {
            "input": "Hello!",
            "max_output_tokens": 6,
            "store": False,
            **_SEEDED,
            "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
        },
    ),
}

_SHORT = {CHAT: {"messages": MESSAGES}, TEXT: {"prompt": "Once"}, RESPONSES: {"input": "Once"}}
_EVERYWHERE: list[dict[str, Any]] = [
    {},
    {"temperature": -1},
    {"temperature": "hot"},
    {"temperature": 0.5},
    {"top_p": 0},
    {"top_p": 0.5},
    {"top_k": -1},
    {"min_p": 0.1},
    {"seed": -1},
    {"seed": 2**63},
    {"n": 0},
    {"n": 2},
    {"n": 2, "temperature": 0},
    {"stop": [""]},
    {"stop": "end"},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"5": -100}},
    {"logit_bias": {"999999": 1}},
    {"logprobs": 5},
    {"logprobs": True},
    {"top_logprobs": 5},
    {"max_tokens": -1},
    {"max_tokens": 100_000},
    {"presence_penalty": 1.5},
    {"store": True},
    {"stream": True},
    {"user": "u"},
    {"metadata": {"a": "b"}},
    {"service_tier": "flex"},
    {"model": "other"},
    {"model": "demo"},
    {"temprature": 1},
    {"draft": "lookup"},
    {"time_limit": 1},
    {"tools": []},
    {"tools": [{"type": "function"}]},
    {"tools": _CHAT_TOOLS},
    {"tool_choice": "required"},
    {"functions": [{"name": "f"}]},
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_object"}},
    {"echo": 1},
    {"suffix": "x"},
    {"best_of": 3},
    {"eos": [4]},
    {"ignore_eos": True},
    {"bad_words": ["fox"]},
    {"regex": "[a-z]+"},
    {"regex": "["},
    {"json_schema": {"type": "object"}},
    {"beams": 2, "temperature": 0},
    {"reasoning_effort": "low"},
    {"chat_template_kwargs": 5},
    {"receipt": True},
    {"receipt": "yes"},
    {"receipt": True, "beams": 2, "temperature": 0},
]
_SINGLE: list[tuple[str, Any]] = [
    (CHAT, None),
    (CHAT, []),
    (CHAT, {}),
    (TEXT, {}),
    (RESPONSES, {}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"content": "x"}]}),
    (CHAT, {"messages": [*MESSAGES, {"role": "user", "content": 5}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 3000}]}),
    (CHAT, {"messages": MESSAGES, "prompt": "x"}),
    (TEXT, {"prompt": "x", "messages": MESSAGES}),
    (TEXT, {"prompt": [1, "a"]}),
    (TEXT, {"prompt": []}),
    (TEXT, {"prompt": ["Once", [5, 6]], "max_tokens": 2}),
    (TEXT, {"prompt": "word " * 3000}),
    (RESPONSES, {"input": []}),
    (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}),
    (RESPONSES, {"input": "x", "truncation": "auto"}),
    (RESPONSES, {"input": [{"type": "reasoning", "summary": []}]}),
    ("/tokenize", {"prompt": "Once"}),
    ("/tokenize", {}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/detokenize", {"tokens": [-1]}),
    ("/v1/embeddings", {"input": "x"}),
    ("/v1/models/weights", {"model": "demo", "weights_path": "x"}),
]


def bodies() -> list[tuple[str, Any]]:
    """(path, body) of every recorded request."""
    short = {CHAT: "max_tokens", TEXT: "max_tokens", RESPONSES: "max_output_tokens"}
    return [(path, {**_SHORT[path], short[path]: 4, **fields}) for path in _SHORT for fields in _EVERYWHERE] + _SINGLE


@contextmanager
def server() -> Iterator[int]:
    """`onward serve` of the frozen model on a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "onward", "serve", "--model", f"demo={DEMO}", "--port", str(port)]
    process = subprocess.Popen([*command, "--no-access-log"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _SECONDS
        while not _ready(port):
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not become ready"
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait(_SECONDS)


def answer(port: int, path: str, body: Any) -> tuple[int, str]:
    """Status and text of the answer to a POST."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
    try:
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def all_streams(port: int) -> dict[str, list[str]]:
    """The server-sent events of each stream, without ids and times."""
    return {name: _normal(answer(port, path, {**body, "stream": True})[1]) for name, (path, body) in STREAMS.items()}


def all_statuses(port: int) -> list[list[Any]]:
    """[path, body, status, the field that is refused, the error's code] of every recorded body."""
    rows: list[list[Any]] = []
    for path, body in bodies():
        status, text = answer(port, path, body)
        error = json.loads(text).get("error", {}) if status >= 400 else {}
        shown = json.dumps(body)
        shown = shown if len(shown) < 500 else f"{shown[:200]}…"
        rows.append([path, shown, status, error.get("param"), error.get("code")])
    return rows


def _ready(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False


def _normal(text: str) -> list[str]:
    """The frames of a stream in short: without ids, times and numbers, and with neighbouring deltas as one.

    Tokens that are ready together share an event, so the cuts between deltas depend on the clock.
    """
    text = re.sub(r"[0-9a-f]{32}", "ID", text)
    text = re.sub(r"call_[0-9A-Za-z]{24}", "call_ID", text)
    numbers = "created|created_at|completed_at|sequence_number|cached_tokens|cache_write_tokens"
    text = re.sub(rf'"({numbers})": ?\d+', r'"\1":0', text)
    merged: list[tuple[str, str, list[Any]]] = []  # (a frame without its text and logprobs, text, logprobs)
    last: dict[int, int] = {}  # the place of a choice's last frame
    for frame in filter(None, text.split("\n\n")):
        data = next((line[6:] for line in frame.split("\n") if line.startswith("data: ")), "")
        if not data.startswith("{"):
            merged.append(("", data, []))
            continue
        event = json.loads(data)
        choice = event["choices"][0] if event.get("choices") else event
        added, scores = _text_taken_out(choice), _logprobs_taken_out(choice)
        skeleton, index = json.dumps(event), choice.get("index", 0)
        at = last.get(index)
        if added is not None and at is not None and merged[at][0] == skeleton:
            merged[at] = (skeleton, merged[at][1] + added, merged[at][2] + scores)
        else:
            last[index] = len(merged)
            merged.append((skeleton, added or "", scores))
    return [f"{skeleton} {json.dumps(added, ensure_ascii=False)} {json.dumps(s)}" for skeleton, added, s in merged]


def _text_taken_out(choice: dict[str, Any]) -> str | None:
    """The new text of a choice, which is taken out of it; None if it has none."""
    inner = choice.get("delta")
    holder, names = (inner, ("content",)) if isinstance(inner, dict) else (choice, ("text", "delta"))
    for name in names:
        if isinstance(holder.get(name), str):
            added, holder[name] = holder[name], ""
            holder.pop("role", None)
            return str(added)
    return None


def _logprobs_taken_out(choice: dict[str, Any]) -> list[Any]:
    """The logprobs of a choice, an entry a token, which are taken out of it."""
    logprobs = choice.get("logprobs")
    if not logprobs:
        return []
    choice["logprobs"] = "…"
    if isinstance(logprobs, list):
        return logprobs
    if "content" in logprobs:
        return list(logprobs["content"])
    return [list(entry) for entry in zip(*(logprobs[name] for name in sorted(logprobs)), strict=True)]
