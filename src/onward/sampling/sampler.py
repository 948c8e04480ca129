"""Picking a token: greedy, or Gumbel-max with noise that is an argument.

token = argmax over the admitted ids of logits / temperature + g, with g Gumbel noise keyed by (seed, position,
token id): a draw from the softmax (Gumbel 1954; Maddison et al., arXiv 1411.0030) that no other row, chunk or
draft can disturb.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from onward import ops
from onward.errors import RequestError
from onward.sampling.noise import gumbel_noise
from onward.sampling.params import SamplingParams, check_filters, check_seed
from onward.sampling.transforms import apply_min_p, apply_temperature, apply_top_k, apply_top_p


def greedy(logits: Tensor) -> Tensor:
    """The most likely id of each row: float [..., V] -> int64 [...]; the lowest id among equals."""
    return ops.argmax(logits)


def fresh_seed() -> int:
    """A seed from torch's default generator, so that `torch.manual_seed` governs unseeded requests."""
    return int(torch.randint(0, 2**63 - 1, ()).item())


class Sampler:
    """Picks a token for each row under that row's own parameters.

    Called with logits [B, V] and positions [B] it is a pure function of them: the same arguments give the same
    tokens. `seeds` holds the seed of each row, drawn here where a row's parameters name none.
    """

    def __init__(self, rows: Sequence[SamplingParams], device: torch.device | None = None) -> None:
        self.seeds = tuple(fresh_seed() if row.seed is None else row.seed for row in rows)
        signed = [seed - 2**64 if seed >= 2**63 else seed for seed in self.seeds]
        self._noise_keys = torch.tensor(signed, dtype=torch.int64, device=device)
        self._temperature = torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=device)
        self._top_k = torch.tensor([row.top_k for row in rows], dtype=torch.int64, device=device)
        self._top_p = torch.tensor([row.top_p for row in rows], dtype=torch.float32, device=device)
        self._min_p = torch.tensor([row.min_p for row in rows], dtype=torch.float32, device=device)
        self._greedy = self._temperature == 0
        # Filters that no row asks for cost nothing; asked once, for reading a tensor's value waits for a GPU.
        self._all_greedy = all(row.temperature == 0 for row in rows)
        self._any_top_k = any(row.top_k for row in rows)
        self._any_top_p = any(row.top_p < 1 for row in rows)
        self._any_min_p = any(row.min_p for row in rows)

    def __call__(self, logits: Tensor, positions: Tensor) -> Tensor:
        """float [B, V] logits and int [B] absolute positions of the tokens to draw -> int64 [B] ids."""
        if self._all_greedy:
            return greedy(logits)
        scores = self.scores(logits)
        noise = gumbel_noise(self._noise_keys, positions, logits.shape[-1])
        return torch.where(self._greedy, greedy(logits), greedy(scores.to(torch.float64) + noise))

    def scores(self, logits: Tensor) -> Tensor:
        """Tempered and filtered logits, float32 [B, V]; softmax of them is what a sampled row draws from."""
        # In the model's own dtype probabilities would be lost to rounding.
        scores = logits.to(torch.float32)
        scores = apply_temperature(scores, torch.where(self._greedy, 1.0, self._temperature))
        if self._any_top_k:
            scores = apply_top_k(scores, self._top_k)
        if self._any_top_p:
            scores = apply_top_p(scores, self._top_p)
        if self._any_min_p:
            scores = apply_min_p(scores, self._min_p)
        return scores


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
    *,
    positions: Tensor | int = 0,
) -> Tensor:
    """One step of your own loop: float [B, V] logits -> int64 [B] ids.

    With a seed the draw depends on (seed, position, logits) alone, so a loop that passes a seed must pass each
    step's position too, or every step uses the same noise. Without one the seed is drawn from torch's default
    generator, for each row anew.

    Args:
        logits: float [B, V], any float dtype; computed with in float32.
        temperature, top_k, top_p, min_p, seed: as in `SamplingParams`.
        positions: absolute position of the token to draw, an int or int [B].

    Raises:
        RequestError: logits of another shape, or a value outside its range.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise RequestError(f"sample: logits must be float [B, V]; got {logits.dtype} {list(logits.shape)}")
    check_filters(temperature, top_k, top_p, min_p)
    check_seed(seed)
    row = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    at = torch.as_tensor(positions, device=logits.device).expand(logits.shape[0])
    return Sampler([row] * logits.shape[0], logits.device)(logits, at)
