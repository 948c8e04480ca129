"""From logits to a token: pure functions over [B, V]."""

from onward.sampling.constraint import ConstrainedText, Constraint, Mask, mask_of
from onward.sampling.draw import greedy
from onward.sampling.history import History
from onward.sampling.logprobs import Logprobs, logprobs
from onward.sampling.noise import gumbel_noise, sample_seed
from onward.sampling.params import SamplingOptionsDict, SamplingParams
from onward.sampling.sampler import Sampler, fresh_seed, sample

__all__ = [
    "ConstrainedText",
    "Constraint",
    "History",
    "Logprobs",
    "Mask",
    "Sampler",
    "SamplingOptionsDict",
    "SamplingParams",
    "fresh_seed",
    "greedy",
    "gumbel_noise",
    "logprobs",
    "mask_of",
    "sample",
    "sample_seed",
]
