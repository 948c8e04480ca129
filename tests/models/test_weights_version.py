"""After any write to the weights, a prompt whose prefix was kept gives what a fresh model gives for it."""

import pytest
import torch
from torch import nn

import onward
from onward import ops
from onward.models.weights_version import WeightsVersion
from onward.ops.operators import usable_library
from onward.ops.packed import pack_into
from onward.testing import random_checkpoint, tiny_model

PROMPT = list(range(3, 75))  # more than a block of 64, which is what is kept


class Module(nn.Module):
    vocab_size = 96

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.qkv = nn.Embedding(96, 16), nn.Linear(16, 48)

    def forward(self, tokens, offsets, cache):
        q, k, v = self.qkv(self.tokens(tokens)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = cache.attend(0, q, k, v, offsets)
        return mixed.transpose(1, 2).flatten(2) @ self.tokens.weight.T, cache

    def new_cache(self, batch, max_len):
        return onward.KVCache.new(
            num_layers=1, batch=batch, num_kv_heads=2, max_len=max_len, head_dim=8, dtype=torch.float32, device="cpu"
        )


def _found(lm):
    """Ids and logprobs of a continuation."""
    completion = lm.generate(PROMPT, max_new_tokens=4, temperature=0.0, logprobs=0)
    return completion.token_ids, [token.chosen for token in completion.logprobs]


def _packed(params) -> list[ops.NativeWeight]:
    leaves = torch.utils._pytree.tree_leaves(params, is_leaf=lambda leaf: isinstance(leaf, ops.NativeWeight))
    return [leaf for leaf in leaves if isinstance(leaf, ops.NativeWeight)]


def _is_fresh_after(lm, write) -> None:
    _found(lm)
    before, version = _found(lm), WeightsVersion(lm.model)
    write()
    assert version != WeightsVersion(lm.model)
    after = _found(lm)
    assert after == _found(onward.LanguageModel(lm.model))
    assert after != before


def _repack(lm):
    for weight in _packed(lm.model.params):
        pack_into(usable_library(), weight.unpack() * 1.5, weight.data)


def _write_in_place(lm):
    for weight in _packed(lm.model.params):
        weight.data.mul_(1.5)


def _write_unseen(lm):
    for weight in _packed(lm.model.params):
        weight.data.numpy()[...] *= 1.5
        torch.autograd.graph.increment_version(weight.data)  # as docs/training.md says


@pytest.mark.skipif(usable_library() is None, reason="nothing is packed without kernels")
@pytest.mark.parametrize("write", [_repack, _write_in_place, _write_unseen])
def test_a_write_to_packed_weights(write, tmp_path):
    lm = onward.load(random_checkpoint(tmp_path / "model", "qwen3"))
    assert _packed(lm.model.params)
    _is_fresh_after(lm, lambda: write(lm))


@pytest.mark.skipif(usable_library() is None, reason="nothing is packed without kernels")
@pytest.mark.parametrize("write", [_repack, _write_in_place])
def test_a_write_in_inference_mode_to_weights_loaded_in_it(write, tmp_path):
    with torch.inference_mode():
        lm = onward.load(random_checkpoint(tmp_path / "model", "qwen3"))
        assert WeightsVersion(lm.model) == WeightsVersion(lm.model)
        _is_fresh_after(lm, lambda: write(lm))


def test_writes_to_tensors_that_were_made_in_inference_mode_cannot_be_counted_and_so_nothing_is_found():
    with torch.inference_mode():
        model = tiny_model()
        first = next(leaf for leaf in torch.utils._pytree.tree_leaves(model.params) if isinstance(leaf, torch.Tensor))
        lm = onward.LanguageModel(model)
        _is_fresh_after(lm, lambda: first.mul_(1.5))
        assert WeightsVersion(model) != WeightsVersion(model)


def _step(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module.tokens.weight.grad, module.qkv.weight.grad = torch.ones(96, 16), torch.randn(48, 16)
    optimizer.step()


def _load(module):
    module.load_state_dict({name: tensor * 1.5 for name, tensor in module.state_dict().items()})


def _assign_data(module):
    for parameter in module.parameters():
        parameter.data = parameter.data * 1.5


def _replace(module):
    module.qkv.weight = nn.Parameter(module.qkv.weight.detach() * 1.5)


@pytest.mark.parametrize("write", [_step, _load, _assign_data, _replace])
def test_a_write_to_a_module(write):
    module = Module()
    model = onward.Model.from_module(module)
    session = onward.Session(onward.LanguageModel(model))
    lm = session.lm
    version = WeightsVersion(model)
    session.generate(PROMPT, max_new_tokens=4, temperature=0.0)
    write(module)
    assert version != WeightsVersion(model)
    options = {"max_new_tokens": 4, "temperature": 0.0, "logprobs": 0}
    held, fresh = session.generate(PROMPT, **options), lm.generate(PROMPT, **options)
    assert held.token_ids == fresh.token_ids
    assert [token.chosen for token in held.logprobs] == [token.chosen for token in fresh.logprobs]


def test_without_a_write_snapshots_are_equal_and_a_prefix_is_found():
    model = tiny_model()
    version, session = WeightsVersion(model), onward.Session(onward.LanguageModel(model))
    session.generate(PROMPT, max_new_tokens=4)
    assert version == WeightsVersion(model)
    assert session.generate(PROMPT, max_new_tokens=4).cached_tokens > 0
