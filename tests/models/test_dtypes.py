"""Half precision runs, and stays as close to float32 as its rounding allows."""

import math

import pytest
import torch

import onward
from onward.testing import random_checkpoint

LAYERS = 3
IDS = [(7 * i) % 258 for i in range(33)]
# Relative size of one rounding, half a unit in the last place: 8 and 11 bits of significand.
UNIT = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
# Results rounded on the way through a layer, one after the other: two norms (normalised, then weighted), q, k, v,
# the turned q and k, the mixed values, o, gate, up, silu, its product, down and two sums; after the layers the last
# norm (twice) and the head; and each of the seven matrices of a layer, the embedding and the head when loaded.
ROUNDINGS = LAYERS * (18 + 7) + 5


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_half_precision_agrees_with_float32_within_its_rounding(family, dtype, tmp_path):
    """Independent errors of relative size `unit` add up as a walk does, to unit * sqrt(their number).

    The root mean square over all logits is compared, at twice that: softmax and silu may stretch an error.
    """
    folder = random_checkpoint(tmp_path, family, num_hidden_layers=LAYERS, tie_word_embeddings=True)
    exact = onward.load(folder, dtype="float32").logits(IDS)
    lm = onward.load(folder, dtype=dtype)
    assert lm.model.params.embed_tokens.weight.dtype == dtype
    relative_error = (lm.logits(IDS) - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert UNIT[dtype] / 2 < relative_error < 2 * UNIT[dtype] * math.sqrt(ROUNDINGS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_decodes_chunked_and_batched(dtype, tmp_path):
    lm = onward.load(random_checkpoint(tmp_path, dtype=getattr(torch, dtype)))
    assert lm.model.params.embed_tokens.weight.dtype == getattr(torch, dtype), "the checkpoint's own dtype by default"
    lm.prefill_chunk = 5
    completions = lm.generate([IDS, IDS[:3]], max_new_tokens=20, temperature=0)
    assert [len(one.token_ids) for one in completions] == [20, 20]
