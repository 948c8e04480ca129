"""Every option in one batch: each row equals the row alone; several positions of a row equal single positions."""

import math

import pytest
import torch

from onward import Sampler, SamplingParams, ops, sample
from onward.errors import RequestError
from onward.sampling import History, noise

VOCAB = 40
ROWS = [
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=1.0),
    SamplingParams(seed=3, temperature=0.9, top_p=0.8, repetition_penalty=1.3),
    SamplingParams(seed=4, repetition_penalty=2.0),
    SamplingParams(seed=5, temperature=1.0, presence_penalty=1.0, frequency_penalty=-0.5),
    SamplingParams(seed=6, temperature=2.0, logit_bias={3: 5.0, 4: -math.inf}),
    SamplingParams(seed=7, temperature=1.0, dry_multiplier=3.0, dry_allowed_length=1, dry_sequence_breakers=(0,)),
    SamplingParams(seed=8, temperature=1.5, xtc_probability=0.5, xtc_threshold=0.02),
    SamplingParams(seed=9, temperature=1.0, typical_p=0.5, top_k=20),
    SamplingParams(seed=10, temperature=1.0, no_repeat_ngram_size=2),
    SamplingParams(seed=11, temperature=1.0, bad_words=[[5], [6, 7]]),
    SamplingParams(seed=12, temperature=0.0, min_new_tokens=6, eos=(1, 2), frequency_penalty=4.0),
    SamplingParams(seed=13, temperature=0.0, typical_p=0.3),
]
PROMPTS = [[(3 * row + i * i) % VOCAB for i in range(row + 1)] for row in range(len(ROWS))]


@pytest.fixture(autouse=True, params=["native", "definition"])
def form(request):
    before = ops.choice()
    ops.choose(request.param)
    yield
    ops.choose("definition" if before.form == "definition" else before.isa)


def logits_at(step: int, rows: int = len(ROWS)) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(step))


def histories() -> list[History]:
    return [History(prompt) for prompt in PROMPTS]


def test_batched_rows_draw_the_same_as_alone():
    together, apart = histories(), histories()
    batch = Sampler(ROWS)
    alone = [Sampler([row]) for row in ROWS]
    seen = set()
    for step in range(30):
        logits, positions = logits_at(step), torch.tensor([len(history) for history in together])
        drawn = batch(logits, positions, together).tolist()
        for row, history in enumerate(apart):
            one = alone[row](logits[row : row + 1], positions[row : row + 1], [history])
            assert int(one) == drawn[row]
            together[row].append(drawn[row])
            history.append(drawn[row])
        seen.update(drawn)
    assert len(seen) > VOCAB / 2


def test_drafted_positions_equal_one_after_the_other():
    """Also with drafts of different lengths, and with draws that differ from them."""
    batch, rows = Sampler(ROWS), histories()
    drafts = [[(row + 7 * place) % VOCAB for place in range(row % 5)] for row in range(len(ROWS))]
    logits = torch.stack([logits_at(place) for place in range(5)], 1)
    positions = torch.tensor([[len(history) + place for place in range(5)] for history in rows])
    together = batch(logits, positions, rows, drafts)
    assert together.shape == (len(ROWS), 5)
    scores = batch.scores(logits, positions, rows, drafts)
    for place in range(5):
        for history, draft in zip(rows, drafts, strict=True):
            history.truncate(0)
            history.extend(draft[:place])
        assert torch.equal(batch(logits[:, place], positions[:, place], rows), together[:, place])
        assert torch.equal(batch.scores(logits[:, place], positions[:, place], rows), scores[:, place])


def test_scores_are_those_of_the_draws():
    sampler = Sampler(ROWS)
    counts = torch.zeros(len(ROWS), VOCAB)
    positions = torch.full((len(ROWS),), 17)
    scores = sampler.scores(logits_at(0), positions, histories())
    assert scores.dtype == torch.float32
    for seed in range(50):
        again = Sampler([row.replace(seed=seed) for row in ROWS])
        # The coin of XTC depends on the seed too, so its row has other scores.
        possible = again.scores(logits_at(0), positions, histories()).isfinite()
        drawn = again(logits_at(0), positions, histories())
        counts[torch.arange(len(ROWS)), drawn] += 1
        greedy = torch.tensor([row.temperature == 0 for row in ROWS])
        assert (possible[torch.arange(len(ROWS)), drawn] | greedy).all()
    assert (counts[:, 5] == 0)[10]
    assert counts[5, 4] == 0


def test_remaining_rows_draw_the_same_as_among_the_others():
    sampler = Sampler([row.replace(seed=None) for row in ROWS])
    rows, left = histories(), [9, 2, 7]
    positions = torch.tensor([len(history) for history in rows])
    few = sampler.take(left)
    assert few.seeds == tuple(sampler.seeds[row] for row in left)
    drawn = few(logits_at(1)[left], positions[left], [rows[row] for row in left])
    assert torch.equal(drawn, sampler(logits_at(1), positions, rows)[left])


def test_a_call_changes_no_history_and_no_logits():
    logits, rows = logits_at(3), histories()
    before = logits.clone()
    Sampler(ROWS)(logits.unsqueeze(1).expand(-1, 3, -1), torch.zeros(len(ROWS), 3), rows, [[1, 2]] * len(ROWS))
    assert torch.equal(logits, before)
    assert [history.ids.tolist() for history in rows] == PROMPTS


def test_filters_change_nothing_for_a_greedy_row_in_a_batch():
    row = SamplingParams(temperature=0.0, typical_p=0.01, top_p=0.01)
    other = SamplingParams(temperature=1.0, typical_p=0.5, seed=1)
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(2, -1)
    assert Sampler([row, other])(logits, torch.zeros(2))[0] == 0
    assert Sampler([row])(logits[:1], torch.zeros(1))[0] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"dry_multiplier": 1.0},
        {"no_repeat_ngram_size": 3},
        {"bad_words": [[1]]},
        {"min_new_tokens": 1, "eos": 2},
    ],
    ids=str,
)
def test_options_that_look_back_need_histories(options):
    sampler = Sampler([SamplingParams(**options)])
    assert sampler.needs_history
    with pytest.raises(RequestError, match="histories"):
        sampler(torch.zeros(1, 5), torch.zeros(1))
    with pytest.raises(RequestError, match="1 rows and 2 histories"):
        sampler(torch.zeros(1, 5), torch.zeros(1), [History([1]), History([1])])
    assert sampler(torch.zeros(1, 5), torch.zeros(1), [History([1])]).shape == (1,)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"logit_bias": {5: 1.0}}, "names id 5, but the vocabulary ends at 4"),
        ({"bad_words": [[5, 1]]}, "names id 5"),
        ({"min_new_tokens": 1, "eos": [1, 9]}, "names id 9"),
        ({"logit_bias": dict.fromkeys(range(5), -math.inf)}, "ban every id"),
        ({"bad_words": [[0], [1], [2]], "logit_bias": {3: -math.inf}, "min_new_tokens": 1, "eos": 4}, "ban every id"),
    ],
    ids=str,
)
def test_exhaustive_bans_and_unknown_ids_are_refused(options, says):
    sampler = Sampler([SamplingParams(**options)])
    with pytest.raises(RequestError, match=says):
        sampler(torch.zeros(1, 5), torch.zeros(1), [History([1])])


def test_bad_words_as_text_need_a_tokenizer():
    with pytest.raises(RequestError, match="'no'"):
        Sampler([SamplingParams(bad_words=["no"])])


def test_rows_and_logits_must_agree():
    with pytest.raises(RequestError, match=r"2 rows takes logits \[2, V\]"):
        Sampler([SamplingParams()] * 2)(torch.zeros(3, 5), torch.zeros(3))


def test_xtc_scores_need_positions():
    with pytest.raises(RequestError, match="positions"):
        Sampler([SamplingParams(temperature=1.0, xtc_probability=1.0)]).scores(torch.zeros(1, 5))


def test_sample_supports_the_options_without_history():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(50, -1)
    at = torch.arange(50)
    assert set(sample(logits, typical_p=0.31, seed=1, positions=at).tolist()) == {1, 2}
    assert set(sample(logits, xtc_probability=1.0, xtc_threshold=0.05, seed=1, positions=at).tolist()) == {3}
    assert set(sample(logits, logit_bias={2: 50.0}, seed=1, positions=at).tolist()) == {2}


@pytest.mark.parametrize("rows_at_once", [0, 1, 2, 5])
def test_any_number_of_rows_at_once_gives_the_same_bits(rows_at_once, monkeypatch):
    """Of scores, probabilities and ids, also of drafts, where a sampler's row has several."""
    sampled = [row for row in ROWS if not row.no_repeat_ngram_size]
    filtered, plain = Sampler(sampled), Sampler([SamplingParams(seed=1, temperature=0.7, top_k=9, top_p=0.8)] * 6)
    draft = 2 * torch.randn(len(sampled), 3, VOCAB, generator=torch.Generator().manual_seed(1))
    at = torch.tensor([[5, 6, 7]] * len(sampled))
    prompts = [History([1, 2, 3, 1, 2]) for _ in sampled]

    def results():
        return [
            filtered(draft, at, prompts, [[4, 5]] * len(sampled)),
            filtered.scores(draft, at, prompts, [[4, 5]] * len(sampled)),
            filtered.probabilities(draft[:, 0], at[:, 0], prompts),
            plain(draft[:6, 0], at[:6, 0]),
            plain.scores(draft[:6]),
            plain.scores(draft[:6, 1]),
        ]

    whole = results()
    monkeypatch.setattr(noise, "_MOST_AT_ONCE", rows_at_once * VOCAB)
    assert all(torch.equal(one, other) for one, other in zip(whole, results(), strict=True))
