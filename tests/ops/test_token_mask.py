"""Masks keep the logits of allowed ids, and report whether any is left: the kernel equals the definition."""

import itertools

import numpy as np
import pytest
import torch

from onward import ops
from onward.errors import RequestError
from onward.ops.token_mask import _mask_definition

NOTHING = float("-inf")


def masks(rows, words, seed):
    bits = np.random.default_rng(seed).integers(-(2**31), 2**31, (rows, words), dtype=np.int64)
    return torch.from_numpy(bits.astype(np.int32))


# Widths round the 16 lanes, the 32 bits of a word and the pieces of 16,384 ids; words that end before the ids do.
@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 31, 33, 100, 16_384, 16_400, 33_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_form_equals_the_definition(form, dtype, vocab):
    for rows, missing in itertools.product((1, 3), (0, 1, 2)):
        logits = torch.randn(rows, vocab + 3, generator=torch.Generator().manual_seed(vocab)).to(dtype)[:, :vocab]
        words = masks(rows, max(0, -(-vocab // 32) - missing), seed=rows)
        for got, expected in zip(ops.apply_token_mask(logits, words), _mask_definition(logits, words), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("vocab", [5, 16, 40, 20_000])
def test_rows_with_an_admissible_or_nan_logit_are_reported(form, vocab):
    logits = torch.full((4, vocab), NOTHING)
    logits[1, vocab - 1], logits[2, vocab - 1], logits[3, 0] = -3e38, float("nan"), 1.0
    words = torch.full((4, -(-vocab // 32)), -1, dtype=torch.int32)
    words[3, 0] = -2  # all but id 0
    masked, left = ops.apply_token_mask(logits, words)
    assert left.tolist() == [False, True, True, False]
    assert bool(masked[2].isnan().any())


def test_bad_arguments():
    for logits, words in [
        (torch.zeros(2, 3), torch.zeros(1, 1, dtype=torch.int32)),
        (torch.zeros(2, 3), torch.zeros(2, 1, dtype=torch.int64)),
        (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)),
        (torch.zeros(3), torch.zeros(3, 1, dtype=torch.int32)),
    ]:
        with pytest.raises(RequestError, match="apply_token_mask takes float logits"):
            ops.apply_token_mask(logits, words)
