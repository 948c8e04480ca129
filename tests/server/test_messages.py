"""/v1/messages: the chat of a body, its answer as content blocks, the events of a stream, and errors."""

import dataclasses
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from live_server import SECONDS, LiveServer, Stream
from pydantic_core import from_json

import onward
from onward.chat import AssistantMessage, ChatTemplate, MessageDelta, ToolCall
from onward.chat.format import MessageParser
from onward.chat.formats import FORMATS
from onward.errors import EngineBusyError, EngineError
from onward.language_model import Completion, Piece
from onward.protocols import BodyError, BodyReader, ParsedBody, protocol_of
from onward.protocols.messages_events import JsonText

Start = Callable[..., LiveServer]
PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SAID: list[Any] = [{"role": "user", "content": "Tell me a story."}]
BODY: dict[str, Any] = {"messages": SAID, "max_tokens": 12, "seed": 3}
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Bergen"]}}, "required": ["city"]}
TOOL: dict[str, Any] = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
# With a switch for reasoning, and an effort.
TEMPLATE = """\
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call></tool_call>{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{{ reasoning_effort }}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}"""


@pytest.fixture(scope="module")
def thinker() -> onward.LanguageModel:
    demo = onward.load("demo")
    return onward.LanguageModel(demo.model, demo.tokenizer, ChatTemplate(TEMPLATE, {}), demo.defaults)


@pytest.fixture(scope="module")
def thinkers(thinker: onward.LanguageModel) -> Iterator[LiveServer]:
    with LiveServer({"demo": thinker}) as live:
        yield live


def read(lm: onward.LanguageModel, **fields: Any) -> ParsedBody:
    return BodyReader(lm, "demo", streams=True).read(PATH, {**BODY, **fields})


def events_of(stream: Stream) -> list[dict[str, Any]]:
    """The data of its events, whose types are their names."""
    events = [json.loads(event) for event in stream.events]
    names = [line.removeprefix("event: ") for line in stream.text.split("\n") if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    return events


def added(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that events add up to; blocks follow each other."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message, block = events[0]["message"], None
    texts = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    for event in events[2:-2]:
        kind, place = event["type"], len(message["content"])
        assert event["index"] == place
        if kind == "content_block_start":
            assert block is None
            block, arguments = event["content_block"], ""
        elif kind == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
            else:
                block[texts[delta["type"]]] += delta[texts[delta["type"]]]
        else:
            assert kind == "content_block_stop"
            if block["type"] == "tool_use":
                block["input"] = from_json(arguments or "{}", allow_partial=True)  # as Anthropic's client does
            message["content"].append(block)
            block = None
    assert block is None
    usage = {**message["usage"], **events[-2]["usage"]}
    return {**message, **events[-2]["delta"], "usage": usage}


def same(whole: dict[str, Any], streamed: dict[str, Any]) -> bool:
    """Whether they differ only in the response's own fields and in cached tokens."""

    def bare(message: dict[str, Any]) -> dict[str, Any]:
        usage = message["usage"]
        total = usage["input_tokens"] + usage["cache_read_input_tokens"]
        content = [
            {name: value for name, value in block.items() if name != "signature"} for block in message["content"]
        ]
        return {**message, "id": "", "content": content, "usage": {"output": usage["output_tokens"], "input": total}}

    return bare(whole) == bare(streamed)


# ── bodies ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def use(id: str, **input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "weather", "input": input}


def result(id: str, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, **more}


def call(id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "weather", "arguments": arguments}}


CONVERSATIONS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "strings": (
        {"system": "Be brief.", "messages": SAID},
        [{"role": "system", "content": "Be brief."}, *SAID],
    ),
    "blocks": (
        {
            "system": [text("Be ", cache_control={"type": "ephemeral"}), text("brief.")],
            "messages": [{"role": "user", "content": [text("Tell me "), text("a story.", citations=None)]}],
        },
        [{"role": "system", "content": "Be brief."}, *SAID],
    ),
    "consecutive": (
        {"messages": [{"role": "user", "content": "Hi."}, *SAID]},
        [{"role": "user", "content": "Hi.\n\nTell me a story."}],
    ),
    "system among messages": (
        {"system": "Be brief.", "messages": [{"role": "system", "content": "Be kind."}, *SAID]},
        [{"role": "system", "content": "Be brief.\n\nBe kind."}, *SAID],
    ),
    "tools": (
        {
            "messages": [
                *SAID,
                {"role": "assistant", "content": [text("Well."), use("a", city="Oslo"), use("b", city="Bergen")]},
                {"role": "user", "content": [result("a", content="rain"), result("b"), text("And "), text("now?")]},
            ]
        },
        [
            *SAID,
            {"role": "assistant", "content": "Well.", "tool_calls": [call("a", city="Oslo"), call("b", city="Bergen")]},
            {"role": "tool", "tool_call_id": "a", "content": "rain"},
            {"role": "tool", "tool_call_id": "b", "content": ""},
            {"role": "user", "content": "And now?"},
        ],
    ),
    "results in two messages": (
        {
            "messages": [
                *SAID,
                {"role": "assistant", "content": [use("a")]},
                {"role": "assistant", "content": [use("b")]},
                {"role": "user", "content": [result("a", content=[text("r"), text("ain")], is_error=False)]},
                {"role": "user", "content": [result("b", content="no such city", is_error=True)]},
            ]
        },
        [
            *SAID,
            {"role": "assistant", "content": None, "tool_calls": [call("a"), call("b")]},
            {"role": "tool", "tool_call_id": "a", "content": "rain"},
            {"role": "tool", "tool_call_id": "b", "content": "Error: no such city"},
        ],
    ),
    "reasoning": (
        {
            "messages": [
                *SAID,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                        {"type": "redacted_thinking", "data": "x"},
                        text("Well."),
                    ],
                },
                {"role": "user", "content": "Go on."},
            ]
        },
        [
            *SAID,
            {"role": "assistant", "content": "Well.", "reasoning": "Hm."},
            {"role": "user", "content": "Go on."},
        ],
    ),
}


@pytest.mark.parametrize("named", CONVERSATIONS)
def test_a_body_is_equivalent_to_a_chat(lm: onward.LanguageModel, named: str) -> None:
    fields, messages = CONVERSATIONS[named]
    body = read(lm, **fields)
    assert body.values.conversation == messages
    assert body.requests[0].prompt == lm.chat_request(messages).prompt


def test_options_have_anthropics_field_names(thinker: onward.LanguageModel) -> None:
    body = read(thinker, stop_sequences=["a", "b"], temperature=0.5, top_p=0.9, top_k=5, metadata={"user_id": "u"})
    options = body.requests[0].options
    assert (options.stop, options.temperature, options.top_p, options.top_k) == (("a", "b"), 0.5, 0.9, 5)
    assert (options.max_new_tokens, options.seed) == (12, 3)
    harmless = {
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "diagnostics": {"previous_message_id": None},
        "service_tier": "auto",
        "speed": "standard",
        "mcp_servers": [],
        "output_config": {},
        "top_k": None,
    }
    assert read(thinker, **harmless).requests == read(thinker).requests
    schema = {"type": "json_schema", "schema": SCHEMA}
    by_schema = read(thinker, json_schema=SCHEMA).requests
    assert read(thinker, output_config={"format": schema}).requests == by_schema
    assert read(thinker, output_format=schema).requests == by_schema


def test_a_thinking_budget_is_a_reasoning_budget(thinker: onward.LanguageModel, lm: onward.LanguageModel) -> None:
    for fields, budget in [
        ({}, None),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024),
        ({"thinking": {"type": "disabled"}}, None),  # by the template's switch
        ({"reasoning_budget": 7}, 7),
    ]:
        assert read(thinker, **fields).requests[0].options.reasoning_budget == budget
    always = ChatTemplate(TEMPLATE.replace("enable_thinking", "no_switch"), {})
    without = onward.LanguageModel(lm.model, lm.tokenizer, always, lm.defaults)
    assert read(without, thinking={"type": "disabled"}).requests[0].options.reasoning_budget == 0
    assert read(lm, thinking={"type": "disabled"}).requests[0].options.reasoning_budget is None


CHOICES: list[tuple[Any, Any, bool | None]] = [
    ({"type": "auto"}, "auto", None),
    ({"type": "none"}, "none", None),
    ({"type": "any"}, "required", None),
    ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
    ({"type": "auto", "disable_parallel_tool_use": False}, "auto", None),
    ({"type": "tool", "name": "weather"}, "weather", None),
]


@pytest.mark.parametrize(("choice", "expected", "parallel"), CHOICES)
def test_tools_and_their_choice_equal_those_of_a_chat(
    thinker: onward.LanguageModel, choice: Any, expected: Any, parallel: bool | None
) -> None:
    hints = {"type": "custom", "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True, "strict": None}
    body = read(thinker, tools=[{**TOOL, **hints}], tool_choice=choice)
    tools: Any = [{"type": "function", "function": FUNCTION}]
    own = thinker.chat_request(
        SAID, tools=tools, tool_choice=expected, parallel_tool_calls=parallel, max_new_tokens=12, seed=3
    )
    assert body.requests[0].prompt == own.prompt
    assert repr(body.requests[0].options) == repr(own.options)


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive", "display": None}}, {"enable_thinking": True}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
        ),
    ],
)
def test_reasoning_sets_the_variables_that_a_template_reads(
    thinker: onward.LanguageModel, lm: onward.LanguageModel, fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    assert read(thinker, **fields).requests[0].prompt == thinker.chat_request(SAID, template=variables).prompt
    if "chat_template_kwargs" not in fields:  # a template without them
        assert read(lm, **fields).requests[0].prompt == lm.chat_request(SAID).prompt


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", "is required"),
    ({"max_tokens": -1}, "max_tokens", "0 or more; got -1"),
    ({"max_tokens": "5"}, "max_tokens", "whole number"),
    ({"messages": None}, "messages", "is required"),
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": [5]}, "messages[0]", "must be an object"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'user', 'assistant', 'system'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "a string or a list of content blocks"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name", "is not a field"),
    ({"messages": [*SAID, {"role": "assistant", "content": [use("a")]}]}, "messages", "without tool calls"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]", "must be a content block"),
    *(
        (
            {"messages": [{"role": role, "content": [{"type": kind}]}, *SAID]},
            "messages[0].content[0]",
            f"is of the type {kind!r}",
        )
        for role, kind in [
            *(("user", kind) for kind in ("image", "document", "search_result", "tool_use", "thinking")),
            *(("assistant", kind) for kind in ("server_tool_use", "tool_result")),
            ("system", "tool_result"),
        ]
    ),
    ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "messages[0].content[0]", "is of the type"),
    ({"messages": [{"role": "user", "content": [text("a", b=1)]}]}, "messages[0].content[0].b", "is not a field"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "a string"),
    (
        {"messages": [{"role": "assistant", "content": [{**use("a"), "input": "{}"}]}, *SAID]},
        "messages[0].content[0].input",
        "an object; got '{}'",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[0].content[0].tool_use_id",
        "a string; got None",
    ),
    (
        {"messages": [{"role": "user", "content": [result("a", is_error="yes")]}]},
        "messages[0].content[0].is_error",
        "true or false",
    ),
    (
        {"messages": [{"role": "user", "content": [result("a", content=[{"type": "image"}])]}]},
        "messages[0].content[0].content[0]",
        "'image'",
    ),
    ({"system": 5}, "system", "a string or a list of content blocks; got 5"),
    ({"system": [{"type": "image"}]}, "system[0]", "'image'"),
    ({"tools": {}}, "tools", "a list of tools"),
    ({"tools": [5]}, "tools[0]", "must be an object"),
    *(
        ({"tools": [{"type": kind, "name": "x"}]}, "tools[0]", f"is of the type {kind!r}")
        for kind in ("web_search_20250305", "bash_20250124", "text_editor_20250728", "code_execution_20250825")
    ),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema", "must be a JSON schema; got None"),
    ({"tools": [{**TOOL, "name": "x y"}]}, "tools", "tools[0].name must be"),
    ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools", "tools[0].input_schema must be"),
    ({"tools": [{**TOOL, "input_schema": {"type": "object", "properties": 5}}]}, "tools", "tools[0].input_schema"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading", "is not supported"),
    ({"tools": [{**TOOL, "colour": "red"}]}, "tools[0].colour", "is not a field"),
    ({"tools": [TOOL, TOOL]}, "tools", "names must be unique"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "must be an object"),
    ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type", "auto, any, tool or none"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "is required"),
    ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "x"}}, "tool_choice.name", "with no other"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice", "the tools are weather"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "there are no tools"),
    ({"thinking": True}, "thinking", "must be an object"),
    ({"thinking": {"type": "on"}}, "thinking.type", "enabled, adaptive or disabled"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "is required"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens", "1 or more; got 0"),
    ({"thinking": {"type": "disabled", "budget_tokens": 1024}}, "thinking.budget_tokens", "with no other"),
    ({"thinking": {"type": "adaptive"}, "reasoning_budget": 5}, "reasoning_budget", "cannot be combined with thinking"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort", "low, medium, high, xhigh or max"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type", "json_schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}}, "output_config", "no"),
    ({"output_format": {"type": "json_schema"}}, "output_format", "must have 'schema'"),
    ({"stop_sequences": "x"}, "stop_sequences", "must be a list"),
    ({"stop_sequences": [""]}, "stop_sequences", "got ''"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences", "at most 64"),
    ({"service_tier": "flex"}, "service_tier", "auto or standard_only"),
    ({"thread": {"type": "create"}}, "thread", "send all messages"),
    ({"speed": "fast"}, "speed", "is not supported"),
    ({"container": "c"}, "container", "is not supported"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "is not supported"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0]", "supports only"),
    ({"context_management": 5}, "context_management.edits[0]", "supports only"),
    ({"temperature": -1}, "temperature", "0 or more"),
    ({"n": 2}, "n", "unknown option 'n'"),
    ({"stop": ["x"]}, "stop", "stop_sequences"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", "unknown option 'parallel_tool_calls'"),
    ({"chat_template_kwargs": {"no": 1}}, "chat_template_kwargs", "unknown option 'no'"),
    ({"model": "claude"}, "model", "the model is 'demo'"),
]


@pytest.mark.parametrize(
    ("fields", "param", "message"), BAD, ids=[f"{param} {at}" for at, (_, param, _) in enumerate(BAD)]
)
def test_unsupported_fields_are_refused_by_name(
    thinker: onward.LanguageModel, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(BodyError) as refused:
        read(thinker, **fields)
    assert refused.value.param == param
    assert refused.value.status == (404 if param == "model" else 400)
    assert message in str(refused.value)


# ── responses ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_message_has_the_text_of_the_chat_whole_and_streamed(server: LiveServer, lm: onward.LanguageModel) -> None:
    alone = lm.chat(SAID, max_new_tokens=12, seed=3)
    whole = server.post(PATH, {"model": "demo", **BODY}, headers={"anthropic-version": "2023-06-01"}).json()
    assert whole["content"] == [{"type": "text", "text": alone.text}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("max_tokens", None)
    assert (whole["type"], whole["role"], whole["model"], whole["seed"]) == ("message", "assistant", "demo", 3)
    stream = server.stream(PATH, BODY)
    assert stream.headers["content-type"].startswith("text/event-stream")
    events = events_of(stream)
    assert same(whole, added(events))
    assert sum(event["type"] == "content_block_delta" for event in events) > 3
    assert events[0]["message"]["usage"]["input_tokens"] == alone.prompt_tokens


def test_usage_separates_cached_prompt_tokens(server: LiveServer, lm: onward.LanguageModel) -> None:
    prompt = lm.chat(SAID, max_new_tokens=1).prompt_tokens
    for _ in range(2):
        usage = server.post(PATH, BODY).json()["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt
        assert usage["cache_creation_input_tokens"] == 0
        assert usage["output_tokens"] == 12
    assert usage["cache_read_input_tokens"] > 0


def test_a_stop_sequence_is_named(server: LiveServer) -> None:
    body = {**BODY, "max_tokens": 200, "stop_sequences": ["zzz", "e"], "temperature": 0}
    whole = server.post(PATH, body).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "e")
    assert "e" not in whole["content"][0]["text"]
    assert same(whole, added(events_of(server.stream(PATH, body))))


def test_a_text_ends_at_the_end_of_the_context(server: LiveServer, lm: onward.LanguageModel) -> None:
    """Agents ask for more tokens than there is room for."""
    room = lm.model.max_seq_len - len(lm.chat_request(SAID).prompt)  # type: ignore[operator]
    body = {**BODY, "max_tokens": 32_000, "ignore_eos": True}
    whole = server.post(PATH, body).json()
    assert (whole["stop_reason"], whole["usage"]["output_tokens"]) == ("model_context_window_exceeded", room)
    answer = server.post(PATH, {**BODY, "messages": [{"role": "user", "content": "word " * 2000}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("prompt is too long: ")


def test_a_started_message_is_continued(server: LiveServer, lm: onward.LanguageModel) -> None:
    begun = [*SAID, {"role": "assistant", "content": "Once upon a time"}]
    alone = lm.chat(begun, continue_final_message=True, max_new_tokens=12, seed=3)
    body = {**BODY, "messages": [*SAID, {"role": "assistant", "content": [text("Once upon "), text("a time")]}]}
    whole = server.post(PATH, body).json()
    assert whole["content"] == [text(alone.text)]
    assert same(whole, added(events_of(server.stream(PATH, body))))


def test_zero_tokens_generate_nothing(server: LiveServer) -> None:
    whole = server.post(PATH, {**BODY, "max_tokens": 0}).json()
    assert (whole["content"], whole["stop_reason"], whole["usage"]["output_tokens"]) == ([], "max_tokens", 0)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_calls_are_blocks_whole_and_streamed(thinkers: LiveServer, choice: Any) -> None:
    body = {**BODY, "max_tokens": 300, "tools": [TOOL], "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    body["thinking"] = {"type": "disabled"}
    whole = thinkers.post(PATH, body).json()
    (block,) = whole["content"]
    assert (block["type"], block["name"], whole["stop_reason"]) == ("tool_use", "weather", "tool_use")
    assert block["input"]["city"] in ("Oslo", "Bergen")
    events = events_of(thinkers.stream(PATH, body))
    assert same(whole, added(events))
    assert sum(event["type"] == "content_block_delta" for event in events) > 3, "arguments come as they are written"
    answered = [*SAID, {"role": "assistant", "content": whole["content"]}]
    answered.append({"role": "user", "content": [result(block["id"], content="rain")]})
    assert thinkers.post(PATH, {**body, "messages": answered, "tool_choice": {"type": "none"}}).status_code == 200


def test_a_text_meets_its_schema(server: LiveServer) -> None:
    format = {"type": "json_schema", "schema": {**SCHEMA, "additionalProperties": False}}
    whole = server.post(PATH, {**BODY, "max_tokens": 100, "output_config": {"format": format}}).json()
    assert json.loads(whole["content"][0]["text"])["city"] in ("Oslo", "Bergen")


@pytest.mark.parametrize(
    "fields",
    [
        *(fields for fields, _ in CONVERSATIONS.values()),
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": {"type": "none"}},
        {"tools": [TOOL], "tool_choice": {"type": "any"}, "system": "Be brief."},
        {"thinking": {"type": "disabled"}},
        {"messages": [*SAID, {"role": "assistant", "content": "Once"}]},
        {"output_config": {"effort": "low"}},
        {"chat_template_kwargs": {"reasoning_effort": "medium"}},
    ],
)
def test_the_counted_prompt_is_that_of_the_message(thinkers: LiveServer, fields: dict[str, Any]) -> None:
    body = {"model": "demo", "messages": SAID, **fields}
    counted = thinkers.post(COUNT, body).json()
    usage = thinkers.post(PATH, {**body, "max_tokens": 1}).json()["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_prompts_longer_than_the_context_are_counted(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "word " * 5000}]}
    assert server.post(COUNT, body).json()["input_tokens"] > 5000
    body["messages"][0]["content"] = "word " * 300_000
    answer = server.post(COUNT, body)
    assert answer.status_code == 400
    assert "at most 1048576" in answer.json()["error"]["message"]
    for bad in ({"max_tokens": 5}, {"stream": True}, {"temperature": 1}):
        assert server.post(COUNT, {"messages": SAID, **bad}).status_code == 400


# ── streams and whole responses of any text ─────────────────────────────────────────────────────────────────────────

PARTS = st.sampled_from(
    [
        *("<think>", "</think>", "Well. ", "é🦊", "\n", " ", "<tool_call>", "</tool_call>", "x"),
        *('\n{"name": "weather", "arguments": {"city": "Oslo"}}\n', '{"name": "weather", "arguments": {}}'),
        *('{"name": "weather", "arguments": {"city": "a\nb\\"\t\\\\"}}', '{"name": "weather", "arguments": {"city'),
    ]
)


def parsed(output: str, cuts: Sequence[int]) -> list[MessageDelta]:
    """The deltas of a text that comes in parts."""
    parser = MessageParser(FORMATS["hermes"], lambda at: f"call_{at}", ["weather"])
    deltas, before = [], 0
    for cut in [*sorted(cuts), len(output)]:
        parser.feed(output[before:cut])
        if cut == len(output):
            parser.finish()
        deltas.append(parser.take())
        before = cut
    return deltas


@hypothesis.settings(max_examples=200, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(data=st.data())
def test_a_stream_adds_up_to_the_whole_message(thinker: onward.LanguageModel, data: st.DataObject) -> None:
    said = "".join(data.draw(st.lists(PARTS, max_size=8)))
    cuts = data.draw(st.lists(st.integers(0, len(said)), max_size=12))
    display = data.draw(st.sampled_from([None, "omitted"]))
    body = read(thinker, thinking={"type": "adaptive", "display": display})
    deltas = parsed(said, cuts)
    pieces = [Piece("", 5, message=delta) for delta in deltas]
    completion = completed(thinker, body, AssistantMessage.of(deltas), len(pieces))
    whole = body.protocol.answer(body, [completion])

    def streamed(sizes: Sequence[int]) -> tuple[list[tuple[int, str]], list[str]]:
        stream = body.protocol.events(body)  # type: ignore[arg-type]
        begun, events, at = stream.begin(0), [], 0
        for size in sizes:
            events += [(at + done, event) for done, event in stream.pieces(0, pieces[at : at + size])]
            at += size
        return events, [*begun, *(event for _, event in events), *stream.end(0, completion)]

    alone, frames = streamed([1] * len(pieces))
    assert streamed([len(pieces)])[0] == alone, "events depend on pieces alone"
    got = added([json.loads(frame.partition("data: ")[2]) for frame in frames])
    kinds = [block["type"] for block in got["content"]]
    if "tool_use" in kinds and "text" in kinds[kinds.index("tool_use") :]:
        # A stream has text after a call as a block of its own; the whole message has all text before the calls.
        (joined,) = (block["text"] for block in whole["content"] if block["type"] == "text")
        assert joined == "".join(block["text"] for block in got["content"] if block["type"] == "text")
        whole = {**whole, "content": [block for block in whole["content"] if block["type"] != "text"]}
        got = {**got, "content": [block for block in got["content"] if block["type"] != "text"]}
    assert got == whole


def completed(lm: onward.LanguageModel, body: ParsedBody, message: AssistantMessage, tokens: int) -> Completion:
    completion = lm.generate(body.requests[0], max_new_tokens=1)
    ids = completion.token_ids * tokens
    return dataclasses.replace(completion, message=message, token_ids=ids, finish_reason="stop", stopped_by=2)


def test_reasoning_text_and_calls_are_blocks(lm: onward.LanguageModel) -> None:
    body = read(lm)
    calls = (
        ToolCall("c1", "weather", '{"at":1}'),
        ToolCall("c2", "weather", ""),
        ToolCall("c3", "weather", '{"a": [1'),
    )
    broken = ToolCall("c4", "weather", "Oslo")
    completion = completed(lm, body, AssistantMessage("Well.", "Hm.", (*calls, broken)), 3)
    whole = body.protocol.answer(body, [completion])
    thinking, text_block, *uses = whole["content"]
    assert (thinking["type"], thinking["thinking"], len(thinking["signature"])) == ("thinking", "Hm.", 32)
    assert text_block == {"type": "text", "text": "Well."}
    assert [each["input"] for each in uses] == [{"at": 1}, {}, {"a": [1]}, {"INVALID_JSON": "Oslo"}]
    assert [each["id"] for each in uses] == ["c1", "c2", "c3", "c4"]
    assert whole["stop_reason"] == "tool_use"


@hypothesis.given(st.lists(st.text('"\\\n\ta{}[],:', max_size=6), max_size=6))
def test_json_in_parts_has_its_control_characters_escaped(parts: list[str]) -> None:
    whole = "".join(parts)
    escaped = JsonText().add(whole)
    writer = JsonText()
    assert "".join(writer.add(part) for part in parts) == escaped
    try:
        wanted = json.loads(whole, strict=False)
    except ValueError:
        return
    assert json.loads(escaped) == wanted


# ── errors and keys ─────────────────────────────────────────────────────────────────────────────────────────────────


def check_error(answer: Any, status: int, kind: str) -> dict[str, Any]:
    body = answer.json()
    assert answer.status_code == status
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return body  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", [PATH, COUNT, "/messages", "/messages/count_tokens"])
def test_errors_have_anthropics_format(start: Start, lm: onward.LanguageModel, path: str) -> None:
    server = start({"demo": lm}, api_keys=("key",), max_body=2000, hosts=("127.0.0.1",))
    key = {"x-api-key": "key"}
    body = {"messages": SAID} | ({} if path.endswith("tokens") else {"max_tokens": 2})
    assert server.post(path, body, headers=key).status_code == 200
    check_error(server.post(path, body), 401, "authentication_error")
    check_error(server.post(path, body, headers={"x-api-key": "wrong"}), 401, "authentication_error")
    check_error(server.post(path, body, headers={**key, "host": "evil.example"}), 403, "permission_error")
    check_error(server.post(path, {**body, "model": "claude"}, headers=key), 404, "not_found_error")
    check_error(server.post(f"{path}/nothing", body, headers=key), 404, "not_found_error")
    check_error(server.get(path, headers=key), 405, "invalid_request_error")
    check_error(server.post(path, {**body, "system": "x" * 3000}, headers=key), 413, "request_too_large")
    check_error(server.post(path, headers=key, content=b"{}"), 415, "invalid_request_error")
    check_error(server.post(path, {**body, "tools": 5}, headers=key), 400, "invalid_request_error")
    server.app.service.draining = True
    failed = server.post(path, body, headers=key)
    check_error(failed, 503, "overloaded_error")
    assert failed.headers["retry-after"]
    other = server.post("/v1/completions", {"prompt": "x"}, headers=key).json()
    assert set(other["error"]) == {"message", "type", "param", "code"}


def test_http_errors_have_anthropics_format(server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as raw:
        raw.sendall(f"POST {PATH} HTTP/1.1\r\nHost: x\r\n".encode() + b"A: b\r\n" * 500 + b"\r\n")
        head, _, body = b"".join(iter(lambda: raw.recv(4096), b"")).decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 431 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("error", "kind"),
    [(EngineBusyError("full", 1.0), "rate_limit_error"), (EngineError("gone"), "overloaded_error")],
)
def test_a_failed_stream_ends_with_an_error_event(lm: onward.LanguageModel, error: Any, kind: str) -> None:
    body = read(lm)
    (event,) = body.protocol.events(body).error(error)
    name, data, *_ = event.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {"type": "error", "error": {"type": kind, "message": str(error)}}
    assert event.startswith(protocol_of(PATH).failure_event)


def test_an_idle_stream_gets_pings(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, keep_alive=0.02)
    stream = server.stream(PATH, {**BODY, "max_tokens": 800, "ignore_eos": True})
    names = [json.loads(event)["type"] for event in stream.events]
    assert stream.comments == 0
    assert names.count("ping") >= 1


def test_either_header_may_have_the_key_at_every_endpoint(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm}, api_keys=("key",))
    right, wrong = {"authorization": "Bearer key"}, {"authorization": "Bearer other"}
    for path in ("/v1/models", "/stats"):
        for headers, status in [
            (right, 200),
            ({"x-api-key": "key"}, 200),
            ({"x-api-key": "other"}, 401),
            ({**right, "x-api-key": "other"}, 200),  # Authorization counts if there are both
            ({**wrong, "x-api-key": "key"}, 401),
            ({"authorization": "Basic key", "x-api-key": "key"}, 200),
            ({"authorization": "Basic key"}, 401),
            ({"x-api-key": ""}, 401),
            ({}, 401),
        ]:
            assert server.get(path, headers=headers).status_code == status, headers
    body = {"prompt": "x", "max_tokens": 2}
    answers = [
        server.post("/v1/completions", body, headers={**headers, "idempotency-key": "a"}).json()
        for headers in (right, {"x-api-key": "key"})
    ]
    assert answers[0]["id"] == answers[1]["id"], "one caller, whichever header has the key"
