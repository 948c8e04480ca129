"""From logits to a token: pure functions over [B, V]."""

from onward.sampling.noise import gumbel_noise
from onward.sampling.params import SamplingParams
from onward.sampling.sampler import Sampler, greedy, sample

__all__ = ["Sampler", "SamplingParams", "greedy", "gumbel_noise", "sample"]
