"""The accept/resample rule draws from the target's own distribution; what both verifiers do with bad logits."""

import pytest
import torch
from drafted import CPU, Guess, decode, fixed, sequences_of, slots_over, texts

from chi_square import LEVEL, p_value
from onward.decoding import DecodeStep, SelectChooser
from onward.errors import OnwardError, RequestError
from onward.models import Model
from onward.sampling import Sampler, SamplingParams, greedy
from onward.speculation import Draft, ModelDrafter, Speculator
from onward.speculation.step import speculation_of
from onward.speculation.verify import accept_or_resample
from onward.testing import scripted_model

DRAWS = 200_000
V = 5


def test_an_id_is_accepted_or_resampled_to_the_targets_distribution():
    """Whatever it was drawn from: near p, far from it, on ids that p does not have, or one certain id."""
    p = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0], dtype=torch.float64)
    positions, keys = torch.arange(DRAWS), torch.full((DRAWS,), 7)
    generator = torch.Generator().manual_seed(1)
    for q in ([0.35, 0.3, 0.25, 0.05, 0.05], [0.0, 0.0, 0.1, 0.4, 0.5], [0.4, 0.3, 0.2, 0.1, 0.0], [0, 0, 0, 1.0, 0]):
        drawn_from = torch.tensor(q, dtype=torch.float64)
        drafted = torch.multinomial(drawn_from, DRAWS, True, generator=generator)
        ids = accept_or_resample(p.expand(DRAWS, -1), drawn_from.expand(DRAWS, -1), drafted, keys, positions)
        assert p_value(torch.bincount(ids, minlength=V), p) > LEVEL
        # Two draws of the same (p, q) are equal with probability sum(min(p, q)): no more is thrown away than must be.
        kept = float((ids == drafted).double().mean())
        assert abs(kept - float(torch.minimum(p, drawn_from).sum())) < 5 * (0.25 / DRAWS) ** 0.5


def test_where_nothing_was_drafted_the_id_is_drawn_from_the_target():
    p = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64).expand(DRAWS, -1)
    nothing = torch.full((DRAWS,), -1)
    ids = accept_or_resample(
        p, torch.zeros_like(p), nothing, torch.zeros(DRAWS, dtype=torch.int64), torch.arange(DRAWS)
    )
    assert p_value(torch.bincount(ids, minlength=4), p[0]) > LEVEL


# ── whole texts: a Markov chain, so that every step is a draw from a known distribution ───────────────────────

NEW = 26


def chain(seed):
    """A model whose logits depend on the last id alone."""
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * 1.5
    return Model(
        forward=lambda tokens, offsets, cache, params: (params[tokens.long()], cache),
        params=table,
        new_cache=lambda batch, max_len: torch.zeros(batch, max_len),
        vocab_size=V,
    )


class Distribution:
    """Draws by torch's generator from one distribution, and says so."""

    def start(self, request):
        assert request.probabilities
        self.q = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0], dtype=torch.float64)
        self.generator = torch.Generator().manual_seed(3)
        return self

    def propose(self, rows):
        drawn = torch.multinomial(self.q, 3 * len(rows), True, generator=self.generator).view(len(rows), 3).tolist()
        return [Draft(ids[: row.wanted], self.q.expand(row.wanted, -1)) for ids, row in zip(drawn, rows, strict=True)]


@pytest.mark.parametrize(
    ("kind", "count", "options"),
    [
        ("model", 4000, {"temperature": 0.7, "top_k": 3}),
        ("model", 1500, {}),
        ("distribution", 1500, {"temperature": 1.5, "top_p": 0.9}),
        ("certain", 1500, {"temperature": 1.3}),
    ],
)
def test_texts_of_the_rejection_rule_follow_the_targets_distribution(kind, count, options):
    """count texts of 26 ids: 104,000 draws, and 39,000 of other drafters."""
    target = chain(1)
    likeliest = target.params.argmax(-1).tolist()
    drafter = {
        "model": lambda: ModelDrafter(chain(2), "eager"),
        "distribution": Distribution,
        "certain": lambda: Guess(lambda row: [likeliest[row.ids()[-1]], 1, 3][: row.wanted]),
    }[kind]()
    params = [SamplingParams(**{"temperature": 1.0} | options, seed=seed) for seed in range(count)]
    sequences = sequences_of([[0]] * count, [NEW] * count, params)
    decode(target, sequences, speculator=fixed(drafter, 3, "rejection"))
    ids = torch.tensor([[0, *sequence.token_ids] for sequence in sequences])
    sampler = Sampler([params[0]] * V)
    expected = sampler.scores(target.params).to(torch.float64).softmax(-1)
    for before in range(V):
        following = ids[:, 1:][ids[:, :-1] == before]
        assert p_value(torch.bincount(following, minlength=V), expected[before]) > LEVEL
    counts = [speculation_of(sequence) for sequence in sequences]
    assert 0.1 < sum(each.accepted for each in counts) / sum(each.drafted for each in counts) < 0.9


# ── both, by hand ─────────────────────────────────────────────────────────────────────────────────────────────


def follow(tokens):
    return torch.randn(V, generator=torch.Generator().manual_seed(sum(tokens) * 7 + len(tokens)))


def test_the_rejection_rule_is_reproducible_and_knows_histories():
    model = scripted_model(follow, vocab_size=V)
    params = [SamplingParams(temperature=1.0, seed=seed, repetition_penalty=1.4) for seed in (1, 2)]
    drafter = ModelDrafter(scripted_model(lambda tokens: follow(tokens[1:]), vocab_size=V), "eager")
    first, again = (texts(model, [[1], [2, 3]], [20, 20], params, speculator=Speculator(drafter, verifier="rejection"))
                    for _ in range(2))  # fmt: skip
    assert first == again


def test_greedy_rows_are_plain_under_the_rejection_rule():
    """A greedy row's distribution is its one id's, not the softmax of its logits."""
    model = scripted_model(follow, vocab_size=V)
    params = [SamplingParams(), SamplingParams(repetition_penalty=1.3, min_p=0.9)]
    plain = texts(model, [[1], [2]], [15, 15], params)
    for drafter in (ModelDrafter(scripted_model(follow, vocab_size=V), "eager"), Guess(lambda row: [0, 1])):
        assert texts(model, [[1], [2]], [15, 15], params, speculator=fixed(drafter, 3, "rejection")) == plain


def test_a_draft_model_of_the_same_weights_is_always_accepted_by_the_rejection_rule():
    model = scripted_model(follow, vocab_size=V)
    sequences = sequences_of([[1]], [17], [SamplingParams(temperature=0.9, seed=4)])
    decode(model, sequences, speculator=fixed(ModelDrafter(model, "eager"), 3, "rejection"))
    assert speculation_of(sequences[0]).acceptance == 1


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_logits_that_are_nan_are_an_error_where_they_are_reached_and_nowhere_else(verifier):
    def script(tokens):
        return torch.full((V,), float("nan")) if tokens[-1] == 3 else torch.eye(V)[(tokens[-1] + 1) % V] * 9

    model = scripted_model(script, vocab_size=V)
    right = fixed(Guess(lambda row: [1, 2, 3, 4][: row.wanted]), 4, verifier)
    sequences = sequences_of([[0]], [10], [SamplingParams()], eos=frozenset({3}))
    decode(model, sequences, speculator=right)
    assert sequences[0].token_ids == [1, 2, 3]
    with pytest.raises(OnwardError, match="NaN or infinite"):
        decode(model, sequences_of([[0]], [10], [SamplingParams()]), speculator=right)


def test_what_a_speculator_refuses():
    with pytest.raises(RequestError, match="verifier must be one of coupled, rejection; got 'typical'"):
        Speculator(Guess(list), verifier="typical")
    with pytest.raises(RequestError, match="length must be a whole number of 1 or more; got 0"):
        Speculator(Guess(list), length=0)
    model, chooser = chain(1), SelectChooser(lambda logits, positions: greedy(logits))
    slots = slots_over(model, 1, 8)
    plain = DecodeStep(model, slots, chooser, CPU)
    with pytest.raises(RequestError, match="needs a Sampler"):
        Speculator(Guess(list), verifier="rejection").step(plain, model, slots, chooser, CPU)
