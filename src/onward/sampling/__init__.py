"""From logits to a token: pure functions over [B, V]."""

from onward.sampling.draw import greedy
from onward.sampling.history import History
from onward.sampling.logprobs import Logprobs, logprobs
from onward.sampling.noise import gumbel_noise, sample_seed
from onward.sampling.params import SamplingOptionsDict, SamplingParams
from onward.sampling.sampler import Sampler, fresh_seed, sample

__all__ = [
    "History",
    "Logprobs",
    "Sampler",
    "SamplingOptionsDict",
    "SamplingParams",
    "fresh_seed",
    "greedy",
    "gumbel_noise",
    "logprobs",
    "sample",
    "sample_seed",
]
