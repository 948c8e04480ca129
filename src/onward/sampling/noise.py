"""Counter-based noise: a function of (seed, position, token id), independent of batches and of the order of calls.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) keyed by the 64 bits of the
seed. One counter serves four neighbouring ids: counter = (id // 4, position, stream, 0), word = id % 4. Uncorrelated
streams: 0 samples tokens, 1 decides XTC.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# The most logits to compute with at once. On a CPU the temporaries of this many stay in the processor's cache, and
# malloc reuses their memory. From 2^22 on, 32 MB in 64 bits, each gets new pages from the system, which takes several
# times as long (benchmarks/results/2026-11-27-logprobs-chunks.md). Elsewhere the limit only bounds the memory.
_MOST_AT_ONCE, _MOST_ON_A_DEVICE = 2**18, 2**24

# Relative probabilities are counted in units of 2^-40: a sum over 2^22 ids fits an int64, and rounding to units
# changes the sum over 152,000 ids by at most 7e-8 of the most likely one's probability.
UNITS = 2.0**40

# Lower scores are less than half a unit.
_LOWEST = -40.0
_INVERSE_LN2 = float.fromhex("0x1.715476p+0")
# ln 2 in two parts, the first short enough that n times it is exact.
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e4p-1"), float.fromhex("0x1.7f7d1cp-20")
# e^f on |f| <= ln 2 / 2, fitted to 3e-9.
_EXP = tuple(
    float.fromhex(c)
    for c in ("0x1.6a244cp-10", "0x1.1239d4p-7", "0x1.5558f2p-5", "0x1.555492p-3", "0x1.fffffcp-2", "1", "1")
)
_SQRT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
_LN2 = float.fromhex("0x1.62e42fefa39efp-1")


def by_rows(compute: Callable[..., Tensor], logits: Tensor, *columns: Tensor) -> Tensor:
    """compute(logits [N, V], *columns [N]) -> [N, ...], a few rows at a time. A result must depend on its row alone.

    At a time there is at least a row for each thread, because torch sorts rows in parallel.
    """
    most = _MOST_AT_ONCE if logits.device.type == "cpu" else _MOST_ON_A_DEVICE
    threads = torch.get_num_threads()
    size = max(1, most // max(1, logits.shape[1]) // threads) * threads
    if len(logits) <= size:
        return compute(logits, *columns)
    parts = zip(*(torch.split(rows, size) for rows in (logits, *columns)), strict=True)
    return torch.cat([compute(*part) for part in parts])


def relative_probability(scores: Tensor) -> Tensor:
    """e^scores for float32 scores of at most 0, within 2 units in the last place; scores below -40 count as -40."""
    scores = scores.clamp(min=_LOWEST)
    n = (scores * _INVERSE_LN2).round_()
    f = scores.sub_(n * _LN2_HIGH).sub_(n * _LN2_LOW)  # in place: new memory takes longer than the arithmetic
    total = torch.full_like(f, _EXP[0])
    for coefficient in _EXP[1:]:
        total.mul_(f).add_(coefficient)  # two roundings: a fused multiply-add has one
    exponents = n.nan_to_num_(0.0).to(torch.int32).add_(127)  # 2^n by its bits
    return total.mul_(exponents.bitwise_left_shift_(23).view(torch.float32))


def units(probabilities: Tensor) -> Tensor:
    """float in 0 … 1 -> int64: whole units of 2^-40, ties to even."""
    return (probabilities.to(torch.float64) * UNITS).round().to(torch.int64)


def logarithm(x: Tensor) -> Tensor:
    """The natural logarithm of positive normal float64, with a relative error below 4e-16."""
    mantissa, exponent = torch.frexp(x)
    small = mantissa < _SQRT_HALF
    mantissa = torch.where(small, mantissa + mantissa, mantissa)
    exponent = exponent - small.to(exponent.dtype)
    # log m = 2 artanh r with r = (m - 1) / (m + 1), by its series.
    f = mantissa - 1.0
    r = f / (f + 2.0)
    square = r * r
    total = torch.full_like(r, 1 / 19)
    for k in range(17, 1, -2):
        total = total * square
        total = total + 1.0 / k
    twice = r + r
    return (twice + twice * (total * square)) + exponent.to(torch.float64) * _LN2


_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for every id of every row.

    Args:
        seeds: int64 [B]; its 64 bits are the key (seeds of 2^63 or more are negative).
        positions: int [B], the absolute position of the token to sample.
        vocab_size: V.

    Returns:
        float64 [B, V]: -log(-log(u)), with u uniform on the open interval (0, 1) in steps of 2^-32; the same bits
        on every machine (`onward.sampling.noise`).
    """
    quads = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=seeds.device)
    zero = torch.zeros((), dtype=torch.int64, device=seeds.device)
    words = philox((quads, positions.to(torch.int64).unsqueeze(1), zero, zero), seeds.unsqueeze(1))
    bits = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-32
    return -logarithm(-logarithm(uniform))


def coins(seeds: Tensor, positions: Tensor) -> Tensor:
    """One uniform number per row, for decisions about a whole position: float64 [B] on (0, 1).

    seeds, positions: as for `gumbel_noise`. Counter (0, position, 1, 0).
    """
    zero = torch.zeros((), dtype=torch.int64, device=seeds.device)
    word = philox((zero, positions.to(torch.int64), zero + 1, zero), seeds)[0]
    return (word.to(torch.float64) + 0.5) * 2.0**-32


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request: its own for sample 0, 64 bits of Philox keyed by it for the others.

    Counter (index, 0, 0, 1), words 0 and 1, the low one first; no noise uses this counter.
    """
    if index == 0:
        return seed
    zero = torch.zeros((), dtype=torch.int64)
    key = torch.tensor(seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64)
    low, high, _, _ = philox((zero + index, zero, zero, zero + 1), key)
    return int(low) | int(high) << 32


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seeds: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of counters of four 32-bit words, the lowest first, under the 64-bit keys `seeds`.

    All int64 tensors that broadcast together; results are words in [0, 2^32).
    """
    c0, c1, c2, c3, _ = torch.broadcast_tensors(  # type: ignore[no-untyped-call]
        *(word & _MASK for word in counter), seeds
    )
    k0, k1 = seeds & _MASK, (seeds >> 32) & _MASK
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64, so both halves of the unsigned product are exact.
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((right >> 32) & _MASK) ^ c1 ^ k0, ((left >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = right & _MASK, left & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3
