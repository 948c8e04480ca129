"""No option is silently ignored: every method follows it, or refuses it by name."""

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

import pytest
import torch

import onward
from demo_adapters import demo_adapter
from onward import Completion, Engine, GenerateOptions, LanguageModel, Piece, Session
from onward.batches import BatchLine, EngineReplica
from onward.chat import ChatTemplate
from onward.constraints import Regex
from onward.errors import RequestError
from onward.protocols import BodyReader, ResponseKey
from onward.protocols.responses_events import ResponseEventStream

PROMPT = "Once upon a time, a fox and a fox and a fox"
MESSAGES = [{"role": "user", "content": PROMPT}]
# A text that is drawn, and one that ends early.
DRAWN: dict[str, Any] = {"max_new_tokens": 24, "temperature": 1.5, "seed": 5, "ignore_eos": True}
# One that repeats itself: its tokens are always some of these.
FEW = range(500, 540)
LOOP: dict[str, Any] = {
    "max_new_tokens": 24,
    "logit_bias": dict.fromkeys(FEW, 100),
    "temperature": 0,
    "ignore_eos": True,
}
DRY = LOOP | {"dry_multiplier": 0.5}
XTC = LOOP | {"temperature": 3.0, "seed": 5, "xtc_probability": 1.0}
BEAMS: dict[str, Any] = {"max_new_tokens": 12, "beams": 3, "n": 3, "eos": tuple(range(4, 2000, 3))}
CUT = DRAWN | {"reasoning_budget": 3}
EARLY = DRAWN | {"ignore_eos": False, "eos": tuple(range(4, 1000))}


def cancelled() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


# For each option, the other options of the request, and a value that must change the answer.
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "logit_bias": (DRAWN, {500: 50.0}),
    "repetition_penalty": (DRAWN, 50.0),
    "presence_penalty": (LOOP, 2.0),
    "frequency_penalty": (LOOP, 2.0),
    "dry_multiplier": (LOOP, 5.0),
    "dry_base": (DRY, 50.0),
    "dry_allowed_length": (DRY, 1),
    "dry_sequence_breakers": (DRY, tuple(FEW)),
    "no_repeat_ngram_size": (DRAWN, 1),
    "bad_words": (DRAWN, tuple((token,) for token in range(4, 900))),
    "min_new_tokens": (EARLY, 20),
    "eos": (DRAWN | {"ignore_eos": False}, tuple(range(4, 1000))),
    "ignore_eos": (EARLY, True),
    "temperature": (DRAWN, 0.2),
    "top_k": (DRAWN, 1),
    "top_p": (DRAWN, 0.05),
    "min_p": (DRAWN, 0.9),
    "typical_p": (DRAWN, 0.05),
    "xtc_probability": (XTC | {"xtc_probability": 0.0}, 1.0),
    "xtc_threshold": (XTC | {"xtc_threshold": 0.5}, 0.001),
    "seed": (DRAWN, 6),
    "max_new_tokens": (DRAWN, 3),
    "stop": (DRAWN, ("e", "a")),
    "reasoning_budget": (DRAWN | {"reasoning_budget": 1000}, 3),
    "reasoning_budget_message": (CUT, "So"),
    "time_limit": (DRAWN, 1e-9),
    "stop_when": (DRAWN, lambda ids, text: len(ids) == 2),
    "cancel": (DRAWN, cancelled()),
    "n": (DRAWN, 2),
    "beams": ({"max_new_tokens": 8}, 3),
    "length_penalty": (BEAMS, 20.0),
    "early_stopping": (BEAMS, True),
    "logprobs": (DRAWN, 2),
    "prompt_logprobs": (DRAWN, 2),
    "sampling_logprobs": (DRAWN | {"logprobs": 0}, True),
    "taps": (DRAWN, {"norm": "last"}),
    "steer": (DRAWN, {"layers.2": torch.full((192,), 2.0)}),
    "prompt_embeds": (DRAWN, {1: torch.full((2, 192), 2.0)}),
    "draft": (DRAWN, "lookup"),
    "adapter": (DRAWN, "other"),
    "json_schema": (DRAWN, {"type": "integer"}),
    "regex": (DRAWN, "[0-9]{3}"),
    "grammar": (DRAWN, 'start: "owl" | "camel"'),
    "choice": (DRAWN, ("owl", "camel")),
    "constraint": (DRAWN, Regex("[0-9]{3}")),
}


BEAMS_ALONE = {"length_penalty", "early_stopping"}
# Options of chats.
BUDGETS = {"reasoning_budget", "reasoning_budget_message"}
ONE_TEXT = {"n", "beams", *BEAMS_ALONE}
# Options that JSON can't express, or that bodies express differently, such as an adapter as the model.
NO_FIELDS = {"time_limit", "stop_when", "cancel", "draft", "adapter", "constraint", "taps", "steer", "prompt_embeds"}


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """The demo model with a chat template that renders the plain text, so that chats continue the same prompt; it can
    also open reasoning."""
    demo = onward.load("demo")
    template = "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}"
    lm = LanguageModel(demo.model, demo.tokenizer, ChatTemplate(template, {}))
    lm.load_adapter("other", demo_adapter(tmp_path_factory.mktemp("adapter") / "other", 3))
    return lm


@pytest.fixture(scope="module")
def engine(lm: LanguageModel) -> Iterator[Engine]:
    with Engine(lm) as engine:
        yield engine


@pytest.fixture(scope="module")
def without() -> dict[str, Any]:
    """The answers to requests without the option, which many options share."""
    return {}


def seen(completion: Completion) -> Any:
    """All of a completion that an option may change."""
    return [
        (
            *(one.token_ids, one.text, one.finish_reason, one.seed, one.speculation is not None),
            *(repr(one.logprobs), repr(one.prompt_logprobs), None if one.taps is None else sorted(one.taps)),
        )
        for one in completion.choices
    ]


def streamed(stream: Generator[Piece, None, Completion]) -> Any:
    try:
        while True:
            next(stream)
    except StopIteration as end:
        return seen(end.value)


def scores(*scored: onward.Score) -> Any:
    return [repr(score.logprobs) for score in scored]


def thinking(options: dict[str, Any]) -> dict[str, bool]:
    """The variables of the template: a budget needs reasoning."""
    return {"enable_thinking": True} if "reasoning_budget" in options else {}


def batch_line(engine: Engine, options: dict[str, Any]) -> Any:
    """The body of the answer, with all that does not follow from the line's own text left out."""
    body = json.loads(json.dumps({"prompt": PROMPT} | options, default=repr))
    replica = EngineReplica(engine, BodyReader(engine.lm, "demo"))
    (result,) = asyncio.run(replica.serve([BatchLine(1, "a", "/v1/completions", body)]))
    answer = json.loads(result.text)["response"]["body"]
    if result.failed:
        raise RequestError(answer["error"]["message"])
    return {name: answer[name] for name in ("choices", "usage", "seed")}


def response(lm: LanguageModel, options: dict[str, Any]) -> Any:
    """The same of /v1/responses, with the options under the names that they have there."""
    names = {"max_new_tokens": "max_output_tokens"}
    body = {"input": PROMPT, "chat_template_kwargs": thinking(options)}
    body |= {names.get(name, name): value for name, value in options.items()}
    read = BodyReader(lm, "demo").read("/v1/responses", json.loads(json.dumps(body, default=repr)), ResponseKey.new(0))
    answer = ResponseEventStream(read).whole(lm.generate(read.requests[0]))
    return [part for item in answer["output"] for part in item["content"]], answer["status"], answer["usage"]


Verb = Callable[[LanguageModel, Engine, dict[str, Any]], Any]
# Each verb, and the options that it refuses.
VERBS: dict[str, tuple[Verb, set[str]]] = {
    "generate": (lambda lm, engine, options: seen(lm.generate(PROMPT, **options)), BUDGETS),
    "per_prompt": (
        lambda lm, engine, options: seen(lm.generate([PROMPT], per_prompt=[cast(Any, options)])[0]),
        BUDGETS,
    ),
    "stream": (
        lambda lm, engine, options: streamed(lm.stream(PROMPT, **options)),
        ONE_TEXT | BUDGETS,
    ),
    "chat": (lambda lm, engine, options: seen(lm.chat(MESSAGES, template=thinking(options), **options)), set()),
    "session": (
        lambda lm, engine, options: seen(Session(lm).generate(PROMPT, **options)),
        ONE_TEXT | BUDGETS,
    ),
    "engine": (lambda lm, engine, options: seen(engine.submit(PROMPT, **options).result()), BUDGETS),
    "score": (lambda lm, engine, options: scores(lm.score(PROMPT, **options)), set(CASES) - {"logprobs", "adapter"}),
    "score_continuations": (
        lambda lm, engine, options: scores(*lm.score_continuations(PROMPT, ["a", "bc"], **options)),
        set(CASES) - {"logprobs", "adapter"},
    ),
    "logits": (lambda lm, engine, options: lm.logits([1, 2, 3], **options).tolist(), set(CASES) - {"adapter"}),
    "batch line": (lambda lm, engine, options: batch_line(engine, options), NO_FIELDS | BUDGETS),
    "responses": (
        lambda lm, engine, options: response(lm, options),
        NO_FIELDS | {"stop", "logprobs", "prompt_logprobs", "sampling_logprobs", *ONE_TEXT},
    ),
}
SCORING = {"score", "score_continuations", "logits"}


def test_every_option_has_a_case() -> None:
    """A salt changes no text (test_prefix_disk.py)."""
    assert {*CASES, "cache_salt"} == {field.name for field in dataclasses.fields(GenerateOptions)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("verb", VERBS)
def test_an_option_changes_the_answer_or_is_refused_by_name(
    verb: str, name: str, lm: LanguageModel, engine: Engine, without: dict[str, Any]
) -> None:
    run, refused = VERBS[verb]
    base, value = CASES[name]
    if verb in SCORING or (name in refused and name in {*BEAMS_ALONE, *BUDGETS, "sampling_logprobs"}):
        base = {}
    if name in refused:
        with pytest.raises(RequestError, match=rf"\b{name}\b"):
            run(lm, engine, base | {name: value})
    else:
        key = f"{verb} {base}"
        if key not in without:
            without[key] = run(lm, engine, base)
        assert run(lm, engine, base | {name: value}) != without[key]
