"""A reasoning budget changes nothing before its limit, forces the closing there, and decoding then continues."""

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from answers import ASKED, CLOCK, QWEN3, TEMPLATES, WEATHER, MarkTokenizer, answering
from test_harmony import MARKS as HARMONY_MARKS
from test_harmony import TEMPLATE as HARMONY

import onward
from onward import LanguageModel
from onward.cache import PagedCacheManager
from onward.chat import FORMATS, ChatTemplate
from onward.constraints import JsonSchema, Regex
from onward.errors import RequestError
from onward.language_model.chat import EFFORTS
from onward.language_model.reasoning import DEFAULT_BUDGET_MESSAGE
from onward.ops.heads import BLOCK
from onward.protocols import BodyReader
from onward.protocols.body import BodyError
from onward.testing import ByteTokenizer, scripted_model, tiny_model

THINK = MarkTokenizer(marks=("<think>", "</think>"), vocab_size=260)
MISTRAL = MarkTokenizer()
CHANNELS = MarkTokenizer(marks=HARMONY_MARKS, vocab_size=258 + len(HARMONY_MARKS))
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
MESSAGE = "\nSo.\n"
LENGTH = 90
LETTERS = tuple(b"abcdefgh ")


class Case(NamedTuple):
    """A chat whose reasoning never ends by itself. opening: of the model's answer. closing: the mark and what follows
    it. variables: of the template."""

    template: str
    tokenizer: ByteTokenizer
    opening: str
    closing: str
    variables: dict[str, Any]
    model: str = "scripted"

    @property
    def lm(self) -> LanguageModel:
        return language_model(self.template, self.tokenizer, self.opening, self.model)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)


OPENED = {"opens_thinking": True}
CASES = {
    "text": Case(QWEN3, ByteTokenizer(), "<think>", "</think>", {}),
    "special": Case(QWEN3, THINK, "<think>", "</think>", {}),
    "after a space": Case(QWEN3, THINK, " \n<think>", "</think>", {}),
    "opened": Case(QWEN3, THINK, "", "</think>", OPENED),
    "opened text": Case(QWEN3, ByteTokenizer(), "", "</think>", OPENED),
    "mistral": Case(TEMPLATES["mistral-args"], MISTRAL, "[THINK]", "[/THINK]", {}),
    "harmony": Case(HARMONY, CHANNELS, ANALYSIS, f"<|end|><|start|>assistant{FINAL}", {}),
    "harmony text": Case(HARMONY, ByteTokenizer(), ANALYSIS, f"<|end|><|start|>assistant{FINAL}", {}),
    "paged": Case(QWEN3, THINK, "", "</think>", OPENED, "qwen3"),
    "recurrent": Case(QWEN3, THINK, "", "</think>", OPENED, "qwen3_5"),
}
# One of each kind of opening and of cache.
FEW = ("special", "opened text", "harmony", "paged", "recurrent")
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 1.1, "seed": 7}


def _script(tail: Sequence[int], opening: Sequence[int], vocabulary: int) -> Callable[[list[int]], torch.Tensor]:
    """Answers begin with an opening; after that, any letter may follow the last two ids."""

    def logits(history: list[int]) -> torch.Tensor:
        ends = [at for at in range(len(tail), len(history) + 1) if history[at - len(tail) : at] == tail]
        answer = history[ends[-1] :] if ends else []
        scores = torch.full((vocabulary,), -30.0)
        if len(answer) < len(opening) and answer == opening[: len(answer)]:
            scores[opening[len(answer)]] = 30.0
        else:
            chance = random.Random(str(history[-2:]))
            for letter in LETTERS:
                scores[letter] = chance.gauss(0, 1)
        return scores

    return logits


@functools.cache
def language_model(source: str, tokenizer: ByteTokenizer, opening: str, model: str, chunk: int = 512) -> LanguageModel:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    options = onward.GenerateOptions(max_new_tokens=LENGTH, eos=tokenizer.eos_id)
    if model != "scripted":
        bias = {token: -1e4 for token in range(tokenizer.vocab_size) if token not in LETTERS}
        made = tiny_model(model, seed=3, vocab_size=tokenizer.vocab_size)
        return LanguageModel(made, tokenizer, template, options.replace(logit_bias=bias), prefill_chunk=chunk)
    tail = {HARMONY: "<|start|>assistant"}.get(source, "assistant\n" if source == QWEN3 else "[/INST]")
    script = _script(tokenizer.encode(tail), tokenizer.encode(opening), tokenizer.vocab_size)
    return LanguageModel(
        scripted_model(script, vocab_size=tokenizer.vocab_size), tokenizer, template, options, prefill_chunk=chunk
    )


def ask(case: Case, budget: int | None, **options: Any) -> onward.Completion:
    message = {} if budget is None else {"reasoning_budget": budget, "reasoning_budget_message": MESSAGE}
    return case.lm.chat(ASKED, template=case.variables, **{**message, **options})


def request_of(case: Case, budget: int | None, **options: Any) -> onward.Request:
    message = {} if budget is None else {"reasoning_budget": budget, "reasoning_budget_message": MESSAGE}
    return case.lm.chat_request(ASKED, template=case.variables, **message, **options)


def content(completion: onward.Completion) -> Any:
    return [
        (one.token_ids, one.text, one.message, one.reasoning_tokens, one.finish_reason, repr(one.logprobs), one.seed)
        for one in completion.choices
    ]


# ── the cut ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [0, 1, 13])
@pytest.mark.parametrize("name", CASES)
def test_tokens_equal_a_run_without_budget_then_closing_then_answer(
    name: str, budget: int, sampling: dict[str, Any]
) -> None:
    case = CASES[name]
    free = ask(case, None, **sampling)
    cut = ask(case, budget, **sampling)
    begin = len(case.ids(case.opening)) + budget
    message = MESSAGE if budget else ""
    closing = case.ids(message + case.closing)
    assert free.token_ids[:begin] == cut.token_ids[:begin]
    assert cut.token_ids[begin : begin + len(closing)] == closing[: LENGTH - begin]
    rest = cut.token_ids[begin + len(closing) :]
    if rest:
        before = [*case.lm.chat_prompt(ASKED, case.variables), *cut.token_ids[: len(cut.token_ids) - len(rest)]]
        assert rest == case.lm.generate(before, **sampling, max_new_tokens=len(rest)).token_ids
        assert cut.message is not None
        reasoning = case.tokenizer.decode(free.token_ids[begin - budget : begin]) + message
        assert (cut.message.reasoning or "").strip() == reasoning.strip()
        assert (cut.message.content or "").strip() == case.tokenizer.decode(rest).strip()
        assert cut.reasoning_tokens == budget + len(message)


@pytest.mark.parametrize("name", CASES)
def test_an_unreached_budget_changes_nothing(name: str) -> None:
    case = CASES[name]
    for options in (GREEDY, SAMPLED | {"n": 2, "logprobs": 2}):
        assert content(ask(case, LENGTH, **options)) == content(ask(case, None, **options))


def test_reasoning_that_ends_by_itself_is_unchanged() -> None:
    reasoning = "\nOslo is rainy, a </thing>."
    for tokenizer in (THINK, ByteTokenizer()):
        chat = answering("hermes", f"<think>{reasoning}</think>\n\nI look at <think>x</think>.", tokenizer)
        free = content(chat.chat())
        for budget in range(len(reasoning) + 1, len(reasoning) + 20):
            assert content(chat.chat(reasoning_budget=budget)) == free
        cut = chat.chat(reasoning_budget=len(reasoning), max_new_tokens=200)
        assert cut.message is not None
        assert cut.message.reasoning == (reasoning + DEFAULT_BUDGET_MESSAGE).strip()
    answer = answering("hermes", "No <think>, I look.").chat(reasoning_budget=0)
    assert answer.text == "No <think>, I look."


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str) -> None:
    format = FORMATS[name]
    opening, end = format.thinking
    chat = answering("plain", f"{opening}abcdefgh{end}i")
    lm = LanguageModel(
        chat.lm.model, chat.lm.tokenizer, chat.lm.chat_template, chat.lm.defaults, message_format=format
    )  # fmt: skip
    for tools in (None, [CLOCK]):
        request = lm.chat_request(ASKED, reasoning_budget=3, reasoning_budget_message="!")
        assert lm.tokenizer is not None
        answer = dataclasses.replace(request.answer, tools=None if tools is None else ("clock",))
        chat.answers.prompt_length = len(request.prompt)
        text = lm.generate(dataclasses.replace(request, answer=answer)).text
        assert text.startswith(f"{opening}abc!{format.end_of_reasoning(calls=tools is not None)}")


@pytest.mark.parametrize(
    ("text", "budget", "waits"),
    [
        ("é🦊 abc", 1, 1),  # inside a character
        ("é🦊 abc", 3, 3),
        ("\xff\xff\xff\xff\xff\xff", 1, 3),  # bytes that are none, in Latin-1
        ("ab</thx yz", 4, 3),  # what may begin the mark
        ("ab<<<<<<<<<<<<<<<<", 3, 8),
        ("abc", 2, 0),
    ],
)
def test_a_cut_waits_for_whole_characters_and_marks(text: str, budget: int, waits: int) -> None:
    ids = list(text.encode("latin-1" if "\xff" in text else "utf-8"))
    chat = answering("hermes", "")
    chat.answers._ids = [*b"<think>", *ids, *[ord("z")] * 20]
    answer = chat.chat(reasoning_budget=budget, reasoning_budget_message="!")
    assert answer.token_ids[7 : 7 + budget + waits + 9] == [*ids[: budget + waits], *b"!</think>"]


def test_banned_tokens_do_not_prevent_the_closing() -> None:
    case = CASES["special"]
    closing, asked = case.ids(f"{MESSAGE}</think>"), [{"role": "user", "content": f"x{MESSAGE}x"}]
    for options in (
        {"bad_words": [case.ids("</think>"), case.ids("So")]},
        {"logit_bias": {closing[-1]: float("-inf")}},
        {"no_repeat_ngram_size": 3},
    ):
        for draft in (None, "lookup"):
            message = {"reasoning_budget": 4, "reasoning_budget_message": MESSAGE}
            answer = case.lm.chat(asked, **message, **SAMPLED, **options, draft=draft)
            assert answer.token_ids[5 : 5 + len(closing)] == closing


def test_logprobs_of_the_closing_are_the_models() -> None:
    case = CASES["paged"]
    answer = ask(case, 5, **SAMPLED, logprobs=0)
    prompt = case.lm.chat_prompt(ASKED, case.variables)
    score = case.lm.score([*prompt, *answer.token_ids])
    assert answer.logprobs is not None
    assert [token.chosen for token in answer.logprobs] == [
        token.chosen for token in score.logprobs[len(prompt) :] if token is not None
    ]


def test_eos_in_the_reasoning_or_the_closing_ends_the_answer() -> None:
    chat = answering("hermes", "<think>ab")
    assert chat.chat(reasoning_budget=5).text == "<think>ab"
    long = answering("hermes", "<think>abcdefgh")
    assert long.chat(reasoning_budget=2, max_new_tokens=12).finish_reason == "length"
    assert long.chat(reasoning_budget=2, stop="time by").text == "<think>ab\n\nConsidering the limited "


def test_repeated_harmony_reasoning_is_closed_for_good() -> None:
    tail, letters = CHANNELS.encode("<|start|>assistant"), CHANNELS.encode("ab")

    def script(history: list[int]) -> int:
        ends = [at + len(tail) for at in range(len(history)) if history[at : at + len(tail)] == tail]
        again = [*CHANNELS.encode(ANALYSIS), *letters]
        answer = history[ends[-1] :] if ends else []
        return again[len(answer)] if len(answer) < len(again) else letters[len(answer) % 2]

    lm = LanguageModel(
        scripted_model(script, vocab_size=CHANNELS.vocab_size), CHANNELS, ChatTemplate(HARMONY, {}),
        onward.GenerateOptions(max_new_tokens=80, eos=257),
    )  # fmt: skip
    answer = lm.chat(ASKED, tools=[WEATHER], reasoning_budget=3, reasoning_budget_message="!")
    first = CHANNELS.encode(f"{ANALYSIS}ab") + answer.token_ids[12:13] + CHANNELS.encode("!<|end|><|start|>assistant")
    assert answer.token_ids[: len(first)] == first
    second = CHANNELS.encode(f"{ANALYSIS}<|end|><|start|>assistant{FINAL}")
    assert answer.token_ids[len(first) :][: len(second)] == second
    assert answer.message is not None
    assert answer.message.content


# ── wherever and however the text is computed ──────────────────────────────────────────────────────────────────────

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "penalties": SAMPLED | {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "logprobs": SAMPLED | {"logprobs": 2, "prompt_logprobs": 0},
    "n": SAMPLED | {"n": 3},
    "beams": {"beams": 3, "n": 2},
    "stop": SAMPLED | {"stop": ["g", "x"]},
}


@pytest.mark.parametrize("name", FEW)
def test_drafts_do_not_change_the_tokens(name: str) -> None:
    case = CASES[name]
    smaller = case.lm if case.model == "scripted" else tiny_model("qwen3", seed=4, vocab_size=case.tokenizer.vocab_size)
    predicted = [*case.ids(case.opening), *case.ids("abcd" * 10)]
    drafts = (
        "lookup",
        "suffix",
        smaller,
        onward.Speculator(onward.decoding.speculation.PredictedOutput(predicted), length=4),
    )
    for sampling in (GREEDY, SAMPLED):
        for budget in (0, 3, 10):
            plain = content(ask(case, budget, **sampling))
            for draft in drafts:
                assert content(ask(case, budget, **sampling, draft=draft)) == plain


@pytest.mark.strength(1)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", FEW)
def test_chunks_sessions_streams_and_batches_do_not_change_the_tokens(name: str, feature: str) -> None:
    case, options = CASES[name], FEATURES[feature]
    budgets = (None, 0, 2, 9, 40)
    alone = [content(ask(case, budget, **options)) for budget in budgets]
    requests = [request_of(case, budget, **options) for budget in budgets]
    assert [content(one) for one in case.lm.generate(requests)] == alone
    chunked = language_model(case.template, case.tokenizer, case.opening, case.model, 3)
    assert [content(chunked.generate(request)) for request in requests] == alone
    if not {"n", "beams"} & set(options):
        session = onward.Session(case.lm)
        for request, right in zip(requests, alone, strict=True):
            assert content(session.generate(request)) == right
            pieces = list(case.lm.stream(request))
            assert [piece.token_id for piece in pieces] == right[0][0]
            assert onward.chat.AssistantMessage.of([piece.message for piece in pieces if piece.message]) == right[0][2]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", FEW)
@pytest.mark.strength(1)
def test_preemption_and_resumption_do_not_change_the_tokens(name: str, feature: str) -> None:
    case, options = CASES[name], FEATURES[feature]
    budgets = (None, 0, 2, 9)
    alone = [content(ask(case, budget, **options)) for budget in budgets]
    requests = [request_of(case, budget, **options) for budget in budgets]
    new_blocks, memory = case.lm.model.new_blocks, None
    if new_blocks is not None:  # room for one request of three texts
        one = PagedCacheManager(new_blocks(1), max_len=256, cached_blocks=0)
        memory = 10 * one.cost(3 * BLOCK) // 3 * one.unit_nbytes
    with onward.Engine(case.lm, max_sequences=4, overcommit=8, cache_memory=memory) as engine:
        running = [engine.submit(request) for request in requests]
        assert [content(generation.result(60)) for generation in running] == alone
        if "beams" in options:
            return
        for request, right in zip(requests[1:], alone[1:], strict=True):
            cuts = [[text[0][:cut] for text in right] for cut in range(0, len(right[0][0]), 7)]
            resumed = [engine.resume(request, emitted=emitted) for emitted in cuts]
            assert [content(generation.result(60)) for generation in resumed] == [right] * len(cuts)
        if "stop" in options:  # the text may end before the cut
            return
        with pytest.raises(RequestError, match=r"emitted\[\d+\] is id \d+, which"):
            engine.resume(requests[2], emitted=[text[0] for text in alone[0]])


# ── with constraints and tools ─────────────────────────────────────────────────────────────────────────────────────

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
COMPACT = JsonSchema(SCHEMA, whitespace=False)


@pytest.mark.parametrize("draft", [None, "lookup"])
@pytest.mark.parametrize("name", ["opened", "opened text", "harmony", "paged"])
def test_a_schema_applies_after_the_cut(name: str, draft: str | None) -> None:
    case = CASES[name]
    for options in (GREEDY, SAMPLED | {"logprobs": 0}):
        plain, free = ask(case, 6, **options), ask(case, None, **options)
        answer = ask(case, 6, **options, json_schema=COMPACT, draft=draft, max_new_tokens=150)
        closed = len(case.ids(case.opening)) + 6 + len(case.ids(MESSAGE + case.closing))
        assert answer.token_ids[:closed] == plain.token_ids[:closed]
        assert answer.parsed in ({"a": 1}, {"a": 2})
        assert answer.finish_reason == "stop"
        unreached = ask(case, LENGTH, **options, json_schema=COMPACT)
        assert unreached.token_ids == free.token_ids


@pytest.mark.parametrize("text", ["é🦊", "ab</x"])
def test_a_schema_after_a_cut_inside_a_character_or_possible_mark(text: str) -> None:
    chat = answering("hermes", text + "z" * 50)
    for budget in range(7):
        answer = chat.chat(json_schema=SCHEMA, template=OPENED, reasoning_budget=budget)
        assert answer.parsed in ({"a": 1}, {"a": 2})


@pytest.mark.parametrize("name", ["text", "special", "opened", "harmony", "mistral"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_follow_the_cut(name: str, choice: str) -> None:
    case = CASES[name]
    options: dict[str, Any] = {"tools": [CLOCK], "tool_choice": choice, "parallel_tool_calls": False}
    answer = ask(case, 6, **SAMPLED, **options, max_new_tokens=150)
    assert answer.message is not None
    assert answer.reasoning_tokens == 6 + len(MESSAGE)
    assert answer.message.tool_calls or choice == "auto"


def test_a_custom_constraint_applies_from_the_first_token() -> None:
    case = CASES["opened"]
    constraint = Regex("[a-c]{20}")(case.tokenizer, frozenset({257}))
    answer = ask(case, 2, **GREEDY, constraint=constraint)
    assert answer.token_ids == ask(case, None, **GREEDY, constraint=constraint).token_ids


# ── errors, fields and efforts ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"reasoning_budget": -1}, "reasoning_budget must be a whole number of 0 or more; got -1"),
        ({"reasoning_budget": 1.5}, "reasoning_budget must be a whole number of 0 or more; got 1.5"),
        ({"reasoning_budget": True}, "reasoning_budget must be a whole number of 0 or more; got True"),
        ({"reasoning_budget": "8"}, "reasoning_budget must be a whole number of 0 or more; got '8'"),
        (
            {"reasoning_budget_message": "So."},
            "reasoning_budget_message has no effect without a reasoning_budget",
        ),
        ({"reasoning_budget": 8, "reasoning_budget_message": 5}, "reasoning_budget_message must be a string; got 5"),
        (
            {"reasoning_budget": 8, "reasoning_budget_message": "a</think>"},
            "reasoning_budget_message must not contain '</think>'",
        ),
        ({"reasoning_effort": "huge"}, "reasoning_effort must be one of none, minimal, low, .*; got 'huge'"),
    ],
)
def test_errors_name_the_option(options: dict[str, Any], problem: str) -> None:
    for name in ("text", "special"):
        with pytest.raises(RequestError, match=problem):
            CASES[name].lm.chat_request(ASKED, **options)


def test_special_tokens_in_the_budget_message_are_refused() -> None:
    demo = onward.load("demo")
    lm = LanguageModel(demo.model, demo.tokenizer, ChatTemplate(QWEN3, {}))
    assert demo.tokenizer is not None
    special = next(iter(onward.tokenizer.special_tokens(demo.tokenizer).values()))
    with pytest.raises(RequestError, match="must not contain"):
        lm.chat_request(ASKED, reasoning_budget=3, reasoning_budget_message=f"So{special}")


def test_plain_texts_have_no_reasoning_budget() -> None:
    case = CASES["opened"]
    with pytest.raises(RequestError, match="reasoning_budget needs a chat"):
        case.lm.generate("<think>", reasoning_budget=3)
    defaults = case.lm.defaults.replace(reasoning_budget=3, reasoning_budget_message="!")
    lm = LanguageModel(case.lm.model, case.tokenizer, case.lm.chat_template, defaults)
    assert lm.generate("<think>").token_ids == case.lm.generate("<think>").token_ids
    assert lm.chat(ASKED, template=OPENED).text == ask(case, 3, reasoning_budget_message="!").text
    assert lm.chat(ASKED, template=OPENED, reasoning_budget=None).text == ask(case, None).text


ENDPOINTS = {"/v1/chat/completions": {"messages": ASKED}, "/v1/responses": {"input": "Does it rain in Oslo?"}}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_budgets_in_request_bodies(path: str) -> None:
    reader = BodyReader(CASES["opened"].lm, "m", variables=OPENED)
    base = ENDPOINTS[path]

    def options(**fields: Any) -> onward.GenerateOptions:
        return reader.read(path, {**base, **fields}).requests[0].options

    for name in ("reasoning_budget", "thinking_token_budget", "thinking_budget_tokens"):
        assert options(**{name: 7}).reasoning_budget == 7
        assert options(**{name: None}).reasoning_budget is None
        for wrong in (-1, 1.5, "8", True):
            with pytest.raises(BodyError, match=f"^{name} must be a whole number of 0 or more") as refused:
                options(**{name: wrong})
            assert (refused.value.param, refused.value.status) == (name, 400)
    message = "reasoning_budget_message"
    assert options(reasoning_budget=7, thinking_token_budget=7, reasoning_budget_message="!").reasoning_budget == 7
    for fields, param, problem in (
        ({"reasoning_budget": 7, "thinking_token_budget": 8}, "reasoning_budget", "mean the same, but differ"),
        ({message: "!"}, message, "without a reasoning_budget"),
        (
            {"reasoning_budget": 7, "reasoning_budget_message": "x" * 1025},
            "reasoning_budget_message",
            "1025 characters",
        ),
        ({"thinking_token_budget": 7, "reasoning_budget_message": "</think>"}, "reasoning_budget_message", "mark"),
    ):
        with pytest.raises(BodyError, match=problem) as refused:
            options(**fields)
        assert (refused.value.param, refused.value.status) == (param, 400)


def test_efforts_are_budgets_if_the_template_ignores_them() -> None:
    lm = CASES["special"].lm
    reader = BodyReader(lm, "m")
    for effort, budget in EFFORTS.items():
        request = lm.chat_request(ASKED, reasoning_effort=effort)
        assert request.options.reasoning_budget == budget
        thinks = effort != "none"
        assert request.prompt == tuple(lm.chat_prompt(ASKED, {"enable_thinking": thinks}))
        chat = reader.read("/v1/chat/completions", {"messages": ASKED, "reasoning_effort": effort}).requests[0]
        response = reader.read(
            "/v1/responses", {"input": ASKED[0]["content"], "reasoning": {"effort": effort}}
        ).requests[0]
        assert chat.prompt == response.prompt == request.prompt
        assert chat.options.reasoning_budget == response.options.reasoning_budget == budget
    both = lm.chat_request(ASKED, reasoning_effort="low", reasoning_budget=3, enable_thinking=False)
    assert both.options.reasoning_budget == 3
    assert both.prompt == tuple(lm.chat_prompt(ASKED, {"enable_thinking": False}))
    for path, fields, param in (
        ("/v1/chat/completions", {"messages": ASKED, "reasoning_effort": "huge"}, "reasoning_effort"),
        ("/v1/responses", {"input": "Hm?", "reasoning": {"effort": "huge"}}, "reasoning"),
    ):
        with pytest.raises(BodyError, match="must be one of none, minimal") as refused:
            reader.read(path, fields)
        assert refused.value.param == param
    reads = LanguageModel(lm.model, THINK, ChatTemplate(QWEN3 + "{{ reasoning_effort }}", {}))
    assert reads.chat_request(ASKED, reasoning_effort="huge").options.reasoning_budget is None
    never = answering("plain", "").lm
    with pytest.raises(RequestError, match="does not read reasoning_effort"):
        never.chat(ASKED, reasoning_effort="low")


def test_usage_includes_the_budget_message() -> None:
    case = CASES["opened"]
    reader = BodyReader(case.lm, "m", variables=OPENED)
    body = {"messages": ASKED, "reasoning_budget": 5, "reasoning_budget_message": MESSAGE, "temperature": 0}
    read = reader.read("/v1/chat/completions", body)
    answer = read.protocol.answer(read, [case.lm.generate(read.requests[0])])
    assert answer["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 5 + len(MESSAGE),
        "accepted_prediction_tokens": len(MESSAGE) + 1,  # the closing is drafted
        "rejected_prediction_tokens": 0,
    }
