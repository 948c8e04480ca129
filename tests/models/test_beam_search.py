"""Beams equal those of transformers: texts, scores and their order, alone and in a batch."""

import dataclasses
import random
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from transformers_reference import CASES, SMALL, TOLERANCE, build, save

import onward
from onward.errors import OnwardError, RequestError
from onward.testing import ByteTokenizer, poison, tiny_model

VOCAB = SMALL["vocab_size"]


@dataclass(frozen=True)
class Judged:
    model: transformers.PreTrainedModel
    lm: onward.LanguageModel


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> Judged:
    model = build(CASES["qwen3"])
    return Judged(model, onward.load(save(model, tmp_path_factory.mktemp("checkpoint"))))


def expected_beams(model, prompts, n, eos, **options) -> list[list[tuple[list[int], float]]]:
    """The beams of transformers for each prompt: ids and score, best first."""
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    found = model.generate(
        torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]),
        attention_mask=torch.tensor(
            [[0] * pad + [1] * len(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
        ),
        num_return_sequences=n,
        eos_token_id=eos,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    texts = [_up_to(ids, eos) for ids in found.sequences[:, longest:].tolist()]
    scored = list(zip(texts, found.sequences_scores.tolist(), strict=True))
    return [scored[first : first + n] for first in range(0, len(scored), n)]


def _up_to(ids: list[int], eos: list[int]) -> list[int]:
    return ids[: next((at + 1 for at, token in enumerate(ids) if token in eos), len(ids))]


def searched(rng: random.Random, prompts: int) -> dict[str, Any]:
    """A search such as users ask for; many end ids, so that beams end at all lengths."""
    beams = rng.choice([2, 3, 5])
    return {
        "prompts": [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))] for _ in range(prompts)],
        "beams": beams,
        "n": rng.randint(1, beams),
        "length_penalty": rng.choice([0.0, 0.7, -0.5, 2.0]),
        "early_stopping": rng.choice([True, False, "never"]),
        "eos": rng.sample(range(VOCAB), rng.choice([1, 8, 30])),
        "max_new_tokens": rng.choice([1, 2, 8, 20]),
    }


def agree(judged, asked, extra=None):
    extra = extra or {}
    prompts, n, eos = asked["prompts"], asked["n"], asked["eos"]
    judge = expected_beams(
        judged.model, prompts, n, eos, num_beams=asked["beams"],
        length_penalty=asked["length_penalty"], early_stopping=asked["early_stopping"],
        max_new_tokens=asked["max_new_tokens"], **extra,
    )  # fmt: skip
    options = {name: value for name, value in asked.items() if name != "prompts"}
    for texts, completion in zip(judge, judged.lm.generate(prompts, **options, **extra), strict=True):
        assert [choice.token_ids for choice in completion.choices] == [ids for ids, _ in texts]
        for (ids, score), choice in zip(texts, completion.choices, strict=True):
            # A logprob moves by twice what logits move at most, and a score is a sum of them over length^penalty.
            assert choice.score == pytest.approx(
                score, abs=2 * TOLERANCE * len(ids) / len(ids) ** asked["length_penalty"], rel=0
            )
            assert choice.finish_reason == ("stop" if ids[-1] in eos else "length")


# Seeds are fixed: two candidates closer than the rounding of a sum would be ordered by chance. Of 1,200 searches tried
# none was.
@pytest.mark.parametrize("seed", range(24))
def test_beams_equal_transformers(judged, seed):
    agree(judged, searched(random.Random(seed), prompts=3))


# One prompt: in a batch transformers counts the padding among the ids that are penalised.
@pytest.mark.parametrize(
    "extra", [{"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 4}], ids=lambda one: min(one)
)
@pytest.mark.parametrize("seed", [100, 101, 102])
def test_adjusted_beams_equal_transformers(judged, seed, extra):
    agree(judged, searched(random.Random(seed), prompts=1) | {"max_new_tokens": 12}, extra)


def contents(completion) -> list[tuple]:
    return [(one.token_ids, one.text, one.finish_reason) for one in completion.choices]


def logprobs_of(completion) -> list[float]:
    """Scores, and logprobs of tokens and of the likeliest ids."""
    tokens = [token for one in completion.choices for token in one.logprobs]
    return [
        *(one.score for one in completion.choices),
        *(value for token in tokens for value in (token.chosen, *(value for _, value in token.top))),
    ]


PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9], [9, 3]]
SEARCH = {"beams": 3, "n": 3, "max_new_tokens": 24, "eos": list(range(0, 90, 7)), "logprobs": 2}


@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.2, "length_penalty": 0.0}], ids=str)
@pytest.mark.parametrize("chunk", [512, 2])
def test_batched_search_equals_the_search_alone(extra, chunk):
    lm = onward.LanguageModel(tiny_model(seed=3), ByteTokenizer(), prefill_chunk=chunk)
    alone = [lm.generate(prompt, **SEARCH, **extra) for prompt in PROMPTS]
    lengths = {len(one.token_ids) for one in alone}
    assert len(lengths) > 1, "searches are meant to end at different times"
    # Rows of a cache that was given stay where they are; those of our own close ranks.
    cache = poison(lm.new_cache(len(PROMPTS) * 3, 64))
    for batch in (lm.generate(PROMPTS, **SEARCH, **extra), lm.generate(PROMPTS, cache=cache, **SEARCH, **extra)):
        for one, by_itself in zip(batch, alone, strict=True):
            assert contents(one) == contents(by_itself)
            # A score over length^0 is a sum of 24 logprobs at most; each moves by twice what logits move.
            assert logprobs_of(one) == pytest.approx(logprobs_of(by_itself), abs=24 * 2 * TOLERANCE, rel=0)


def test_a_score_is_the_sum_of_logprobs_over_the_length_penalty():
    lm = onward.LanguageModel(tiny_model(seed=3))
    for penalty in (0.0, 0.6, 2.0):
        completion = lm.generate([5, 6, 7], length_penalty=penalty, **SEARCH)
        assert [one.score for one in completion.choices] == sorted(one.score for one in completion.choices)[::-1]
        for one in completion.choices:
            total = sum(token.chosen for token in one.logprobs)
            # A sum of 24 float32 numbers below 256 in all: each step rounds by 2^-17 at most, each term by as much.
            assert one.score * len(one.token_ids) ** penalty == pytest.approx(total, abs=48 * 2**-17, rel=0)
            rescored = lm.score([5, 6, 7, *one.token_ids])
            assert [token.chosen for token in rescored.logprobs[3:]] == pytest.approx(
                [token.chosen for token in one.logprobs], abs=2 * TOLERANCE, rel=0
            )


def test_single_token_beams_are_the_likeliest_tokens():
    lm = onward.LanguageModel(tiny_model())
    found = lm.generate([5, 6, 7], beams=6, n=6, max_new_tokens=1)
    assert [one.token_ids[0] for one in found.choices] == lm.logits([5, 6, 7])[-1].topk(6).indices.tolist()


def test_a_wide_enough_beam_finds_the_likeliest_text_of_all():
    """All 16 texts of 2 of the 4 ids are kept, so the best of the 64 of 3 cannot be missed, as greedy decoding does."""
    table = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    table[0] = torch.tensor([0.0, 0.1, -9.0, -9.0])  # 1 looks best after 0
    table[1] *= 0.1  # and leads to nothing likely
    model = tiny_table_model(table)
    logprobs = table.log_softmax(-1)
    every = {}
    for a in range(4):
        for b in range(4):
            for c in range(4):
                every[a, b, c] = float(logprobs[0, a] + logprobs[a, b] + logprobs[b, c])
    best = sorted(every, key=every.get, reverse=True)
    found = onward.LanguageModel(model).generate([0], beams=16, n=16, max_new_tokens=3, length_penalty=0.0)
    assert [tuple(one.token_ids) for one in found.choices] == best[:16]
    assert onward.LanguageModel(model).generate([0], max_new_tokens=3, temperature=0).token_ids != list(best[0])


def tiny_table_model(table: torch.Tensor) -> onward.Model:
    """The next id depends on the last one alone; the cache is there to be counted."""

    def forward(tokens, offsets, cache, params):
        return params[tokens.long()], cache

    def new_cache(batch: int, max_len: int) -> onward.KVCache:
        return onward.KVCache.new(
            num_layers=1,
            batch=batch,
            num_kv_heads=1,
            max_len=max_len,
            head_dim=1,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

    return onward.Model(forward, table, new_cache, vocab_size=len(table))


def test_fewer_texts_than_beams_give_fewer_choices():
    model = tiny_table_model(torch.zeros(2, 2))
    found = onward.LanguageModel(model).generate([0], beams=8, n=8, max_new_tokens=2)
    assert sorted(one.token_ids for one in found.choices) == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert len({one.score for one in found.choices}) == 1


# ── ends ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def lm() -> onward.LanguageModel:
    return onward.LanguageModel(tiny_model(seed=5), ByteTokenizer())


def test_a_stop_string_ends_a_beam_like_any_text(lm):
    free = lm.generate("abc", beams=3, max_new_tokens=12, length_penalty=0.0)
    letter = next(char for char in free.text if char.isascii())
    found = lm.generate("abc", beams=3, n=3, max_new_tokens=12, length_penalty=0.0, stop=letter)
    assert all(letter not in one.text for one in found.choices)
    ended = [one for one in found.choices if one.finish_reason == "stop"]
    assert ended
    assert all(letter in lm.decode(one.token_ids) for one in ended)


def test_a_predicate_ends_beams(lm):
    found = lm.generate("abc", beams=3, n=3, max_new_tokens=12, stop_when=lambda ids, text: len(ids) == 5)
    assert [(len(one.token_ids), one.finish_reason) for one in found.choices] == [(5, "stop")] * 3


def test_time_and_cancel_end_a_search_with_the_best_so_far(lm):
    cancel = threading.Event()
    cancel.set()
    found = lm.generate("abc", beams=3, max_new_tokens=12, cancel=cancel)
    assert (len(found.token_ids), found.finish_reason) == (1, "cancelled")
    found = lm.generate(["abc", "d"], beams=3, max_new_tokens=12, time_limit=1e-9)
    assert [(len(one.token_ids), one.finish_reason) for one in found] == [(1, "time")] * 2


def test_beams_of_zero_tokens_are_empty(lm):
    found = lm.generate(["abc", "d"], beams=3, n=2, max_new_tokens=0)
    assert [(one.text, one.token_ids, one.finish_reason, one.score) for one in found] == [("", [], "length", None)] * 2


# ── what contradicts ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.5}, "does not sample: leave out temperature"),
        ({"seed": 1}, "leave out seed"),
        ({"top_k": 3, "top_p": 0.5}, "leave out top_k, top_p"),
        ({"n": 3}, "n is 3, but 2 beams find 2 texts"),
        ({"beams": 0}, "beams must be a whole number of 1 or more; got 0"),
        ({"length_penalty": float("nan")}, r"length_penalty must be a number in \[-50, 50\]; got nan"),
        ({"length_penalty": 51}, r"length_penalty must be a number in \[-50, 50\]; got 51"),
        ({"early_stopping": "always"}, "early_stopping must be True, False or \"never\"; got 'always'"),
        ({"beams": 1, "early_stopping": True}, "early_stopping has no effect without a beam search"),
    ],
    ids=str,
)
def test_contradictions_are_refused(lm, options, message):
    with pytest.raises(RequestError, match=message):
        lm.generate("abc", **({"beams": 2} | options))


def test_a_checkpoint_with_sampling_defaults_still_searches():
    defaults = onward.GenerateOptions(temperature=0.7, top_p=0.8, max_new_tokens=4)
    sampling = onward.LanguageModel(tiny_model(seed=5), ByteTokenizer(), defaults=defaults)
    plain = onward.LanguageModel(tiny_model(seed=5), ByteTokenizer())
    assert contents(sampling.generate("a", beams=2)) == contents(plain.generate("a", beams=2, max_new_tokens=4))


def test_beams_are_not_streamed(lm):
    with pytest.raises(RequestError, match="use generate for n or beams above 1"):
        lm.stream("abc", beams=2)


def with_plain_cache(model: onward.Model, pack, unpack) -> onward.Model:
    """The model over another container of the same tensors, which knows nothing of rows."""

    def forward(tokens, offsets, cache, params):
        logits, new_cache = model.forward(tokens, offsets, unpack(cache), params)
        return logits, pack(new_cache)

    return dataclasses.replace(
        model,
        forward=forward,
        new_cache=lambda batch, max_len: pack(model.new_cache(batch, max_len)),
        compiles=False,
        new_blocks=None,
    )


PLAIN_CACHES = {
    "a dict of lists": (
        lambda cache: {"keys": list(cache.keys), "values": list(cache.values)},
        lambda cache: onward.KVCache(tuple(cache["keys"]), tuple(cache["values"])),
    ),
    "rows in the second dimension": (
        lambda cache: [tensor.transpose(0, 1) for tensor in (*cache.keys, *cache.values)],
        lambda cache: onward.KVCache(
            tuple(tensor.transpose(0, 1) for tensor in cache[: len(cache) // 2]),
            tuple(tensor.transpose(0, 1) for tensor in cache[len(cache) // 2 :]),
        ),
    ),
}


@pytest.mark.parametrize("container", PLAIN_CACHES)
@pytest.mark.parametrize("options", [{"beams": 3, "n": 3}, {"n": 3, "temperature": 1.0, "seed": 5}], ids=str)
def test_plain_pytree_caches_give_the_same_beams_and_samples(container, options):
    model = tiny_model(seed=5)
    plain = with_plain_cache(model, *PLAIN_CACHES[container])
    prompts = [[5, 6, 7, 8], [9]]
    expected = onward.LanguageModel(model).generate(prompts, max_new_tokens=10, **options)
    got = onward.LanguageModel(plain).generate(prompts, max_new_tokens=10, **options)
    assert [contents(one) for one in got] == [contents(one) for one in expected]


def test_a_model_without_a_cache_has_beams():
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    bare = onward.Model(lambda tokens, offsets, cache, params: (params[tokens.long()], cache), table, empty_cache, 6)
    expected = onward.LanguageModel(tiny_table_model(table)).generate([0], beams=3, n=3, max_new_tokens=5)
    got = onward.LanguageModel(bare).generate([0], beams=3, n=3, max_new_tokens=5)
    assert contents(got) == contents(expected)


def empty_cache(batch: int, max_len: int) -> tuple[()]:
    return ()


@pytest.mark.parametrize(
    "new_cache",
    [
        lambda batch, max_len: torch.zeros(6, max_len),  # rows or not, who knows
        lambda batch, max_len: torch.zeros(batch * 2, max_len),  # rows and heads in one
        lambda batch, max_len: {"keys": torch.zeros(batch, max_len), "length": 0},
        lambda batch, max_len: object(),
    ],
    ids=["no rows", "rows with heads", "a number", "an object"],
)
def test_a_cache_whose_rows_cannot_be_copied_has_no_beams(new_cache):
    forward, table = lambda tokens, offsets, cache, params: (params[tokens.long()], cache), torch.zeros(6, 6)
    lm = onward.LanguageModel(onward.Model(forward, table, new_cache, vocab_size=6), compile="eager")
    with pytest.raises(RequestError, match="beams need a cache whose rows can be copied"):
        lm.generate([1], beams=2)


def test_nonfinite_logits_are_an_error():
    model = tiny_table_model(torch.full((4, 4), float("nan")))
    with pytest.raises(OnwardError, match="NaN or infinite"):
        onward.LanguageModel(model).generate([0], beams=2)
