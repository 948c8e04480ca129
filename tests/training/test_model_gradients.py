"""Gradients of whole models, compared with transformers' module in float64 and with its error in the dtype."""

import pytest
import torch
from families import DTYPES, TRAINED
from transformers import AutoModelForCausalLM

import onward
from onward.checkpoint import open_checkpoint
from onward.checkpoint.convert import write_folder
from onward.testing import random_checkpoint
from tiny_checkpoint import FEW_EXPERTS

IDS = [[7, 9, 11, 200, 3] * 8, [5, 4, 3, 2, 1, 6] * 9]
# Fields that transformers needs, or reads otherwise, where the tiny configs leave them out.
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_FIELDS = {
    "glm4moe": {"model_type": "glm4_moe", **FEW_EXPERTS["glm4moe"]},
    "qwen3moe": {"model_type": "qwen3_moe", **FEW_EXPERTS["qwen3moe"]},
    "ministral": {"sliding_window": 24},
    "ministral3": {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}},
}


def _theirs(folder, dtype):
    """The gradients of transformers' module, by name, in float64."""
    module = _module(folder, dtype)
    total = 0.0
    for ids, weights in zip(IDS, _weights(), strict=True):
        logits = module(torch.tensor([ids])).logits[0, :-1].to(torch.promote_types(dtype, torch.float32))
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
        total = total + (chosen * weights).sum()
    total.backward()
    return {name: p.grad.double() for name, p in module.named_parameters() if p.grad is not None}


def _module(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )


def _weights():
    draws = torch.Generator().manual_seed(3)
    return [torch.randn(len(ids) - 1, generator=draws) for ids in IDS]


def _error(found, exact):
    difference = sum(float((found[name] - gradient).square().sum()) for name, gradient in exact.items())
    return (difference / sum(float(gradient.square().sum()) for gradient in exact.values())) ** 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", sorted({*TRAINED} - {"mistral4"}))  # transformers has it as a part of Mistral 3 only
def test_gradients_are_as_exact_as_those_of_plain_torch(family, dtype, tmp_path):
    folder = random_checkpoint(tmp_path, family, dtype=dtype, **_FIELDS.get(family, {}))
    lm = onward.load(folder, trainable=True)
    if dtype == torch.bfloat16 and any(".experts." in name for name, _ in lm.named_parameters()):
        pytest.skip("a rounding may change which experts are chosen")
    chosen = lm.logprobs([list(ids) for ids in IDS])
    sum((own * weights).sum() for own, weights in zip(chosen, _weights(), strict=True)).backward()
    # As the weights of a checkpoint, which transformers reads into its own names and shapes.
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in lm.named_parameters()}
    write_folder(open_checkpoint(folder), gradients, tmp_path / "gradients")
    ours = {n: p.detach() for n, p in _module(tmp_path / "gradients", torch.float64).named_parameters()}
    stock = lm.save(tmp_path / "stock")
    exact, plain = _theirs(stock, torch.float64), _theirs(stock, dtype)
    assert sum(bool(gradient.any()) for gradient in exact.values()) > 10
    assert _error(ours, exact) <= 2 * _error(plain, exact)
