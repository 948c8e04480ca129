"""From logits to a token: pure functions over [B, V]."""

from onward.sampling.constraint import Constraint, ConstraintState, Mask, mask_of
from onward.sampling.draw import greedy
from onward.sampling.history import History
from onward.sampling.logprobs import Logprobs, Token, TokenLogprobs, logprobs
from onward.sampling.noise import gumbel_noise, sample_seed
from onward.sampling.options_dict import SamplingOptionsDict
from onward.sampling.params import SamplingParams
from onward.sampling.sampler import Sampler, fresh_seed, sample

__all__ = [
    "Constraint", "ConstraintState", "History", "Logprobs", "Mask", "Sampler", "SamplingOptionsDict", "SamplingParams",
    "Token", "TokenLogprobs", "fresh_seed", "greedy", "gumbel_noise", "logprobs", "mask_of", "sample", "sample_seed",
]  # fmt: skip
