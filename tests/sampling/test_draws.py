"""Draws follow the right distribution, and depend only on seed, position and logits."""

import pytest
import torch

from chi_square import LEVEL, p_value
from onward import Sampler, SamplingParams, greedy, sample

DRAWS = 200_000
# With ties, some rare ids and an impossible one.
LOGITS = torch.tensor([2.0, 1.0, 1.0, 0.5, 0.0, -0.5, -1.0, 2.0, -1.5, -2.0, float("-inf")])


def nucleus(order: torch.Tensor, probs: torch.Tensor, mass: float) -> torch.Tensor:
    """The first ids by `order` whose probabilities reach `mass`, and those that tie with the last."""
    admitted, total = torch.zeros_like(probs, dtype=torch.bool), 0.0
    for place in order.argsort().tolist():
        if total >= mass:
            break
        total += float(probs[place])
        admitted |= order <= order[place] + 1e-9
    return admitted


def allowed(
    temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, xtc_probability=0.0, xtc_threshold=0.1,
    logits=LOGITS,
) -> torch.Tensor:  # fmt: skip
    """The requested distribution, computed with sorted lists in float64, without the code under test."""
    probs = (logits.to(torch.float64) / temperature).softmax(-1)
    if top_k:
        probs = torch.where(probs >= sorted(probs.tolist())[-top_k], probs, 0.0)
    probs = probs / probs.sum()
    if top_p < 1:
        probs = torch.where(nucleus(-probs, probs, top_p), probs, 0.0)
    probs = torch.where(probs >= min_p * probs.max(), probs, 0.0)
    probs = probs / probs.sum()
    if typical_p < 1:
        surprise = -probs.log()
        entropy = torch.special.entr(probs).sum()
        probs = torch.where(nucleus((surprise - entropy).abs(), probs, typical_p), probs, 0.0)
        probs = probs / probs.sum()
    top = probs >= xtc_threshold
    without = torch.where(top & (probs > probs[top].min() + 1e-9), 0.0, probs) if top.any() else probs
    return xtc_probability * without / without.sum() + (1 - xtc_probability) * probs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"top_k": 4},
        {"top_p": 0.85},
        {"min_p": 0.2},
        {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
        {"typical_p": 0.6},
        {"temperature": 0.7, "typical_p": 0.8, "top_k": 6},
        {"xtc_probability": 0.3, "xtc_threshold": 0.12},
        {"xtc_probability": 1.0, "xtc_threshold": 0.05, "temperature": 1.4, "top_p": 0.97},
    ],
    ids=str,
)
@pytest.mark.stride(3)
def test_draws_at_many_positions_follow_the_filtered_softmax(options):
    ids = sample(LOGITS.expand(DRAWS, -1), **options, seed=5, positions=torch.arange(DRAWS))
    counts = torch.bincount(ids, minlength=len(LOGITS))
    assert p_value(counts, allowed(**options)) > LEVEL


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.5, "top_p": 0.9}, {"temperature": 0.6, "top_k": 3000, "min_p": 0.01}], ids=str
)
def test_draws_from_many_ids_follow_the_filtered_softmax(options):
    """Ids that the kernel looks at only where their noise is large: their probabilities count too, by ranks."""
    logits = torch.randn(4096, generator=torch.Generator().manual_seed(7)) * 2.0
    ids = sample(logits.expand(DRAWS // 2, -1), **options, seed=9, positions=torch.arange(DRAWS // 2))
    probs = allowed(**options, logits=logits)
    order = probs.argsort(descending=True)
    # Cells of 1/100 of the probability each, or one id.
    cell = ((probs[order].cumsum(0) - probs[order]) * 100).to(torch.int64).clamp(max=99)
    of_id = torch.empty_like(cell).scatter(0, order, cell)
    expected = torch.zeros(100, dtype=torch.float64).index_add(0, of_id, probs)
    assert not (probs[ids] == 0).any()
    assert p_value(torch.bincount(of_id[ids], minlength=100), expected) > LEVEL


def test_draws_under_many_seeds_follow_the_softmax():
    rows = [SamplingParams(temperature=1.0, seed=seed * 2**40) for seed in range(20_000)]
    ids = Sampler(rows)(LOGITS.expand(len(rows), -1), torch.full((len(rows),), 17))
    counts = torch.bincount(ids, minlength=len(LOGITS))
    assert p_value(counts, allowed()) > LEVEL


def test_draws_at_neighboring_positions_are_independent():
    ids = sample(LOGITS.expand(DRAWS, -1), seed=6, positions=torch.arange(DRAWS)).view(-1, 2)
    common = (ids < 8).all(-1)  # pairs of rare ids are too few to count
    counts = torch.bincount(ids[common, 0] * 8 + ids[common, 1], minlength=64)
    probs = allowed()[:8]
    assert p_value(counts, torch.outer(probs, probs).flatten()) > LEVEL


def test_the_test_detects_a_wrong_temperature():
    ids = sample(LOGITS.expand(DRAWS, -1), temperature=1.05, seed=5, positions=torch.arange(DRAWS))
    assert p_value(torch.bincount(ids, minlength=len(LOGITS)), allowed()) < LEVEL


ROWS = [
    SamplingParams(temperature=0.0, seed=1),
    SamplingParams(temperature=1.0, seed=2),
    SamplingParams(temperature=1.0, seed=2, top_k=3),
    SamplingParams(temperature=0.7, seed=2**64 - 1, top_p=0.5),
    SamplingParams(temperature=2.0, seed=2**63, top_p=0.99, min_p=0.01),
    SamplingParams(temperature=1e-3, seed=6, min_p=0.3),
    SamplingParams(temperature=0.9, seed=7, top_k=40, top_p=0.9),
    SamplingParams(temperature=0.0, seed=8, top_k=2, top_p=0.1, min_p=0.9),
]


@pytest.fixture(scope="module", params=[5, 3000])
def logits(request) -> torch.Tensor:
    """From peaked to so flat that a nucleus holds most of the vocabulary."""
    scale = torch.linspace(6.0, 0.1, len(ROWS)).unsqueeze(1)
    return torch.randn(len(ROWS), request.param, generator=torch.Generator().manual_seed(1)) * scale


def test_batched_draws_with_different_parameters_equal_each_alone(logits):
    for first in range(0, 400, 8):
        positions = torch.arange(first, first + 8, dtype=torch.int32)
        batch = Sampler(ROWS)(logits, positions)
        alone = [Sampler([row])(logits[i : i + 1], positions[i : i + 1])[0] for i, row in enumerate(ROWS)]
        assert batch.tolist() == [int(token) for token in alone]


def test_a_row_does_not_depend_on_the_logits_of_its_neighbors(logits):
    positions = torch.arange(len(ROWS))
    before = Sampler(ROWS)(logits, positions)
    for changed in range(len(ROWS)):
        others = logits.clone()
        others[changed] = -others[changed]
        after = Sampler(ROWS)(others, positions)
        assert [i for i in range(len(ROWS)) if after[i] != before[i]] in ([], [changed])


def test_greedy_rows_take_the_most_likely_id_despite_filters(logits):
    ids = Sampler(ROWS)(logits, torch.arange(len(ROWS)))
    assert ids[0] == logits[0].argmax()
    assert ids[7] == logits[7].argmax()


def test_greedy_takes_the_lowest_of_tied_ids():
    logits = torch.zeros(2, 5000)
    logits[0, [4000, 17, 350]] = 1.0
    assert greedy(logits).tolist() == [17, 0]
    assert sample(logits, temperature=0).tolist() == [17, 0]


def test_a_tiny_top_p_admits_only_the_most_likely_id():
    logits = torch.randn(1000, 50, generator=torch.Generator().manual_seed(2))
    assert torch.equal(sample(logits, temperature=3.0, top_p=1e-9, seed=1), logits.argmax(-1))
    assert torch.equal(sample(logits, temperature=3.0, top_p=0.0, seed=1), logits.argmax(-1))
    assert torch.equal(sample(logits, temperature=3.0, top_k=1, seed=1), logits.argmax(-1))
    assert torch.equal(sample(logits, temperature=3.0, min_p=1.0, seed=1), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-38, 1e-44, 1e-60])
def test_a_temperature_near_zero_is_greedy(temperature):
    logits = 20 * torch.randn(200, 50, generator=torch.Generator().manual_seed(3))
    assert torch.equal(sample(logits, temperature=temperature, seed=1, positions=torch.arange(200)), logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_dtypes_are_sampled_in_float32(dtype):
    logits = torch.randn(5000, 97, generator=torch.Generator().manual_seed(4)).to(dtype)
    options = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 3, "positions": torch.arange(5000)}
    assert torch.equal(sample(logits, **options), sample(logits.to(torch.float32), **options))


def test_a_seed_and_a_position_determine_the_draw():
    logits = torch.zeros(1, 1000)
    first = sample(logits, seed=1, positions=3)
    assert torch.equal(sample(logits, seed=1, positions=3), first)
    assert not torch.equal(sample(logits, seed=1, positions=4), first)
    assert not torch.equal(sample(logits, seed=2, positions=3), first)


def test_all_64_bits_of_a_seed_matter():
    logits = torch.zeros(1, 10**6)
    seeds = [7, 7 + 2**31, 7 + 2**32, 7 + 2**62, 7 + 2**63, 2**64 - 1]
    assert len({int(sample(logits, seed=seed)) for seed in seeds}) == len(seeds)


def test_torch_manual_seed_determines_unseeded_draws():
    logits = torch.zeros(50, 1000)
    torch.manual_seed(1)
    first, second = sample(logits), sample(logits)
    torch.manual_seed(1)
    assert torch.equal(sample(logits), first)
    assert not torch.equal(second, first)
    assert first.unique().numel() > 40, "each row without a seed draws one of its own"


def test_explicit_seed_leaves_the_torch_generator_alone():
    torch.manual_seed(1)
    want = torch.rand(3)
    torch.manual_seed(1)
    sample(torch.zeros(4, 9), seed=3)
    sample(torch.zeros(4, 9), temperature=0, seed=3)
    assert torch.equal(torch.rand(3), want)


def test_a_samplers_seeds_reproduce_its_draws():
    unseeded = Sampler([SamplingParams(temperature=1.0)] * 3)
    again = Sampler([SamplingParams(temperature=1.0, seed=seed) for seed in unseeded.seeds])
    logits, positions = torch.zeros(3, 1000), torch.arange(3)
    assert torch.equal(again(logits, positions), unseeded(logits, positions))
