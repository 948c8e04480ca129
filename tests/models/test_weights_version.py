"""After any write to the weights, a prompt with a cached prefix gives the result of a fresh model."""

import pytest
import torch
from torch import nn

import onward
from onward import ops
from onward.errors import ProgramError
from onward.models.model import WeightsVersion
from onward.ops.operator import usable_library
from onward.ops.packed import pack_into
from onward.testing import random_checkpoint, tiny_model

PROMPT = list(range(3, 75))  # more than a block of 64, the unit of the cache


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


def _found(lm, prompt=PROMPT):
    """Ids and logprobs of a continuation."""
    completion = lm.generate(prompt, max_new_tokens=4, temperature=0.0, logprobs=0)
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


def test_inference_mode_tensors_reuse_no_prefix():
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


def _fused_step(module):
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    torch.optim.AdamW(module.parameters(), lr=0.5, fused=True).step()


def _load(module):
    module.load_state_dict({name: tensor * 1.5 for name, tensor in module.state_dict().items()})


def _assign_data(module):
    for parameter in module.parameters():
        parameter.data = parameter.data * 1.5


def _assign_data_until_memory_is_used_again(module):
    before = module.qkv.weight.data_ptr()
    for _ in range(16):
        module.qkv.weight.data = torch.randn(48, 16)
        if module.qkv.weight.data_ptr() == before:
            return
    pytest.skip("no memory was used again")


def _replace(module):
    module.qkv.weight = nn.Parameter(module.qkv.weight.detach() * 1.5)


def _assign_data_of_all(tensors):
    for tensor in tensors:
        tensor.data = tensor.data * 1.5


def _set(tensors):
    for tensor in tensors:
        tensor.set_(tensor * 1.5)


@pytest.mark.parametrize("write", [_assign_data_of_all, _set])
def test_programs_read_new_memory_of_the_weights(write, tmp_path):
    lm = onward.load(random_checkpoint(tmp_path / "model", "qwen3"))
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(lm.model.params) if isinstance(leaf, torch.Tensor)]
    _is_fresh_after(lm, lambda: write(tensors))
    overwritten = [torch.full_like(tensor, 7.0) for tensor in tensors for _ in range(8)]  # in memory freed above
    assert overwritten
    eager = _found(onward.LanguageModel(lm.model, compile="eager"))
    assert _found(lm)[0] == eager[0]
    assert _found(lm)[1] == pytest.approx(eager[1], abs=1e-4)


@pytest.mark.parametrize("prompt", [[7], PROMPT], ids=["one id", "more than a block"])
def test_a_call_reads_new_memory_while_the_old_one_exists(prompt, tmp_path):
    lm = onward.load(random_checkpoint(tmp_path / "model", "qwen3"))
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(lm.model.params) if isinstance(leaf, torch.Tensor)]
    before = _found(lm, prompt)
    former = [tensor.data for tensor in tensors]
    _assign_data_of_all(tensors)
    after = _found(lm, prompt)
    assert after != before
    assert after == _found(onward.LanguageModel(lm.model), prompt)
    for tensor, data in zip(tensors, former, strict=True):
        tensor.data = data
    assert _found(lm, prompt) == before


@pytest.mark.parametrize("is_kept", [True, False])
def test_weights_moved_during_a_stream_are_never_read_from_freed_memory(is_kept, tmp_path):
    lm = onward.load(random_checkpoint(tmp_path / "model", "qwen3"))
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(lm.model.params) if isinstance(leaf, torch.Tensor)]
    options = {"max_new_tokens": 12, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
    expected, stream, references = lm.generate(PROMPT, **options), lm.stream(PROMPT, **options), []
    pieces = [next(stream), next(stream)]
    for tensor in tensors:
        if is_kept:
            references.append(tensor.data)
        tensor.data = tensor.data.clone()
    overwritten = [torch.full_like(tensor, 7.0) for tensor in tensors for _ in range(8)]
    pieces += stream
    assert overwritten
    assert [(piece.token_id, piece.logprobs) for piece in pieces] == list(
        zip(expected.token_ids, expected.logprobs, strict=True)
    )


def _product(tokens, offsets, cache, params):
    return ops.linear(ops.embedding(tokens, params["table"]), params["head"]), cache


def _compiled_product():
    params = {"table": torch.randn(8, 16), "head": torch.randn(8, 16)}
    program = onward.compile(_product, params=params, cache=(), backend="native")
    tokens, offsets = torch.tensor([[3]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return params, lambda: program(tokens, offsets, ())[0]


@pytest.mark.skipif(usable_library() is None, reason="there are no programs without kernels")
@pytest.mark.parametrize("change", ["freed", "shape"])
def test_a_program_without_its_params_raises(change):
    params, run = _compiled_product()
    before = run()
    if change == "freed":
        params["head"] = torch.randn(8, 16)
    else:
        params["head"].data = torch.randn(16, 8)
    with pytest.raises(ProgramError, match=r"param\['head'\] has (been freed|another shape).*compile"):
        run()
    assert before.isfinite().all()


@pytest.mark.parametrize(
    "write", [_step, _fused_step, _load, _assign_data, _assign_data_until_memory_is_used_again, _replace]
)
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
    continued, fresh = session.generate(PROMPT, **options), lm.generate(PROMPT, **options)
    assert continued.token_ids == fresh.token_ids
    assert [token.chosen for token in continued.logprobs] == [token.chosen for token in fresh.logprobs]


def test_a_session_does_not_mix_autocast_with_float32():
    session = onward.Session(onward.LanguageModel(onward.Model.from_module(Module())))
    options = {"max_new_tokens": 4, "temperature": 0.0, "logprobs": 0}
    session.generate(PROMPT, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        continued, fresh = session.generate(PROMPT, **options), session.lm.generate(PROMPT, **options)
    assert continued.cached_tokens == 0
    assert [token.chosen for token in continued.logprobs] == [token.chosen for token in fresh.logprobs]


def test_unchanged_weights_have_equal_versions_and_reuse_prefixes():
    model = tiny_model()
    version, session = WeightsVersion(model), onward.Session(onward.LanguageModel(model))
    session.generate(PROMPT, max_new_tokens=4)
    assert version == WeightsVersion(model)
    assert session.generate(PROMPT, max_new_tokens=4).cached_tokens > 0
