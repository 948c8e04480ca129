"""A request resumed from ids emitted elsewhere equals the uninterrupted request, bit for bit."""

import functools
import json
import random

import pytest
import torch
from checked_engine import CheckedEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import CHUNKS, MODELS, REQUESTS, Turns, content, expected_of, lm, model, requests

import onward
from demo_adapters import demo_adapter
from onward import LanguageModel, Speculator
from onward.chat import ChatTemplate
from onward.errors import EngineBusyError, RequestError
from onward.models.architecture import architecture_of
from onward.testing import ByteTokenizer, scripted_model

SECONDS = 60
MODELS_CUT = ("demo", "recurrent", "qwen3", "mistral", "dense")
SAMPLED = {"temperature": 1.2, "seed": 11}
FEATURES = {
    "greedy": {"temperature": 0.0},
    "sampled": SAMPLED,
    "filters": SAMPLED | {"min_p": 0.02, "top_k": 40, "typical_p": 0.95},
    "xtc": SAMPLED | {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    "penalties": SAMPLED | {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "repeats": {"temperature": 0.0, "no_repeat_ngram_size": 2, "dry_multiplier": 0.8},
    "min_new_tokens": SAMPLED | {"min_new_tokens": 9, "eos": list(range(40))},
    "logprobs": SAMPLED | {"logprobs": 2, "prompt_logprobs": 1},
    "n": SAMPLED | {"n": 3},
    "n, logprobs": SAMPLED | {"n": 2, "logprobs": 0, "prompt_logprobs": 0},
    "beams": {"beams": 3, "n": 2, "logprobs": 1},
    "stop": SAMPLED | {"stop": ["e", "\x05"]},
    "stop_when": SAMPLED | {"stop_when": lambda ids, text: len(ids) == 8},
    "regex": SAMPLED | {"regex": r"[a-c]{3}(xyz|[0-9]{2})*!", "logprobs": 0},
    "json_schema": SAMPLED | {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    "constraint": SAMPLED | {"constraint": Turns()},
    "lookup": SAMPLED | {"draft": "lookup"},
    "drafts": SAMPLED | {"draft": Speculator("suffix", length=3), "logprobs": 1, "n": 2},
}


@functools.cache
def engine_lm(name, chunk=512):
    return lm(name, chunk)


def prompt_of(name):
    chance = random.Random(f"a prompt of {name}")
    return [chance.randrange(min(60, model(name).vocab_size)) for _ in range(70)]


def pieces_of(generation):
    texts = [[] for _ in range(generation.request.options.n)]
    for piece in generation:
        texts[piece.choice].append(piece)
    return texts


def assert_same(generation, whole):
    """The pieces of every text from the first on, and the completion."""
    assert pieces_of(generation) == pieces_of(whole)
    completion, right = generation.result(SECONDS), whole.result(SECONDS)
    assert [content(choice) for choice in completion.choices] == [content(choice) for choice in right.choices]
    assert [choice.message for choice in completion.choices] == [choice.message for choice in right.choices]
    assert completion.prompt_tokens == right.prompt_tokens
    assert generation.emitted() == whole.emitted()


# ── at every cut ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", MODELS_CUT)
@pytest.mark.stride(3)
def test_every_feature_at_every_cut(name, feature):
    request = engine_lm(name).request(prompt_of(name), **{"max_new_tokens": 12} | FEATURES[feature])
    with CheckedEngine(engine_lm(name), max_sequences=6) as engine, CheckedEngine(engine_lm(name)) as other:
        whole = engine.submit(request)
        whole.result(SECONDS)
        emitted = whole.emitted()
        resumed = []
        for cut in range(1 + max(map(len, emitted))):
            cuts = [ids[: max(0, cut - text)] for text, ids in enumerate(emitted)]  # each text at a place of its own
            resumed.append((engine if cut % 2 else other).resume(request, emitted=cuts))
        for generation in resumed:
            assert_same(generation, whole)


@settings(max_examples=60)
@given(st.data())
def test_any_request_cut_anywhere_twice(data):
    name, index = data.draw(st.sampled_from(list(MODELS))), data.draw(st.integers(0, REQUESTS - 1))
    request, expected = requests(name)[index], expected_of(name, index)
    emitted = [[] if request.options.beams > 1 else choice["token_ids"] for choice in expected]
    earlier = [ids[: data.draw(st.integers(0, len(ids)))] for ids in emitted]
    with CheckedEngine(lm(name, data.draw(st.sampled_from(CHUNKS))), max_sequences=3) as engine:
        once = engine.resume(request, emitted=earlier)
        assert [content(choice) for choice in once.result(SECONDS).choices] == expected
        if request.options.beams == 1:
            assert once.emitted() == emitted
        later = [ids[: data.draw(st.integers(len(cut), len(ids)))] for ids, cut in zip(emitted, earlier, strict=True)]
        twice = engine.resume(request, emitted=later)
        assert [content(choice) for choice in twice.result(SECONDS).choices] == expected
        assert pieces_of(twice) == pieces_of(once)


@pytest.mark.parametrize("name", MODELS_CUT)
def test_prefill_leaves_the_state_that_decoding_left(name):
    prompt, options = prompt_of(name), {"temperature": 0.0, "eos": []}
    whole = engine_lm(name).generate(prompt, max_new_tokens=40, **options).token_ids
    everything = engine_lm(name).model.vocab_size
    windows = [shape.window for shape in architecture_of(engine_lm(name).model).cached]
    for cut in (1, 2, 15, 16, 17, 39):
        decoded, prefilled = onward.Session(engine_lm(name)), onward.Session(engine_lm(name))
        decoded.generate(prompt, max_new_tokens=cut, **options)
        prefilled.generate(prompt + whole[: cut - 1], max_new_tokens=1, **options)
        assert decoded.tokens == prefilled.tokens
        caches = [session._text.snapshot()[0] for session in (decoded, prefilled)]
        for left, right, window in zip(*[(*cache.keys, *cache.values) for cache in caches], 2 * windows, strict=True):
            first = 0 if window is None else max(0, len(decoded.tokens) - window + 1)  # that the next token sees
            assert torch.equal(*[each[:, :, first : len(decoded.tokens)] for each in (left, right)]), cut
        # Of recurrent states only that is defined which is read.
        nexts = [
            session.generate(prompt + whole[:cut], max_new_tokens=1, logprobs=everything, **options)
            for session in (decoded, prefilled)
        ]
        assert [one.cached_tokens for one in nexts] == [len(prompt) + cut - 1] * 2
        assert nexts[0].logprobs == nexts[1].logprobs


# ── handed on ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_passes_through_three_engines():
    request = engine_lm("recurrent").request(prompt_of("recurrent"), max_new_tokens=60, n=2, logprobs=1, **SAMPLED)
    with CheckedEngine(engine_lm("recurrent")) as engine:
        whole = engine.submit(request)
        whole.result(SECONDS)
    emitted = [[], []]
    for stops_at in (20, 70, None):
        with CheckedEngine(engine_lm("recurrent")) as engine:
            generation = engine.resume(request, emitted=emitted)
            for count, _ in enumerate(generation):
                if count == stops_at:
                    generation.cancel()
            emitted = generation.emitted()
            assert emitted == [choice.token_ids for choice in generation.result(SECONDS).choices]
    assert_same(generation, whole)


def test_emitted_tokens_are_not_decoded_again():
    script = scripted_model(lambda ids: (ids[-1] + 1) % 50, vocab_size=64, max_seq_len=256)
    scripted = LanguageModel(script, ByteTokenizer(vocab_size=64))
    with CheckedEngine(scripted, max_sequences=2) as engine:
        whole = engine.submit([7, 8], max_new_tokens=20).result(SECONDS)
        del script.calls[:]
        generation = engine.resume([7, 8], emitted=whole.token_ids[:17], max_new_tokens=20)
        assert generation.result(SECONDS).token_ids == whole.token_ids
        assert [sum(map(len, call.tokens)) for call in script.calls] == [19, 1, 1]
        assert engine.stats().tokens == 20 + 3
        assert sum(count for _, count in generation.arrivals) == 3


def test_cached_prefixes_are_reused():
    with CheckedEngine(engine_lm("qwen3")) as engine:
        request = engine_lm("qwen3").request(prompt_of("qwen3"), max_new_tokens=100, eos=[])
        whole = engine.submit(request)
        whole.result(SECONDS)
        before = engine.stats().hit_rate
        resumed = engine.resume(request, emitted=whole.result().token_ids[:90])
        assert_same(resumed, whole)
        assert resumed.result().cached_tokens == 70
        assert before == 0
        assert engine.stats().hit_rate == pytest.approx(159 / (70 + 160))


# ── chats, adapters ─────────────────────────────────────────────────────────────────────────────────────────────────

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Bergen"]}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
        },
    },
}
THINKING = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
<think>
"""


@pytest.mark.parametrize(
    "options",
    [
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_new_tokens": 60, **SAMPLED},
        {"tools": [TOOL], "tool_choice": "required", "max_new_tokens": 50, "n": 2, "logprobs": 1, **SAMPLED},
        {"max_new_tokens": 30, "stop": ["the"], **SAMPLED},
        {"max_new_tokens": 30, "json_schema": {"type": "object"}, "temperature": 0.0},
    ],
    ids=["a call", "calls", "stop", "json"],
)
@pytest.mark.parametrize("thinking", [False, True], ids=["", "thinking"])
@pytest.mark.stride(3)
def test_a_resumed_chat_gives_the_same_message(options, thinking):
    chat = onward.load("demo")
    if thinking and "tools" in options:
        template = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call></tool_call>\n" + THINKING
        chat = LanguageModel(chat.model, chat.tokenizer, ChatTemplate(template, {}), chat.defaults)
    elif thinking:
        chat = LanguageModel(chat.model, chat.tokenizer, ChatTemplate(THINKING, {}), chat.defaults)
    messages = [{"role": "user", "content": "Does it rain in Oslo?"}]
    with CheckedEngine(chat) as engine:
        whole = engine.submit(messages=messages, **options)
        whole.result(SECONDS)
        emitted = whole.emitted()
        for cut in range(1 + max(map(len, emitted))):
            resumed = engine.resume(messages=messages, emitted=[ids[:cut] for ids in emitted], **options)
            assert_same(resumed, whole)
    if "tools" in options and not thinking:
        assert json.loads(whole.result().message.tool_calls[0].arguments)["city"] in ("Oslo", "Bergen")


def test_several_adapters_at_once(tmp_path):
    demo = onward.load("demo")
    for seed, name in enumerate(("one", "two")):
        demo.load_adapter(name, demo_adapter(tmp_path / name, seed))
    with CheckedEngine(demo) as engine:
        options = {"max_new_tokens": 24, "logprobs": 0, **SAMPLED}
        wholes = [engine.submit("Once upon a time", adapter=name, **options) for name in (None, "one", "two")]
        emitted = [whole.result(SECONDS).token_ids for whole in wholes]
        assert len(set(map(tuple, emitted))) == 3
        resumed = [
            engine.resume("Once upon a time", emitted=ids[:cut], adapter=name, **options)
            for ids, cut, name in zip(emitted, (5, 10, 15), (None, "one", "two"), strict=True)
        ]
        for generation, whole in zip(resumed, wholes, strict=True):
            assert_same(generation, whole)


# ── ends ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ending", ["length", "eos", "stop", "stop_when", "constraint"])
def test_emitted_ids_that_end_the_text_end_it_at_once(ending):
    qwen3 = engine_lm("qwen3")
    plain = qwen3.generate("abc", max_new_tokens=10, **SAMPLED)
    options = {
        "length": {},
        "eos": {"eos": [plain.token_ids[4]]},
        "stop": {"stop": next(char for char in plain.text[2:] if char.isprintable())},
        "stop_when": {"stop_when": ends_at_five},
        "constraint": {"constraint": Turns(), "max_new_tokens": 30},
    }[ending]
    request = qwen3.request("abc", **{"max_new_tokens": 10} | SAMPLED | options)
    with CheckedEngine(qwen3) as engine:
        whole = engine.submit(request)
        ids = whole.result(SECONDS).token_ids
        steps = engine.stats().steps
        resumed = engine.resume(request, emitted=ids)
        assert resumed.done
        assert_same(resumed, whole)
        assert engine.stats().steps == steps
        scored = request.replace(logprobs=1, prompt_logprobs=0)
        assert_same(engine.resume(scored, emitted=ids), engine.submit(scored))
        with pytest.raises(RequestError, match=f"{len(ids)} of the {len(ids) + 1} ids|max_new_tokens is 10"):
            engine.resume(request, emitted=[*ids, 5])


def ends_at_five(ids, text):
    return len(ids) == 5


def test_a_time_limit_counts_from_the_resumption():
    qwen3 = engine_lm("qwen3")
    ids = qwen3.generate("abc", max_new_tokens=20, **SAMPLED).token_ids
    with CheckedEngine(qwen3) as engine:
        late = engine.resume("abc", emitted=ids[:12], max_new_tokens=20, time_limit=1e-9, **SAMPLED)
        completion = late.result(SECONDS)
        assert completion.finish_reason == "time"
        assert completion.token_ids == ids[:12]
        assert late.emitted() == [ids[:12]]


def test_a_request_cancelled_before_its_logprobs_has_consistent_ones():
    qwen3 = engine_lm("qwen3", 5)
    whole = qwen3.generate("abc", max_new_tokens=40, logprobs=1, **SAMPLED)
    with CheckedEngine(qwen3) as engine:
        generations = []
        engine.between_steps(lambda: generations[0].emitted()[0][8:] and generations[0].cancel())
        generations.append(engine.resume("abc", emitted=whole.token_ids[:35], max_new_tokens=40, logprobs=1, **SAMPLED))
        completion = generations[0].result(SECONDS)
    count = len(completion.token_ids)
    assert completion.finish_reason == "cancelled"
    assert 8 < count < 35
    assert completion.token_ids == whole.token_ids[:count]
    assert completion.logprobs == whole.logprobs[:count]
    assert completion.text == "".join(piece.text for piece in generations[0])
    assert whole.text.startswith(completion.text)


def test_a_full_queue_refuses_a_resumed_request_too():
    with CheckedEngine(engine_lm("qwen3"), max_sequences=1, max_waiting=1) as engine:
        generations = []

        def offer():
            while len(generations) < 9:
                generations.append(engine.resume("abc", emitted=[5, 6], max_new_tokens=200, eos=[]))

        with pytest.raises(EngineBusyError):
            offer()
        assert len(generations) in (1, 2)
        for generation in generations:
            generation.cancel()


# ── bad input ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("emitted", "options", "message"),
    [
        ([3, 258], {}, "emitted must hold ids, whole numbers from 0 to 257; got 258"),
        ([-1], {}, "got -1"),
        ([1.5], {}, "got 1.5"),
        ([True], {}, "got True"),
        ("abc", {}, "emitted must be ids, or a list of ids for each text; got str"),
        (None, {}, "got NoneType"),
        (7, {}, "got int"),
        ([[1], 2], {}, "got a list of both"),
        ([1, 2, 3], {"max_new_tokens": 2}, "emitted holds 3 ids of a text, but max_new_tokens is 2"),
        ([1], {"max_new_tokens": 0}, "emitted holds 1 ids of a text, but max_new_tokens is 0"),
        ([1, 2, 3], {"eos": [2]}, "the text ends ('stop') with 2 of the 3 ids in emitted"),
        ([97, 98], {"regex": "[a-c]x"}, "emitted[1] is id 98, which the request's constraint forbids there"),
        ([256], {"regex": "[a-c]x"}, "emitted[0] is id 256, which the request's constraint forbids there"),
        ([1], {"temperature": 1.0}, "a sampled request without a seed cannot be resumed"),
        ([], {"temperature": 1.0}, "a sampled request without a seed cannot be resumed"),
        ([[1], [2], [3]], {"n": 2, **SAMPLED}, "emitted holds ids of 3 texts, but the request has n=2"),
        ([1, 2], {"n": 2, **SAMPLED}, "emitted holds ids of 1 texts, but the request has n=2"),
        ([[1], [2]], {}, "emitted holds ids of 2 texts, but the request has n=1"),
    ],
)
def test_ids_that_cannot_have_been_emitted_are_refused(emitted, options, message):
    with CheckedEngine(engine_lm("qwen3")) as engine:
        before = engine.stats()
        with pytest.raises(RequestError) as raised:
            engine.resume("abc", emitted=emitted, **options)
        assert message in str(raised.value)
        assert engine.stats() == before


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_ids_may_be_any_sequence(kind):
    whole = engine_lm("qwen3").generate("abc", max_new_tokens=8, temperature=0.0)
    with CheckedEngine(engine_lm("qwen3")) as engine:
        emitted = kind(whole.token_ids[:5])
        for given_as in (emitted, [emitted]):
            resumed = engine.resume("abc", emitted=given_as, max_new_tokens=8, temperature=0.0)
            assert content(resumed.result(SECONDS)) == content(whole)
