"""The noise is Gumbel noise from Philox, keyed by seed, position and token id."""

import math

import pytest
import torch

from onward.sampling import gumbel_noise
from onward.sampling.noise import philox

# Known answers published with Random123 (kat_vectors, philox4x32 with 10 rounds): counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def signed(seed: int) -> torch.Tensor:
    """The 64 bits of a seed as an int64."""
    return torch.tensor([seed - 2**64 if seed >= 2**63 else seed])


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, result):
    low, high = words(key)
    got = philox(tuple(torch.tensor([word]) for word in words(counter)), signed(high << 32 | low))
    assert [int(word) for word in got] == words(result)


def test_ids_are_words_of_philox_and_positions_its_second_counter():
    noise = gumbel_noise(torch.tensor([0]), torch.tensor([0]), 4)[0]
    for got, word in zip(noise.tolist(), words(KNOWN_ANSWERS[0][2]), strict=True):
        assert got == pytest.approx(-math.log(-math.log((word + 0.5) / 2**32)), rel=1e-14)
    counter = tuple(torch.tensor([word]) for word in (2, 77, 0, 0))
    word = int(philox(counter, signed(2**64 - 5))[1])
    got = float(gumbel_noise(signed(2**64 - 5), torch.tensor([77]), 11)[0, 9])  # id 9 = 4 * 2 + 1
    assert got == pytest.approx(-math.log(-math.log((word + 0.5) / 2**32)), rel=1e-14)


def test_the_noise_of_an_id_does_not_depend_on_the_size_of_the_vocabulary():
    """So a draft and a target whose vocabularies differ by padding draw with the same noise."""
    seeds, positions = torch.tensor([3, -9]), torch.tensor([0, 41])
    assert torch.equal(gumbel_noise(seeds, positions, 5), gumbel_noise(seeds, positions, 258)[:, :5])


def test_the_noise_of_a_row_does_not_depend_on_its_neighbors():
    seeds, positions = torch.tensor([3, 8, 3]), torch.tensor([7, 7, 9], dtype=torch.int32)
    batch = gumbel_noise(seeds, positions, 33)
    for row in range(3):
        assert torch.equal(gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 33)[0], batch[row])


def test_seed_position_and_id_all_matter():
    base = gumbel_noise(torch.tensor([1]), torch.tensor([1]), 64)
    assert not (base == gumbel_noise(torch.tensor([2]), torch.tensor([1]), 64)).any()
    assert not (base == gumbel_noise(torch.tensor([1 + (1 << 32)]), torch.tensor([1]), 64)).any()
    assert not (base == gumbel_noise(torch.tensor([1]), torch.tensor([2]), 64)).any()
    assert base.unique().numel() == 64


def test_the_noise_is_gumbel_distributed():
    """Kolmogorov-Smirnov: over n draws the largest distance from the distribution function passes 2.7 / sqrt(n)
    once in a million (2 exp(-2 * 2.7^2) = 9e-7)."""
    positions = torch.arange(1000)
    noise = gumbel_noise(torch.full((1000,), 11), positions, 100).flatten().sort().values
    exact = torch.exp(-torch.exp(-noise))
    n = noise.numel()
    distance = (exact - (torch.arange(n) + 0.5) / n).abs().max() + 0.5 / n
    assert noise.isfinite().all()
    assert distance < 2.7 / math.sqrt(n)
