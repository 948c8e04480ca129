"""Several texts per prompt, logprobs, options per prompt, and end conditions set by callers."""

import dataclasses
import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onward import Completion, GenerateOptions, LanguageModel, Model
from onward.chat import ChatTemplate
from onward.errors import RequestError
from onward.sampling import sample_seed
from onward.sampling.noise import philox
from onward.testing import ByteTokenizer, poison, scripted_model, tiny_model

TOKENIZER = ByteTokenizer()
PROMPTS = ["Once upon a time", "A", "The cat sat on the"]
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 11}


def tiny_lm(**options) -> LanguageModel:
    return LanguageModel(tiny_model(seed=7), TOKENIZER, defaults=GenerateOptions(max_new_tokens=20), **options)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_lm()


def contents(one: Completion) -> tuple:
    """The tokens of a choice, and the reason of its end."""
    return one.text, one.token_ids, one.finish_reason, one.prompt_tokens, one.seed


def logprobs_of(one: Completion) -> list[float]:
    """All logprobs of a completion."""
    tokens = [token for token in (one.prompt_logprobs or []) + (one.logprobs or []) if token is not None]
    return [value for token in tokens for value in (token.chosen, *(value for _, value in token.top))]


def close(values: list[float]):
    """Logits of order 1 of two right float32 sums differ by 1e-4 at most (tests/models/transformers_reference.py), and
    logprobs by twice that. The kernels give the same bits; the definitions, which run where there are none, do not.
    """
    return pytest.approx(values, abs=2e-4, rel=0)


# ── n ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [SAMPLED, SAMPLED | {"repetition_penalty": 1.3, "logprobs": 1}], ids=str)
@pytest.mark.parametrize("chunk", [512, 3])
def test_samples_equal_their_seeds_alone(options, chunk):
    lm = tiny_lm(prefill_chunk=chunk)
    completions = lm.generate(PROMPTS, n=4, **options)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert contents(completion) == contents(lm.generate(prompt, **options)), "sample 0 is the text of n=1"
        assert completion.choices[0] is completion
        assert [one.seed for one in completion.choices] == [sample_seed(11, index) for index in range(4)]
        for one in completion.choices:
            assert contents(lm.generate(prompt, **(options | {"seed": one.seed}))) == contents(one)
        assert len({tuple(one.token_ids) for one in completion.choices}) == 4
    # Rows of a cache that was given stay where they are; those of our own close ranks as texts end.
    cache = poison(lm.new_cache(12, 64))
    again = lm.generate(PROMPTS, n=4, cache=cache, **options)
    assert [[contents(x) for x in one.choices] for one in again] == [
        [contents(x) for x in one.choices] for one in completions
    ]


def likely_again(tokens):
    """The logits of a script that has a little of everything, and more of the last id."""
    logits = torch.arange(32.0) * 0.1
    logits[tokens[-1]] += 1
    return logits


class HiddenRows:
    """A cache that isn't a pytree of tensors: its rows can't be identified, so they are neither copied nor moved."""

    def __init__(self, inner):
        self.inner = inner


def hiding_rows(model: Model) -> Model:
    def forward(tokens, offsets, cache, params, **options):
        logits, inner = model.forward(tokens, offsets, cache.inner, params, **options)
        return logits, HiddenRows(inner)

    def new_cache(batch, max_len):
        return HiddenRows(model.new_cache(batch, max_len))

    return dataclasses.replace(model, forward=forward, new_cache=new_cache)


def test_samples_of_a_cache_without_copies_are_equal_at_more_work():
    lm = LanguageModel(hiding_rows(scripted_model(likely_again)))
    completions = lm.generate([[1, 2, 3], [4]], n=3, max_new_tokens=6, **SAMPLED)
    assert lm.model.calls[0].tokens == [[1, 2, 3]] * 3 + [[4, 4, 4]] * 3
    for prompt, completion in zip([[1, 2, 3], [4]], completions, strict=True):
        for one in completion.choices:
            assert lm.generate(prompt, max_new_tokens=6, **(SAMPLED | {"seed": one.seed})).token_ids == one.token_ids


def test_samples_of_any_cache_with_rows_share_one_prefill():
    lm = LanguageModel(scripted_model(likely_again))
    completions = lm.generate([[1, 2, 3], [4, 5]], n=3, max_new_tokens=6, **SAMPLED)
    assert [call.tokens for call in lm.model.calls[:3]] == [[[1, 2]], [[4]], [[3], [5], [3], [3], [5], [5]]]
    for prompt, completion in zip([[1, 2, 3], [4, 5]], completions, strict=True):
        for one in completion.choices:
            assert lm.generate(prompt, max_new_tokens=6, **(SAMPLED | {"seed": one.seed})).token_ids == one.token_ids


def counted(lm: LanguageModel) -> list[tuple[int, int]]:
    """[B, T] of every forward from here on."""
    shapes, forward = [], lm.model.forward

    def counting(tokens, offsets, cache, params, logits_at=None):
        shapes.append(tuple(tokens.shape))
        return forward(tokens, offsets, cache, params, logits_at=logits_at)

    object.__setattr__(lm.model, "forward", counting)
    return shapes


def test_samples_share_one_prefill():
    lm = tiny_lm(compile="eager")
    shapes = counted(lm)
    lm.generate(["x" * 30, "y" * 20], n=5, max_new_tokens=3, **SAMPLED)
    assert shapes == [(1, 29), (1, 19), (10, 1), (10, 1), (10, 1)], "no prompt is padded to another's length"
    shapes.clear()
    lm.generate(["z" * 30, "w" * 30], n=5, max_new_tokens=3, **SAMPLED)
    assert shapes == [(2, 29), (10, 1), (10, 1), (10, 1)]
    shapes.clear()
    lm.generate("x", n=5, max_new_tokens=2, **SAMPLED)
    assert shapes == [(5, 1), (5, 1)], "a prompt of one token has nothing to share"
    shapes.clear()
    assert [one.text for one in lm.generate("xyz", n=2, max_new_tokens=0, **SAMPLED).choices] == ["", ""]
    assert shapes == []


def test_an_unseeded_request_reports_seeds_that_reproduce_its_samples(lm):
    torch.manual_seed(3)
    completion = lm.generate("Hello", n=3, temperature=1.0)
    torch.manual_seed(3)
    assert lm.generate("Hello", temperature=1.0).token_ids == completion.token_ids
    for one in completion.choices:
        assert lm.generate("Hello", temperature=1.0, seed=one.seed).token_ids == one.token_ids


@given(st.integers(0, 2**64 - 1), st.integers(1, 1000))
def test_each_sample_has_its_own_seed(seed, index):
    assert sample_seed(seed, 0) == seed
    derived = sample_seed(seed, index)
    assert 0 <= derived < 2**64
    assert derived not in (seed, sample_seed(seed, index + 1), sample_seed((seed + 1) % 2**64, index))


def test_seeds_of_samples_equal_published_philox_values():
    """Random123's known answers for counter 0 under key 0 (kat_vectors) begin 6627e8d5 e169c58d."""
    zero = torch.zeros((), dtype=torch.int64)
    assert [hex(int(word)) for word in philox((zero, zero, zero, zero), zero)[:2]] == ["0x6627e8d5", "0xe169c58d"]
    low, high, _, _ = philox((zero + 5, zero, zero, zero + 1), zero + 9)
    assert sample_seed(9, 5) == int(low) + 2**32 * int(high)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be a whole number of 1 or more; got 0"),
        ({"n": True, **SAMPLED}, "n must be a whole number"),
        ({"logprobs": -1}, "logprobs must be a whole number of 0 or more; got -1"),
        ({"logprobs": True}, "logprobs must be a whole number"),
        ({"logprobs": 259}, "logprobs is 259, but the vocabulary has 258 ids: ask for fewer"),
        ({"prompt_logprobs": 259}, "prompt_logprobs is 259"),
        ({"time_limit": 0}, "time_limit must be a number of seconds above 0; got 0"),
        ({"time_limit": math.nan}, "time_limit must be"),
        ({"stop_when": 3}, r"stop_when must be a function of \(ids, text\); got 3"),
        ({"cancel": True}, "cancel must be a threading.Event; got True"),
        ({"logprob": 1}, "unknown option 'logprob': did you mean logprobs"),
        ({"per_prompt": {"seed": 1}}, "per_prompt must be a list of options as dicts, one per prompt"),
        ({"per_prompt": [{}, {}]}, "per_prompt has options for 2 prompts, but there are 1"),
        ({"per_prompt": [3]}, "per_prompt must hold a dict of options for each prompt; got 3"),
        ({"per_prompt": [{"n": 0}]}, "n must be a whole number of 1 or more; got 0"),
        ({"per_prompt": [{"logprob": 1}]}, "unknown option 'logprob': did you mean logprobs"),
        ({"per_prompt": [{"beams": 2, "draft": "lookup"}]}, "a beam search cannot use a draft"),
    ],
    ids=str,
)
def test_unsupported_requests_are_refused(lm, options, message):
    with pytest.raises(RequestError, match=message):
        lm.generate("x", **options)


def test_a_cache_with_too_few_rows_is_refused_with_the_number_needed(lm):
    with pytest.raises(RequestError, match="made for 2 rows, but there are 2 prompts of 3 rows each"):
        lm.generate(["a", "b"], n=3, cache=lm.new_cache(2), **SAMPLED)


def test_several_texts_are_not_streamed(lm):
    with pytest.raises(RequestError, match="use generate for n or beams above 1"):
        lm.stream("x", n=2, **SAMPLED)


# ── options of single prompts ─────────────────────────────────────────────────────────────────────────────


def test_prompts_may_differ_in_their_options(lm):
    each = [{"temperature": 0}, {"seed": 5, "max_new_tokens": 3}, {"stop": "e", "logit_bias": {ord("e"): 4.0}}]
    alone = [lm.generate(prompt, **SAMPLED | own) for prompt, own in zip(PROMPTS, each, strict=True)]
    together = lm.generate(PROMPTS, per_prompt=each, **SAMPLED)
    assert [contents(one) for one in together] == [contents(one) for one in alone]
    assert [one.seed for one in together] == [None, 5, 11]
    assert together[2].finish_reason == "stop"
    with_samples = lm.generate(PROMPTS[1:], n=2, per_prompt=each[1:], **SAMPLED)
    assert [contents(one) for one in with_samples] == [contents(one) for one in alone[1:]]


def of_every_kind(one: Completion) -> tuple:
    """All of a completion that is not its time, nor a number that another order of sums may round otherwise."""
    reported = (
        one.logprobs is not None,
        one.prompt_logprobs is not None,
        one.score is not None,
        one.speculation is not None,
    )
    return contents(one), reported, [contents(other) for other in one.others], one.stopped_by


def kinds_of_options() -> dict[str, dict]:
    cancel = threading.Event()
    cancel.set()
    return {
        "plain": {},
        "samples": {"n": 3, **SAMPLED},
        "beams": {"beams": 3, "n": 2},
        "reports": {"logprobs": 2, "prompt_logprobs": 1, **SAMPLED},
        "reports of beams": {"beams": 2, "logprobs": 1, "prompt_logprobs": 0},
        "reports of samples": {"n": 2, "logprobs": 0, "prompt_logprobs": 2, **SAMPLED},
        "no token": {"max_new_tokens": 0, "prompt_logprobs": 0},
        "draft": {"draft": "lookup"},
        "drafts of samples": {"n": 2, "draft": "suffix", **SAMPLED},
        "penalties": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, **SAMPLED},
        "no time": {"time_limit": 1e-9, **SAMPLED},
        "a predicate": {"stop_when": stops_after_five},
        "cancelled": {"cancel": cancel},
    }


def stops_after_five(ids, text):
    return len(ids) == 5


@pytest.mark.parametrize("cache", ["blocks", "dense", "given", "hidden rows"])
@pytest.mark.parametrize("chunk", [512, 3])
@given(names=st.lists(st.sampled_from(sorted(kinds_of_options())), min_size=2, max_size=4), data=st.data())
@settings(max_examples=12, deadline=None)
def test_requests_with_any_options_in_one_call_equal_each_alone(cache, chunk, names, data):
    lm = of_cache(cache, chunk)
    if cache == "hidden rows":
        names = [name for name in names if "beams" not in name] or ["plain"]
    each = [kinds_of_options()[name] for name in names]
    prompts = [data.draw(st.text("abAB ", min_size=1, max_size=9)) for _ in each]
    alone = [lm.generate(prompt, **own) for prompt, own in zip(prompts, each, strict=True)]
    own_cache = {}
    if cache == "given":
        own_cache["cache"] = poison(lm.new_cache(sum(max(own.get("n", 1), own.get("beams", 1)) for own in each), 40))
    together = lm.generate(prompts, per_prompt=each, **own_cache)
    assert [of_every_kind(one) for one in together] == [of_every_kind(one) for one in alone]
    for one, by_itself in zip(together, alone, strict=True):
        assert logprobs_of(one) == close(logprobs_of(by_itself))
        for choice in one.choices:
            assert choice.prompt_logprobs == one.prompt_logprobs
            assert choice.prompt_tokens == one.prompt_tokens
            assert len(choice.timing.per_token_ms) >= max(0, len(choice.token_ids) - 1)


def of_cache(kind: str, chunk: int) -> LanguageModel:
    model = tiny_model(seed=7)
    if kind == "dense":
        model = dataclasses.replace(model, new_blocks=None)
    elif kind == "hidden rows":
        model = dataclasses.replace(hiding_rows(model), new_blocks=None, compiles=False)
    defaults = GenerateOptions(max_new_tokens=8)
    return LanguageModel(model, TOKENIZER, defaults=defaults, prefill_chunk=chunk, prefix_memory=0)


# ── logprobs ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [{}, SAMPLED | {"top_k": 3, "repetition_penalty": 1.5}], ids=str)
def test_logprobs_are_those_of_the_models_own_distribution(lm, options):
    completion = lm.generate("Hello", logprobs=4, prompt_logprobs=2, **options)
    prompt = lm.encode("Hello")
    want = lm.logits(prompt + completion.token_ids).to(torch.float64).log_softmax(-1)
    logprobs = completion.prompt_logprobs + completion.logprobs
    assert completion.prompt_logprobs[0] is None, "nothing predicts the first id"
    assert len(logprobs) == len(prompt) + len(completion.token_ids)
    for at, (token, one) in enumerate(zip((prompt + completion.token_ids)[1:], logprobs[1:], strict=True)):
        assert one.chosen == close(want[at, token].item())
        assert len(one.top) == (2 if at < len(prompt) - 1 else 4)
        assert [value for _, value in one.top] == close(want[at].topk(len(one.top)).values.tolist())
        assert [value for _, value in one.top] == close(want[at, [token for token, _ in one.top]].tolist())


def test_logprobs_change_no_token_and_are_equal_in_any_batch(lm):
    plain = [lm.generate(prompt, **SAMPLED).token_ids for prompt in PROMPTS]
    asked = {"logprobs": 3, "prompt_logprobs": 1, **SAMPLED}
    alone = [lm.generate(prompt, **asked) for prompt in PROMPTS]
    assert [one.token_ids for one in alone] == plain
    batches = [
        lm.generate(PROMPTS, **asked),
        tiny_lm(prefill_chunk=4).generate(PROMPTS, **asked),
        lm.generate(PROMPTS, cache=poison(lm.new_cache(3)), **asked),
        lm.generate(PROMPTS, n=2, **asked),
    ]
    for batch in batches:
        for one, by_itself in zip(batch, alone, strict=True):
            assert contents(one) == contents(by_itself)
            assert logprobs_of(one) == close(logprobs_of(by_itself))
    assert [one.others[0].prompt_logprobs for one in batches[-1]] == [one.prompt_logprobs for one in batches[-1]]


def test_pieces_have_the_same_logprobs_as_completions(lm):
    pieces = list(lm.stream("Hello", logprobs=2, **SAMPLED))
    completion = lm.generate("Hello", logprobs=2, **SAMPLED)
    assert [piece.logprobs for piece in pieces] == completion.logprobs
    assert len(pieces) == 20
    assert [piece.logprobs for piece in lm.stream("Hello", **SAMPLED)] == [None] * 20
    assert lm.generate("Hello").logprobs is None


def test_logprobs_0_has_only_the_chosen_tokens(lm):
    assert [one.top for one in lm.generate("Hello", logprobs=0, max_new_tokens=3).logprobs] == [()] * 3


def test_prompt_logprobs_without_new_tokens(lm):
    completion = lm.generate("Hello", prompt_logprobs=0, max_new_tokens=0)
    assert (completion.text, completion.finish_reason, completion.logprobs) == ("", "length", None)
    assert logprobs_of(completion) == close(logprobs_of(lm.generate("Hello", prompt_logprobs=0)))
    assert len(logprobs_of(completion)) == 4


# ── ends ──────────────────────────────────────────────────────────────────────────────────────────────────


def abc(**options) -> LanguageModel:
    """Goes through the alphabet for ever."""

    def follow(tokens):
        return ord("a") + (tokens[-1] - ord("a") + 1) % 26

    return LanguageModel(scripted_model(follow, vocab_size=258), TOKENIZER, defaults=GenerateOptions(**options))


def test_a_predicate_gets_ids_and_text_and_ends_its_row_alone():
    seen = []

    def enough(ids, text):
        seen.append((list(ids), text))
        return text.endswith("f")

    first, second = abc(max_new_tokens=9).generate(["c", "a"], stop_when=enough)
    assert (first.text, first.finish_reason) == ("def", "stop")
    assert (second.text, second.finish_reason) == ("bcdef", "stop")
    assert ([*b"de"], "de") in seen


def test_a_time_limit_counts_from_the_call_and_allows_one_token():
    lm = abc(max_new_tokens=1000)
    assert (done := lm.generate("a", time_limit=1e-9)).finish_reason == "time"
    assert done.text == "b"
    stream = lm.stream("a", time_limit=1e-9)
    assert [piece.text for piece in stream] == ["b"]
    assert lm.generate("a", max_new_tokens=4, time_limit=1000).finish_reason == "length"


def test_a_cancelled_text_keeps_its_tokens():
    cancel = threading.Event()
    lm = abc(max_new_tokens=1000)
    got = []
    for piece in lm.stream("a", cancel=cancel):
        got.append(piece.text)
        if len(got) == 3:
            cancel.set()
    assert "".join(got) == "bcde", "the token that was next is the last"
    assert lm.generate("a", cancel=cancel).finish_reason == "cancelled"


def test_another_thread_can_cancel():
    cancel, started, done = threading.Event(), threading.Event(), []

    def tell(ids, text):
        started.set()
        return False

    lm = abc(max_new_tokens=100_000)
    thread = threading.Thread(target=lambda: done.append(lm.generate("a", cancel=cancel, stop_when=tell)))
    thread.start()
    assert started.wait(60)
    cancel.set()
    thread.join(60)
    assert not thread.is_alive()
    assert done[0].finish_reason == "cancelled"


def test_the_first_end_determines_the_reason():
    cancel = threading.Event()
    cancel.set()
    lm = abc(max_new_tokens=1)
    assert lm.generate("a", cancel=cancel).finish_reason == "length"
    assert lm.generate("a", eos=ord("b"), cancel=cancel).finish_reason == "stop"
    assert lm.generate("a", max_new_tokens=5, cancel=cancel, time_limit=1e-9).finish_reason == "cancelled"


def test_chats_take_these_options_too():
    lm = tiny_lm()
    lm.chat_template = ChatTemplate("{{ messages[0].content }}", {})
    answer = lm.chat([{"role": "user", "content": "Hi"}], n=2, **SAMPLED)
    assert [contents(one) for one in answer.choices] == [
        contents(one) for one in lm.generate("Hi", n=2, **SAMPLED).choices
    ]


# ── times ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_shared_prefill_is_part_of_the_first_tokens_time(lm):
    shared = lm.generate("x" * 200, n=2, **SAMPLED)
    for one in shared.choices:
        assert len(one.timing.per_token_ms) == len(one.token_ids) - 1
        assert one.timing.total_ms == pytest.approx(one.timing.prefill_ms + sum(one.timing.per_token_ms))
    assert shared.timing.prefill_ms == shared.others[0].timing.prefill_ms > 0


def test_greedy_texts_are_equal(lm):
    alone = lm.generate("Once", temperature=0, max_new_tokens=6)
    choices = lm.generate("Once", temperature=0, max_new_tokens=6, n=3).choices
    assert [choice.token_ids for choice in choices] == [alone.token_ids] * 3
    assert {choice.seed for choice in choices} == {None}
