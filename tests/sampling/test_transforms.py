"""Each filter with literal probabilities; all of them compared with transformers."""

import math

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from onward import Sampler, SamplingParams
from onward.sampling.noise import coins
from onward.sampling.transforms.min_p import apply_min_p
from onward.sampling.transforms.temperature import apply_temperature
from onward.sampling.transforms.top_k import apply_top_k
from onward.sampling.transforms.top_p import apply_top_p
from onward.sampling.transforms.typical_p import apply_typical_p
from onward.sampling.transforms.xtc import apply_xtc

FOUR = [0.4, 0.3, 0.2, 0.1]
SHUFFLED = [0.1, 0.4, 0.2, 0.3]


def through(transform, probs, value) -> list[float]:
    """Probabilities in, probabilities out."""
    return transform(torch.tensor([probs]).log(), torch.tensor([value])).softmax(-1)[0].tolist()


@pytest.mark.parametrize(
    ("probs", "temperature", "want"),
    [
        (FOUR, 1.0, FOUR),
        ([0.8, 0.2], 0.5, [16 / 17, 1 / 17]),  # squares
        ([0.8, 0.2], 2.0, [2 / 3, 1 / 3]),  # roots
        ([0.25, 0.75, 0.0], 1.0, [0.25, 0.75, 0.0]),
    ],
)
def test_temperature(probs, temperature, want):
    assert through(apply_temperature, probs, temperature) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("temperature", [1e-10, 1e-30, 1e-38, 1e-44])
def test_a_temperature_near_zero_leaves_only_the_most_likely(temperature):
    assert through(apply_temperature, [0.2, 0.3, 0.5, 0.0], temperature) == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("probs", "top_k", "want"),
    [
        (FOUR, 0, FOUR),
        (FOUR, 1, [1, 0, 0, 0]),
        (SHUFFLED, 2, [0, 4 / 7, 0, 3 / 7]),
        (SHUFFLED, 3, [0, 4 / 9, 2 / 9, 3 / 9]),
        (FOUR, 4, FOUR),
        (FOUR, 99, FOUR),
        ([0.4, 0.2, 0.2, 0.2], 2, [0.4, 0.2, 0.2, 0.2]),  # ids that tie with the k-th are kept too
        ([0.5, 0.5, 0.0, 0.0], 1, [0.5, 0.5, 0.0, 0.0]),
    ],
)
def test_top_k(probs, top_k, want):
    assert through(apply_top_k, probs, top_k) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(
    ("probs", "top_p", "want"),
    [
        (FOUR, 1.0, FOUR),
        (FOUR, 0.95, FOUR),
        (SHUFFLED, 0.65, [0, 4 / 7, 0, 3 / 7]),  # 0.4 does not reach 0.65; 0.3 crosses it and is kept
        (SHUFFLED, 0.75, [0, 4 / 9, 2 / 9, 3 / 9]),
        (SHUFFLED, 0.39, [0, 1, 0, 0]),
        (SHUFFLED, 1e-9, [0, 1, 0, 0]),  # one is always admitted
        (SHUFFLED, 1e-45, [0, 1, 0, 0]),
        ([0.3, 0.3, 0.3, 0.1], 0.5, [1 / 3, 1 / 3, 1 / 3, 0]),  # two would do; the third ties with the second
        ([0.5, 0.5, 0.0, 0.0], 0.1, [0.5, 0.5, 0.0, 0.0]),
        ([0.5, 0.5, 0.0, 0.0], 0.9999, [0.5, 0.5, 0.0, 0.0]),
    ],
)
def test_top_p(probs, top_p, want):
    assert through(apply_top_p, probs, top_p) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(
    ("probs", "min_p", "want"),
    [
        (FOUR, 0.0, FOUR),
        (SHUFFLED, 0.24, SHUFFLED),
        (SHUFFLED, 0.26, [0, 4 / 9, 2 / 9, 3 / 9]),
        (SHUFFLED, 0.7, [0, 4 / 7, 0, 3 / 7]),
        (SHUFFLED, 1.0, [0, 1, 0, 0]),
        ([0.4, 0.4, 0.2, 0.0], 1.0, [0.5, 0.5, 0, 0]),
    ],
)
def test_min_p(probs, min_p, want):
    assert through(apply_min_p, probs, min_p) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(
    ("probs", "typical_p", "want"),
    [
        # Entropy 1.2799; surprises 0.916, 1.204, 1.609, 2.303 are 0.364, 0.076, 0.330, 1.023 away from it.
        (FOUR, 1.0, FOUR),
        (FOUR, 0.1, [0, 1, 0, 0]),
        (FOUR, 0.29, [0, 1, 0, 0]),
        (SHUFFLED, 0.31, [0, 0, 2 / 5, 3 / 5]),
        (SHUFFLED, 0.51, [0, 4 / 9, 2 / 9, 3 / 9]),
        (FOUR, 0.95, FOUR),
        ([0.25, 0.25, 0.25, 0.25], 0.1, [0.25] * 4),  # as typical as each other
        ([0.5, 0.5, 0.0, 0.0], 0.1, [0.5, 0.5, 0.0, 0.0]),
        ([1.0, 0.0], 0.5, [1.0, 0.0]),
    ],
)
def test_typical_p(probs, typical_p, want):
    assert through(apply_typical_p, probs, typical_p) == pytest.approx(want, rel=1e-5)


def xtc(probs, threshold, active) -> list[float]:
    return through(lambda x, t: apply_xtc(x, t, torch.tensor([active])), probs, threshold)


@pytest.mark.parametrize(
    ("probs", "threshold", "want"),
    [
        (FOUR, 0.05, [0, 0, 0, 1]),
        (SHUFFLED, 0.15, [1 / 3, 0, 2 / 3, 0]),  # of 0.4, 0.3 and 0.2 the last is kept, and what is below
        (SHUFFLED, 0.25, [0.1 / 0.6, 0, 0.2 / 0.6, 0.3 / 0.6]),
        (SHUFFLED, 0.35, SHUFFLED),  # one alone stays
        (SHUFFLED, 0.45, SHUFFLED),
        ([0.4, 0.2, 0.2, 0.2], 0.1, [0, 1 / 3, 1 / 3, 1 / 3]),  # the least probable of them tie
    ],
)
def test_xtc(probs, threshold, want):
    assert xtc(probs, threshold, True) == pytest.approx(want, rel=1e-5)
    assert xtc(probs, threshold, False) == pytest.approx(probs, rel=1e-5)


def test_the_coin_of_xtc_is_fair_and_depends_on_seed_and_position():
    positions = torch.arange(100_000)
    tossed = coins(torch.full_like(positions, 7), positions)
    # Five standard deviations of a mean of 1e5 uniform numbers.
    assert abs(tossed.mean() - 0.5) < 5 * math.sqrt(1 / 12 / 1e5)
    assert abs((tossed < 0.1).to(torch.float64).mean() - 0.1) < 5 * math.sqrt(0.09 / 1e5)
    assert torch.equal(coins(torch.tensor([7, 7]), torch.tensor([41, 9])), tossed[[41, 9]])
    assert coins(torch.tensor([8]), torch.tensor([41])) != tossed[41]


@pytest.mark.parametrize("mark", [math.nan, math.inf])
def test_filters_preserve_nonfinite_logits(mark):
    logits = torch.tensor([[1.0, mark, 0.0, -math.inf], [1.0, 2.0, 0.0, -math.inf]])
    half = torch.tensor([0.5, 0.5])
    for filtered in (
        apply_top_p(logits, half),
        apply_typical_p(logits, half),
        apply_xtc(logits, half, torch.tensor([True, True])),
    ):
        assert torch.equal(filtered[0], logits[0]) or (math.isnan(mark) and filtered[0, 1].isnan())
        assert torch.equal(filtered[0, [0, 2, 3]], logits[0, [0, 2, 3]])


def drawn_from(probs, **options) -> list[float]:
    """The distribution that a sampler with these options draws from."""
    return Sampler([SamplingParams(seed=0, **options)]).scores(torch.tensor([probs]).log()).softmax(-1)[0].tolist()


def test_filters_are_applied_in_the_documented_order():
    # Temperature 0.5 squares FOUR to 16 : 9 : 4 : 1; of these top_k keeps three, so 16/29 of the mass is the first's.
    options = {"temperature": 0.5, "top_k": 3}
    assert drawn_from(FOUR, **options) == pytest.approx([16 / 29, 9 / 29, 4 / 29, 0], rel=1e-5)
    # 16/29 = 0.552 reaches 0.54 alone, though neither 0.4 nor 16/30 = 0.533 would have.
    assert drawn_from(FOUR, **options, top_p=0.54) == [1, 0, 0, 0]
    assert drawn_from(FOUR, **options, top_p=0.56) == pytest.approx([16 / 25, 9 / 25, 0, 0], rel=1e-5)
    # 9/16 = 0.5625 of the likeliest.
    assert drawn_from(FOUR, **options, top_p=0.56, min_p=0.57) == [1, 0, 0, 0]
    assert drawn_from(FOUR, **options, min_p=0.2) == pytest.approx([16 / 29, 9 / 29, 4 / 29, 0], rel=1e-5)


def rows_of(value, rows: int) -> torch.Tensor:
    return torch.full((rows,), value)


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    """[64, 3000] without ties in a row: peaked ones, and flat ones whose nuclei hold most of the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.stack([torch.randperm(3000, generator=generator) for _ in range(64)])
    return (ranks / 3000 + 1e-6 * torch.rand(64, 3000, generator=generator)) * torch.linspace(0.5, 40, 64).unsqueeze(1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_temperature_equals_transformers(logits, temperature):
    theirs = TemperatureLogitsWarper(temperature)(None, logits).log_softmax(-1)
    ours = apply_temperature(logits, rows_of(temperature, 64)).log_softmax(-1)
    # Values of up to 40 / 0.3, rounded a few times.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=8 * 40 / temperature * 2.0**-24)


@pytest.mark.parametrize("top_k", [1, 2, 50, 2999, 3000, 9999])
def test_top_k_equals_transformers(logits, top_k):
    assert (logits.sort(-1).values.diff() > 0).all(), "ties are ours to keep"
    assert torch.equal(apply_top_k(logits, rows_of(top_k, 64)), TopKLogitsWarper(top_k)(None, logits))


@pytest.mark.parametrize("top_p", [0.01, 0.1, 0.5, 0.9, 0.999])
def test_top_p_equals_transformers(logits, top_p):
    theirs = TopPLogitsWarper(top_p)(None, logits)
    ours = apply_top_p(logits, rows_of(top_p, 64))
    # They add the smallest first, we the largest, so the two may disagree about an id before which the sum lies
    # within rounding of top_p, and no other: 3000 sums of parts that add up to 1 round by 3000 * 2^-24 at most.
    ordered, order = logits.to(torch.float64).softmax(-1).sort(-1, descending=True)
    before = torch.empty_like(ordered).scatter(-1, order, ordered.cumsum(-1) - ordered)
    disagree = ours.isfinite() != theirs.isfinite()
    assert bool(((before - top_p).abs() < 3000 * 2.0**-24)[disagree].all())
    assert torch.equal(ours[~disagree], theirs[~disagree])


@pytest.mark.parametrize("typical_p", [0.05, 0.3, 0.8, 0.99])
def test_typical_p_equals_transformers(logits, typical_p):
    theirs = TypicalLogitsWarper(typical_p)(None, logits)
    ours = apply_typical_p(logits, rows_of(typical_p, 64))
    # As for top_p; and they order by a surprise in float32, rounded at up to 40, so two ids may change places whose
    # probabilities on the far side of the entropy are as small as 3000 of them are large: allow the same sum twice.
    exact = logits.to(torch.float64).log_softmax(-1)
    distance = (-exact - (-exact * exact.exp()).sum(-1, keepdim=True)).abs()
    order = distance.argsort(-1)
    mass = exact.exp().gather(-1, order)
    before = torch.empty_like(mass).scatter(-1, order, mass.cumsum(-1) - mass)
    disagree = ours.isfinite() != theirs.isfinite()
    near = (before - typical_p).abs() < 3000 * 2.0**-24 + 2 * exact.exp().amax(-1, keepdim=True) * 40 * 2.0**-22
    assert bool(near[disagree].all())
    assert torch.equal(ours[~disagree], theirs[~disagree])


@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.5, 0.99])
def test_min_p_equals_transformers(logits, min_p):
    theirs = MinPLogitsWarper(min_p)(None, logits)
    ours = apply_min_p(logits, rows_of(min_p, 64))
    # An id exactly on the threshold may fall on either side of it.
    ratio = (logits - logits.amax(-1, keepdim=True)).to(torch.float64).exp() / min_p
    disagree = ours.isfinite() != theirs.isfinite()
    assert bool(((ratio - 1).abs() < 1e-5)[disagree].all())
    assert torch.equal(ours[~disagree], theirs[~disagree])


def test_rows_are_filtered_by_their_own_parameters(logits):
    top_k, top_p = torch.arange(64) % 5, torch.linspace(0.05, 1.0, 64)
    temperature, min_p = torch.linspace(0.1, 3.0, 64), torch.linspace(0.0, 1.0, 64)
    tossed = torch.arange(64) % 3 > 0
    for transform, values in (
        (apply_temperature, temperature),
        (apply_top_k, top_k),
        (apply_top_p, top_p),
        (apply_min_p, min_p),
        (apply_typical_p, top_p),
        (lambda x, t: apply_xtc(x, t, tossed[: len(t)]), top_p / 2),
    ):
        batch = transform(logits, values)
        alone = [transform(logits[i : i + 1], values[i : i + 1]) for i in range(64)]
        assert torch.equal(batch, torch.cat(alone)), transform.__name__
