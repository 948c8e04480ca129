"""exp and log of sampling are accurate, and have the same bits everywhere, as pinned values show."""

import hashlib
import math

import torch

from onward.sampling.noise import UNITS, gumbel_noise, logarithm, relative_probability, units


def test_relative_probabilities_are_within_two_units_in_the_last_place():
    scores = -torch.cat((torch.logspace(-12, math.log10(40), 200_000), torch.linspace(0, 40, 200_000)))
    exact = scores.to(torch.float64).exp()
    # A unit in the last place of a float32 is at most 2^-23 of it.
    assert ((relative_probability(scores).to(torch.float64) - exact).abs() <= 2 * 2.0**-23 * exact).all()


def test_relative_probabilities_at_the_ends():
    got = relative_probability(torch.tensor([0.0, -0.0, -40.0, -41.0, -1e30, float("-inf")]))
    assert got[:2].tolist() == [1.0, 1.0]
    assert (got[2:] == got[2]).all()
    assert units(got).tolist() == [UNITS, UNITS, 0, 0, 0, 0]


def test_logarithms_are_within_their_bound():
    wide = torch.logspace(-45, 10, 20_000, dtype=torch.float64)
    near_one = torch.logspace(-10, -0.6, 20_000, dtype=torch.float64)
    x = torch.cat((wide, 1 - near_one, 1 + near_one))
    exact = torch.tensor([math.log(value) for value in x.tolist()], dtype=torch.float64)
    # 4e-16 is ours; a unit in the last place, 2.3e-16, is what libm's may be off by.
    assert (logarithm(x) / exact - 1).abs().max() < 4e-16 + 2.3e-16
    assert logarithm(torch.ones(1, dtype=torch.float64)).item() == 0.0


def test_units_round_ties_to_even():
    assert units(torch.tensor([0.5, 1.5, 2.5, 3.0]) / UNITS).tolist() == [0, 2, 2, 3]


def test_the_bits_are_these_on_every_machine():
    noise = gumbel_noise(torch.tensor([2**62 + 11]), torch.tensor([123]), 1000)
    scores = relative_probability(-(torch.arange(4001) / 100))
    digest = hashlib.sha256(noise.numpy().tobytes() + scores.numpy().tobytes()).hexdigest()
    assert digest[:16] == "28b07234b9832ddd"
