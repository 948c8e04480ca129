"""Bodies in OpenAI's format: a field works or is rejected, and none is silently ignored."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onward
from onward.chat import ChatTemplate
from onward.errors import ContextOverflowError, DraftError, EngineBusyError, EngineError, OnwardError, RequestError
from onward.protocols import BodyError, BodyReader, error_fields, status_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
URLS = (CHAT, TEXT)
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def reader() -> BodyReader:
    return BodyReader(onward.load("demo"), "demo")


def of(url: str, **fields: Any) -> dict[str, Any]:
    return ({"messages": MESSAGES} if url == CHAT else {"prompt": "Once"}) | fields


def refusal(reader: BodyReader, url: str, body: object) -> BodyError:
    with pytest.raises(BodyError) as caught:
        reader.read(url, body)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "option"),
    [
        ("max_tokens", 7, {"max_new_tokens": 7}),
        ("max_completion_tokens", 7, {"max_new_tokens": 7}),
        ("temperature", 0.3, {"temperature": 0.3}),
        ("top_p", 0.5, {"top_p": 0.5}),
        ("n", 3, {"n": 3}),
        ("seed", 2**63, {"seed": 2**63}),
        ("stop", "end", {"stop": ("end",)}),
        ("stop", ["end", "."], {"stop": ("end", ".")}),
        ("presence_penalty", 1.5, {"presence_penalty": 1.5}),
        ("frequency_penalty", -1.5, {"frequency_penalty": -1.5}),
        ("logit_bias", {"5": -100}, {"logit_bias": ((5, -100),)}),
        ("min_p", 0.1, {"min_p": 0.1}),
        ("eos", [4], {"eos": (4,)}),
    ],
)
@pytest.mark.parametrize("url", URLS)
def test_a_field_is_an_option(reader: BodyReader, url: str, field: str, value: Any, option: dict[str, Any]) -> None:
    (request,) = reader.read(url, of(url, **{field: value})).requests
    (plain,) = reader.read(url, of(url)).requests
    assert request == plain.replace(**option)


@pytest.mark.parametrize("url", URLS)
def test_null_means_absent(reader: BodyReader, url: str) -> None:
    nulls = dict.fromkeys(("max_tokens", "temperature", "n", "seed", "stop", "logit_bias", "logprobs", "user", "tools"))
    assert reader.read(url, of(url, **nulls)) == reader.read(url, of(url))


def test_logprobs_are_requested_in_two_ways(reader: BodyReader) -> None:
    def count(url: str, **fields: Any) -> int | None:
        return reader.read(url, of(url, **fields)).requests[0].options.logprobs

    assert count(CHAT, logprobs=False) is None
    assert count(CHAT, logprobs=True) == 0
    assert count(CHAT, logprobs=True, top_logprobs=5) == 5
    assert count(TEXT, logprobs=0) == 0
    assert count(TEXT, logprobs=5) == 5


def test_content_parts_are_joined_and_developer_means_system(reader: BodyReader) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    (request,) = reader.read(CHAT, {"messages": messages}).requests
    assert list(request.prompt) == reader.lm.chat_prompt(plain)


def test_prompts_are_texts_or_ids_or_lists_of_them(reader: BodyReader) -> None:
    ids = reader.lm.encode("Once")
    for prompt, count in (("Once", 1), (ids, 1), (["Once"], 1), ([ids, ids], 2), (["Once", ids], 2)):
        requests = reader.read(TEXT, {"prompt": prompt}).requests
        assert [list(request.prompt) for request in requests] == [ids] * count


@pytest.mark.parametrize(
    "asks_for_nothing",
    [
        {"stream": False},
        {"store": False},
        {"response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "none"},
        {"modalities": ["text"]},
        {"service_tier": "default"},
        {"user": "u", "metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_without_effect_are_accepted(reader: BodyReader, asks_for_nothing: dict[str, Any]) -> None:
    assert reader.read(CHAT, of(CHAT, **asks_for_nothing)) == reader.read(CHAT, of(CHAT))


@pytest.mark.parametrize(
    ("url", "fields", "param", "code"),
    [
        (CHAT, {"tools": [{"type": "function"}]}, "tools", "invalid_value"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "invalid_value"),
        (CHAT, {"parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_value"),
        (TEXT, {"functions": [{"name": "f"}]}, "functions", "unsupported_value"),
        (TEXT, {"tools": []}, "tools", "unknown_parameter"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format", "unsupported_value"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format", "invalid_type"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
            "response_format",
            "invalid_value",
        ),
        (CHAT, {"stream": True}, "stream", "unsupported_value"),
        (CHAT, {"store": True}, "store", "unsupported_value"),
        (CHAT, {"prediction": {"type": "other", "content": "x"}}, "prediction", "invalid_type"),
        (CHAT, {"prediction": {"type": "content", "content": 5}}, "prediction.content", "invalid_type"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        (CHAT, {"return_token_ids": 1}, "return_token_ids", "invalid_type"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities", "unsupported_value"),
        (CHAT, {"service_tier": "flex"}, "service_tier", "unsupported_value"),
        (CHAT, {"web_search_options": {}}, "web_search_options", "unsupported_value"),
        (CHAT, {"prompt": "x"}, "prompt", "unknown_parameter"),
        (TEXT, {"messages": MESSAGES}, "messages", "unknown_parameter"),
        (CHAT, {"echo": True}, "echo", "unknown_parameter"),
        (CHAT, {"temprature": 1}, "temprature", "unknown_parameter"),
        (CHAT, {"draft": "lookup"}, "draft", "unknown_parameter"),
        (CHAT, {"time_limit": 1}, "time_limit", "unknown_parameter"),
        (CHAT, {"temperature": -1}, "temperature", "invalid_value"),
        (CHAT, {"temperature": "hot"}, "temperature", "invalid_value"),
        (CHAT, {"max_tokens": -2}, "max_tokens", "invalid_value"),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "invalid_value"),
        (CHAT, {"seed": -2}, "seed", "invalid_value"),
        (CHAT, {"n": 0}, "n", "invalid_value"),
        (CHAT, {"stop": [""]}, "stop", "invalid_value"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        (CHAT, {"logit_bias": [1]}, "logit_bias", "invalid_value"),
        (CHAT, {"logprobs": 5}, "logprobs", "invalid_type"),
        (CHAT, {"top_logprobs": 5}, "top_logprobs", "invalid_value"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "invalid_value"),
        (CHAT, {"messages": []}, "messages", "invalid_value"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0]", "invalid_type"),
        (CHAT, {"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages[1].content", "invalid_type"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "unsupported_value",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 3000}]}, "messages", "context_length_exceeded"),
        (CHAT, {"messages": None}, "messages", "missing_required_parameter"),
        (CHAT, {"chat_template_kwargs": 5}, "chat_template_kwargs", "invalid_type"),
        (CHAT, {"model": "other"}, "model", "model_not_found"),
        (TEXT, {"prompt": None}, "prompt", "missing_required_parameter"),
        (TEXT, {"prompt": [1, "a"]}, "prompt", "invalid_type"),
        (TEXT, {"prompt": []}, "prompt", "invalid_type"),
        (TEXT, {"prompt": {"a": 1}}, "prompt", "invalid_type"),
        (TEXT, {"prompt": "word " * 3000}, "prompt", "context_length_exceeded"),
        (TEXT, {"suffix": "x"}, "suffix", "unsupported_value"),
        (TEXT, {"best_of": 3}, "best_of", "unsupported_value"),
        (TEXT, {"echo": 1}, "echo", "invalid_type"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_unsupported_fields_are_refused_by_name(
    reader: BodyReader, url: str, fields: dict[str, Any], param: str, code: str
) -> None:
    error = refusal(reader, url, of(url, **fields))
    assert (error.param, error.code) == (param, code)


def test_messages_use_the_name_of_the_field_instead_of_the_option(reader: BodyReader) -> None:
    assert str(refusal(reader, TEXT, of(TEXT, max_tokens=-2))).startswith("max_tokens must be")
    assert str(refusal(reader, CHAT, of(CHAT, logprobs=True, top_logprobs=-1))).startswith("top_logprobs must be")


def test_a_variable_that_the_template_does_not_read_is_refused(reader: BodyReader) -> None:
    assert "enable_thinking" in str(refusal(reader, CHAT, of(CHAT, chat_template_kwargs={"enable_thinking": True})))
    assert "reasoning_effort" in str(refusal(reader, CHAT, of(CHAT, reasoning_effort="low")))


@pytest.mark.parametrize("body", [None, [], "text", 5])
def test_a_body_is_an_object(reader: BodyReader, body: object) -> None:
    assert refusal(reader, CHAT, body).code == "invalid_type"


def test_tools_that_the_template_ignores_are_refused(reader: BodyReader) -> None:
    template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}", {})
    unseeing = BodyReader(onward.LanguageModel(reader.lm.model, reader.lm.tokenizer, template), "unseeing")
    tools = of(CHAT, tools=[{"type": "function", "function": {"name": "f"}}])
    assert reader.read(CHAT, tools).requests
    with pytest.raises(BodyError, match="its chat template does not read tools") as refused:
        unseeing.read(CHAT, tools)
    assert (refused.value.param, refused.value.code) == ("tools", "invalid_value")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        *("model", "messages", "prompt", "logprobs", "top_logprobs", "echo", "best_of", "chat_template_kwargs", "n"),
        *("max_tokens", "temperature", "top_p", "seed", "stop", "logit_bias", "eos", "bad_words", "beams", "tools"),
        *("presence_penalty", "early_stopping", "reasoning_effort", "user", "stream", "min_new_tokens", "dry_base"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(url=st.sampled_from(sorted(URLS)), fields=st.dictionaries(NAMES | st.text(max_size=5), VALUES, max_size=4))
def test_any_json_is_a_body_or_an_onward_error(reader: BodyReader, url: str, fields: dict[str, Any]) -> None:
    error: OnwardError | None = None
    try:
        assert reader.read(url, of(url) | fields).requests
    except OnwardError as raised:
        error = raised
    assert error is None or status_of(error) in (400, 404)
    assert error is None or error_fields(error)["message"]


def test_error_statuses_are_those_that_clients_know() -> None:
    known: dict[type[OnwardError], tuple[OnwardError, int, str | None]] = {
        RequestError: (RequestError("x"), 400, None),
        ContextOverflowError: (ContextOverflowError("x"), 400, "context_length_exceeded"),
        EngineBusyError: (EngineBusyError("x", 1.0), 429, "engine_busy"),
        EngineError: (EngineError("x"), 503, "engine_unavailable"),
        DraftError: (DraftError("x"), 500, "server_error"),
    }
    for error, status, code in known.values():
        assert (status_of(error), error_fields(error)["code"]) == (status, code)
        assert set(error_fields(error)) == {"message", "type", "param", "code"}


def answered(reader: BodyReader, url: str, **fields: Any) -> dict[str, Any]:
    body = reader.read(url, of(url, **fields))
    return body.protocol.answer(body, [reader.lm.generate(request) for request in body.requests])


def test_an_answer_is_a_chat_completion(reader: BodyReader) -> None:
    answer = answered(reader, CHAT, max_tokens=4, seed=3, logprobs=True, top_logprobs=2)
    alone = reader.lm.chat(MESSAGES, max_new_tokens=4, seed=3, logprobs=2)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": alone.text, "refusal": None}
    assert choice["finish_reason"] == "length"
    tokens = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == alone.text
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == alone.text
    assert alone.logprobs is not None
    assert [token["logprob"] for token in tokens] == [entry.chosen for entry in alone.logprobs]
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)
    assert answer["object"] == "chat.completion"
    assert answer["system_fingerprint"] == f"onward-{onward.__version__}"
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(reader.lm.chat_prompt(MESSAGES))
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4


def test_an_echo_is_the_prompt_with_its_logprobs(reader: BodyReader) -> None:
    prompt = "Once upon a time"
    answer = answered(reader, TEXT, prompt=prompt, max_tokens=2, temperature=0, logprobs=1, echo=True)
    (choice,) = answer["choices"]
    alone = reader.lm.generate(prompt, max_new_tokens=2, temperature=0, logprobs=1, prompt_logprobs=1)
    logprobs = choice["logprobs"]
    assert choice["text"] == prompt + alone.text == "".join(logprobs["tokens"])
    assert alone.logprobs is not None
    assert alone.prompt_logprobs is not None
    entries = [*alone.prompt_logprobs, *alone.logprobs]
    assert logprobs["token_logprobs"] == [None if entry is None else entry.chosen for entry in entries]
    for at, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"][at : at + len(token)] == token


def test_sampling_logprobs_are_reported_next_to_logprobs(reader: BodyReader) -> None:
    asked: dict[str, Any] = {"temperature": 1, "top_p": 0.9, "seed": 3, "sampling_logprobs": True}
    alone = reader.lm.generate("The fox", max_new_tokens=4, logprobs=0, **asked)
    pairs = [(entry.sampling, entry.support) for entry in alone.logprobs or ()]
    (text,) = answered(reader, TEXT, prompt="The fox", max_tokens=4, logprobs=0, echo=True, **asked)["choices"]
    columns = text["logprobs"]["sampling_logprobs"], text["logprobs"]["support"]
    assert [*zip(*columns, strict=True)][-4:] == pairs
    assert columns[0][:-4] == [None] * (len(columns[0]) - 4)
    chat = reader.lm.chat(MESSAGES, max_new_tokens=4, logprobs=0, **asked)
    (answer,) = answered(reader, CHAT, max_tokens=4, logprobs=True, **asked)["choices"]
    entries = answer["logprobs"]["content"]
    assert [(entry["sampling_logprob"], entry["support"]) for entry in entries] == [
        (entry.sampling, entry.support) for entry in chat.logprobs or ()
    ]
    assert refusal(reader, CHAT, of(CHAT, sampling_logprobs=True)).param == "sampling_logprobs"


def test_an_echo_without_new_tokens_scores_the_prompt(reader: BodyReader) -> None:
    (choice,) = answered(reader, TEXT, max_tokens=0, logprobs=0, echo=True, prompt="The fox")["choices"]
    score = reader.lm.score("The fox")
    assert choice["text"] == "The fox"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert sum(choice["logprobs"]["token_logprobs"][1:]) == pytest.approx(score.log_likelihood, abs=1e-6)


# ── options of generate ──────────────────────────────────────────────────────────────────────────────────────────

OPTIONS: dict[str, Any] = dict(  # noqa: C408 (names are shorter)
    max_new_tokens=2, stop=["x"], n=2, beams=2, logprobs=1, prompt_logprobs=1, seed=3, eos=[5], ignore_eos=True,
    temperature=0.5, bad_words=["x"], logit_bias={"5": 1.0}, xtc_threshold=0.3, length_penalty=0.5, early_stopping=True,
    json_schema={"type": "object"}, regex="a+", grammar='start: "a"', choice=["a", "b"],
    dry_base=2.0, dry_allowed_length=3, dry_sequence_breakers=[5],
    reasoning_budget=5, reasoning_budget_message="x", cache_salt="a", sampling_logprobs=True,
)  # fmt: skip


# Options that change nothing by themselves, each with those that it needs.
NEEDED_BY: dict[str, dict[str, Any]] = {
    **{name: {"beams": 2} for name in ("length_penalty", "early_stopping")},
    **{name: {"dry_multiplier": 1} for name in ("dry_base", "dry_allowed_length", "dry_sequence_breakers")},
    "xtc_threshold": {"xtc_probability": 0.5},
    "reasoning_budget_message": {"reasoning_budget": 5},
    "sampling_logprobs": {"logprobs": 1},
}


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(onward.GenerateOptions)])
def test_every_option_of_generate_is_a_field_or_a_documented_exception(reader: BodyReader, name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    exceptions = re.search(r"These options are not available over HTTP: (.*?)\n\n", page, re.DOTALL)
    assert exceptions is not None
    default = getattr(onward.GenerateOptions(), name)
    number = 1 if isinstance(default, int) else 0.5
    fields = {**NEEDED_BY.get(name, {}), name: OPTIONS.get(name, number)}
    if name not in ("temperature", "beams", "length_penalty", "early_stopping"):
        fields["temperature"] = 1
    if f"`{name}`" in exceptions[1]:
        with pytest.raises(BodyError) as refused:
            reader.read(TEXT, of(TEXT, **fields))
        assert refused.value.code == "unknown_parameter"
        return
    if "reasoning_budget" in fields:
        problem = refusal(reader, TEXT, of(TEXT, **fields))
        assert (problem.param, "needs a chat" in str(problem)) == ("reasoning_budget", True)
        (chat,) = reader.read(CHAT, of(CHAT, **fields)).requests
        assert getattr(chat.options, name) == fields[name]
        return
    (request,) = reader.read(TEXT, of(TEXT, **fields)).requests
    assert getattr(request.options, name) != default or fields[name] == default
    if "logprobs" in fields:
        fields |= {"logprobs": True, "top_logprobs": 1}
    (chat,) = reader.read(CHAT, of(CHAT, **fields)).requests
    if name not in ("regex", "grammar", "choice", "json_schema"):
        assert getattr(chat.options, name) == getattr(request.options, name)


def test_the_wrong_field_is_named_among_similar_ones(reader: BodyReader) -> None:
    for fields in ({"n": 1, "no_repeat_ngram_size": -1}, {"min_p": 0.1, "min_new_tokens": -1}):
        assert refusal(reader, TEXT, of(TEXT, **fields)).param == list(fields)[1]


def test_prompt_logprobs_equal_those_of_generate(reader: BodyReader) -> None:
    tokenizer = reader.lm.tokenizer
    assert tokenizer is not None
    for fields in ({}, {"n": 2, "temperature": 1, "seed": 1}, {"echo": True, "logprobs": 2}):
        body = reader.read(TEXT, of(TEXT, prompt=["The fox é", "An owl"], max_tokens=2, prompt_logprobs=2, **fields))
        answer = body.protocol.answer(body, [reader.lm.generate(request) for request in body.requests])
        for choice in answer["choices"]:
            prompt = body.requests[choice["index"] // body.requests[0].options.n].prompt
            expected = reader.lm.score(prompt, logprobs=2).logprobs
            check_prompt_logprobs(choice["prompt_logprobs"], prompt, expected, tokenizer)
    body = reader.read(CHAT, of(CHAT, max_tokens=2, prompt_logprobs=2))
    (request,) = body.requests
    answer = body.protocol.answer(body, [reader.lm.generate(request)])
    check_prompt_logprobs(
        answer["prompt_logprobs"], request.prompt, reader.lm.score(request.prompt, logprobs=2).logprobs, tokenizer
    )
    assert "prompt_logprobs" not in answered(reader, CHAT, max_tokens=2)
    without_echo = {"prompt": "The fox", "max_tokens": 2, "logprobs": 1, "seed": 1}
    (plain,), (both,) = (
        answered(reader, TEXT, **without_echo, **fields)["choices"] for fields in ({}, {"prompt_logprobs": 1})
    )
    assert both["logprobs"] == plain["logprobs"], "those of the prompt are in a field of their own"


def check_prompt_logprobs(listed: Any, prompt: Any, entries: Any, tokenizer: Any) -> None:
    assert len(listed) == len(prompt)
    assert listed[0] is None
    for id, entry, place in zip(prompt[1:], entries[1:], listed[1:], strict=True):
        ranks = {other: rank for rank, (other, _) in enumerate(entry.top, 1)}
        assert next(iter(place)) == str(id)
        assert {int(token): fields["rank"] for token, fields in place.items()} == {id: ranks.get(id), **ranks}
        logprobs = {id: entry.chosen, **dict(entry.top)}
        assert {int(token): fields["logprob"] for token, fields in place.items()} == pytest.approx(logprobs, abs=1e-5)
    ids = zip(prompt[1:], listed[1:], strict=True)
    text = "".join(place[str(id)]["decoded_token"] for id, place in ids)
    assert tokenizer.decode(prompt) == tokenizer.decode(prompt[:1]) + text


def test_unsupported_prompt_logprobs(reader: BodyReader) -> None:
    refused = [
        (TEXT, {"stream": True, "prompt_logprobs": 1}),
        (CHAT, {"stream": True, "prompt_logprobs": 0}),
        (TEXT, {"echo": True, "logprobs": 1, "prompt_logprobs": 2}),
        (CHAT, {"prompt_logprobs": -1}),
        (TEXT, {"prompt_logprobs": True}),
    ]
    for url, fields in refused:
        with pytest.raises(BodyError) as error:
            dataclasses.replace(reader, streams=True).read(url, of(url, **fields))
        assert error.value.param == "prompt_logprobs"
    with pytest.raises(BodyError, match="unknown option 'prompt_logprobs'"):
        reader.read("/v1/responses", {"input": "Hi", "prompt_logprobs": 1})
