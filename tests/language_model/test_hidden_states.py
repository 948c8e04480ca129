"""Values at taps: the bits of one forward over the whole text, however the text was processed."""

import itertools
import random
from typing import Any

import pytest
import torch

import onward
from onward import Completion, Engine, LanguageModel, Session
from onward.cache import PagedCacheManager
from onward.errors import ContextOverflowError, RequestError
from onward.testing import tiny_model

PROMPT = "Once upon a time there was a little dog who"
TAPS: dict[str, Any] = {"layers.2": "all", "norm": "new", "embedding": "last", "layers.4": "all"}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "seed": 3},
    "several": {"temperature": 1.0, "seed": 3, "n": 3},
    "beams": {"beams": 3, "n": 3},
    "drafted": {"temperature": 1.0, "seed": 5, "draft": "lookup"},
    "constrained": {"temperature": 0, "choice": ("a dog with a very long name", "a cat")},
    "scored": {"temperature": 0, "logprobs": 1, "prompt_logprobs": 1},
    "nothing new": {"max_new_tokens": 0},
}


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return onward.load("demo")


@pytest.fixture(scope="module")
def judge() -> LanguageModel:
    """The same model without a prefix cache: each text is one forward."""
    lm = onward.load("demo")
    lm.prefix_memory = 0
    return lm


def assert_right(judge: LanguageModel, completion: Completion, prompt: str = PROMPT, taps: Any = TAPS) -> None:
    ids = judge.encode(prompt)
    for text in completion.choices:
        whole = judge.hidden_states([*ids, *text.token_ids], list(taps))
        assert text.taps is not None
        assert text.taps.keys() == taps.keys()
        end = len(ids) + max(len(text.token_ids) - 1, 0)  # the last new id is never processed
        for name, which in taps.items():
            want = {"last": whole[name][len(ids) - 1], "all": whole[name][:end]}.get(which)
            want = whole[name][len(ids) - 1 : end] if want is None else want
            assert torch.equal(text.taps[name], want), name


@pytest.mark.parametrize("kind", OPTIONS)
def test_values_equal_a_forward_over_the_text(lm, judge, kind):
    options = {"max_new_tokens": 12, "ignore_eos": kind != "constrained", **OPTIONS[kind]}
    if kind == "constrained":
        del options["ignore_eos"]
    plain = lm.generate(PROMPT, **options)
    for _ in range(2):  # the second time over the cached prefix
        completion = lm.generate(PROMPT, taps=TAPS, **options)
        assert_right(judge, completion)
        assert completion == plain or [x.token_ids for x in completion.choices] == [x.token_ids for x in plain.choices]


@pytest.mark.parametrize("kind", OPTIONS)
def test_an_engine_gives_the_same_values_with_other_rows_in_the_batch(lm, judge, kind):
    options = {"max_new_tokens": 12, **OPTIONS[kind]}
    others = [
        (f"{PROMPT} {word}", {"max_new_tokens": 9, "temperature": 1.0, "seed": 1}) for word in ("went", "saw", "is")
    ]
    with Engine(lm, max_sequences=8) as engine:
        handles = [engine.submit(prompt, **each) for prompt, each in others]
        asked = engine.submit(PROMPT, taps=TAPS, **options)
        half = engine.submit(others[0][0], taps={"norm": "all"}, **others[0][1])
        assert_right(judge, asked.result())
        assert_right(judge, half.result(), others[0][0], {"norm": "all"})
        for handle, (prompt, each) in zip(handles, others, strict=True):
            assert handle.result().token_ids == lm.generate(prompt, **each).token_ids
            assert handle.result().taps is None


def test_values_survive_preemption(lm, judge):
    """Blocks for one text and a half: the later texts are preempted and recomputed, and report no position twice."""
    prompts = [f"{PROMPT} {word}" for word in ("went", "saw", "was")]
    options: dict[str, Any] = {"max_new_tokens": 120, "temperature": 0, "ignore_eos": True, "taps": TAPS}
    nbytes = PagedCacheManager(lm.model.new_blocks(1), max_len=1024, cached_blocks=0).unit_nbytes
    with Engine(lm, max_sequences=3, cache_memory=5 * nbytes, overcommit=8.0) as engine:
        handles = [engine.submit(prompt, **options) for prompt in prompts]
        for handle, prompt in zip(handles, prompts, strict=True):
            assert_right(judge, handle.result(), prompt)
        assert engine.stats().preemptions


def test_pieces_and_resumed_requests_have_the_values_of_their_tokens(lm, judge):
    options: dict[str, Any] = {"max_new_tokens": 10, "temperature": 1.0, "seed": 7, "ignore_eos": True, "taps": TAPS}
    completion = lm.generate(PROMPT, **options)
    all_rows = completion.taps["layers.2"][-10:]
    for piece, row in zip(lm.stream(PROMPT, **options), all_rows, strict=True):
        assert piece.taps.keys() == {"layers.2", "norm", "layers.4"}
        assert torch.equal(piece.taps["layers.2"], row)
    with Engine(lm) as engine:
        resumed = engine.resume(PROMPT, emitted=completion.token_ids[:4], **options)
        pieces = list(resumed)
        assert_right(judge, resumed.result())
        assert [torch.equal(piece.taps["layers.2"], row) for piece, row in zip(pieces, all_rows, strict=True)]


def test_sessions_report_every_position_despite_cached_prefixes(lm, judge):
    session = Session(lm)
    first = session.generate(PROMPT, max_new_tokens=6, temperature=0)
    prompt = PROMPT + first.text + " and then"
    assert_right(judge, session.generate(prompt, max_new_tokens=5, temperature=0, taps=TAPS), prompt)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_5", "deepseekv3", "falconh1"])
def test_hidden_states_alone_in_batches_and_in_chunks(family):
    lm = LanguageModel(tiny_model(family, sliding_window=7) if family == "gemma2" else tiny_model(family))
    rng = random.Random(5)
    texts = [[rng.randrange(258) for _ in range(length)] for length in (31, 5, 31, 1, 64, 31)]
    names = list(lm.model.taps)
    lm.prefix_memory = 0
    whole = [lm.hidden_states(text, names) for text in texts]
    lm.prefix_memory = 2**28
    for chunk, at in itertools.product((512, 7, 1), ("all", "last", "mean")):
        lm.prefill_chunk = chunk
        for text, values in zip(texts, lm.hidden_states(texts, names, at=at), strict=True):
            want = whole[texts.index(text)]
            for name, value in values.items():
                rows = want[name]
                if at == "mean":
                    mean = rows.double().mean(0)
                    # One rounding to float32 of a sum in double precision.
                    assert bool(((value - mean).abs() <= mean.abs() * 2**-23 + 1e-12).all())
                else:
                    assert torch.equal(value, rows if at == "all" else rows[-1])
    lm.prefill_chunk = 512
    means = lm.hidden_states(texts, "norm", at="mean")
    assert all(
        torch.equal(lm.hidden_states(text, "norm", at="mean"), mean) for text, mean in zip(texts, means, strict=True)
    )


def test_hidden_states_compute_no_head(lm, monkeypatch):
    def fail(*args: Any) -> Any:
        raise AssertionError("the head was computed")

    eager = LanguageModel(lm.model, lm.tokenizer, compile="eager")
    seen = []
    logits = type(lm.model.forward.func).logits
    monkeypatch.setattr(
        type(lm.model.forward.func), "logits", lambda self, params, x: seen.append(x.shape) or logits(self, params, x)
    )
    eager.hidden_states(PROMPT, ["norm", "layers.0"])
    assert [shape.numel() for shape in seen] == [0] * len(seen)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (
            lambda lm: lm.hidden_states("a", "layers.99"),
            "taps names 'layers.99', .* it has embedding, layers.0, .*norm",
        ),
        (lambda lm: lm.generate("a", taps={"logits": "all"}), "taps names 'logits'"),
        (lambda lm: lm.generate("a", taps={"norm": "first"}), 'taps must map names .* "last", "new" or "all"'),
        (lambda lm: lm.generate("a", taps=["norm"]), "taps must map names"),
        (lambda lm: lm.hidden_states("a", "norm", at="first"), 'at must be "all", "last" or "mean"; got .first'),
        (
            lambda lm: lm.generate(
                "a", n=4096, max_new_tokens=500, temperature=1, taps=dict.fromkeys(lm.model.taps, "all")
            ),
            "taps may report .* of values, and a request at most 1.*: ask for fewer",
        ),
        (lambda lm: lm.hidden_states("a", "norm", adapter="poet"), "there is no adapter 'poet'"),
        (lambda lm: lm.hidden_states(list(range(5)) * 999, "norm"), "4,?995"),
    ],
)
def test_bad_input_is_one_clear_error(lm, call, problem):
    with pytest.raises((RequestError, ContextOverflowError), match=problem):
        call(lm)
