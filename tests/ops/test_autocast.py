"""Under `torch.autocast`, ops behave as the corresponding ops of torch, with gradients and without."""

import pytest
import torch
from torch.nn import functional as F

from onward import ops

LOW = [torch.bfloat16, torch.float16]


def some(*shape, dtype=torch.float32, seed=0, grad=False):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + len(shape))).to(dtype)
    return made.requires_grad_() if grad else made


def close(ours, torchs, *inputs):
    """To two roundings in the narrowest dtype there is: each side rounds once, torch also on the way."""
    assert ours.dtype == torchs.dtype
    rtol = 2 * max(torch.finfo(tensor.dtype).eps for tensor in (torchs, *inputs))
    torch.testing.assert_close(ours, torchs, rtol=rtol, atol=8 * rtol)


CASES = {
    "linear": (
        lambda x, y: ops.linear(x, some(8, 8, seed=2), some(8)),
        lambda x, y: F.linear(x, some(8, 8, seed=2), some(8)),
    ),
    "add": (lambda x, y: ops.add(x, y), lambda x, y: x + y),
    "swiglu": (lambda x, y: ops.swiglu(x, y), lambda x, y: F.silu(x) * y),
    "geglu": (lambda x, y: ops.geglu(x, y), lambda x, y: F.gelu(x, approximate="tanh") * y),
    "layer_norm": (
        lambda x, y: ops.layer_norm(x, some(8), some(8, seed=3)),
        lambda x, y: F.layer_norm(x, (8,), some(8), some(8, seed=3)),
    ),
    "rms_norm": (
        lambda x, y: ops.rms_norm(x, some(8)),
        lambda x, y: (F.rms_norm(x.float(), (8,), some(8), 1e-6)).to(x.dtype),
    ),
    "attention": (
        lambda x, y: ops.scaled_dot_product_attention(x[None], y[None], y[None]),
        lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None]),
    ),
    "einsum": (
        lambda x, y: ops.einsum("abi,abj->aij", x, y),
        lambda x, y: torch.einsum("abi,abj->aij", x, y),
    ),
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("dtypes", ["float32", "low", "x low", "y low"])
@pytest.mark.parametrize("name", CASES)
def test_an_op_under_autocast_equals_torch(name, dtypes, low, grad):
    ours, torchs = CASES[name]
    x_dtype = low if dtypes in ("low", "x low") else torch.float32
    y_dtype = low if dtypes in ("low", "y low") else torch.float32
    x = some(2, 3, 8, dtype=x_dtype, grad=grad)
    y = some(2, 3, 8, dtype=y_dtype, seed=1, grad=grad)
    with torch.autocast("cpu", low):
        here, there = ours(x, y), torchs(x, y)
    close(here, there, x, y)
    if grad:
        gradients = [torch.autograd.grad(out.float().square().sum(), x)[0] for out in (here, there)]
        assert gradients[0].dtype == x_dtype
        size = gradients[1].float().abs().max().item()
        # Sums of some ten products of rounded numbers, each off by a rounding or two.
        torch.testing.assert_close(*(g.float() for g in gradients), rtol=0, atol=20 * torch.finfo(low).eps * size)


@pytest.mark.parametrize("low", LOW)
def test_a_cache_of_another_dtype_is_written_and_attended(low):
    keys, values = torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 4)
    offsets = torch.tensor([1], dtype=torch.int32)
    q, k = some(1, 2, 3, 4, dtype=low), some(1, 2, 3, 4, dtype=low, seed=1)
    with torch.autocast("cpu", low):
        ops.write_cache(keys, k, offsets)
        ops.write_cache(values, k, offsets)
        out = ops.cached_attention(q, keys, values, offsets)
    assert torch.equal(keys[:, :, 1:4], k.float())
    assert torch.equal(out, ops.cached_attention(q, keys.to(low), values.to(low), offsets))


def test_packed_and_quantized_weights_give_the_autocast_dtype():
    from onward.quantization import quantize_int8

    weight, x = some(32, 16), some(3, 16, seed=1)
    for packed in (ops.pack(weight), quantize_int8(weight)):
        with torch.autocast("cpu", torch.bfloat16):
            out, of_torch = ops.linear(x, packed), F.linear(x, weight)
        assert out.dtype == torch.bfloat16
        if packed is weight:  # without kernels nothing is packed, and the weight is cast as any other
            assert torch.equal(out, of_torch)
        else:
            torch.testing.assert_close(out.float(), ops.linear(x, packed), rtol=2**-7, atol=1e-6)


def test_float64_is_not_cast():
    x, weight = some(3, 8, dtype=torch.float64), some(8, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ops.linear(x, weight), F.linear(x, weight))


def test_a_block_of_ops_trains_under_autocast_and_compiles():
    """The reproduction of a new user's: a norm of a product."""
    weight, norm = some(8, 8, grad=True), torch.ones(8, requires_grad=True)

    def block(x):
        return ops.add(x, ops.rms_norm(ops.linear(x, weight), norm))

    x = some(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = block(x)
        compiled = torch.compile(block, fullgraph=True, backend="eager")(x)
    out.square().sum().backward()
    assert out.dtype == weight.grad.dtype == norm.grad.dtype == torch.float32
    close(compiled, out)


def test_autocast_changes_no_program():
    """One that is made under it serves calls without, and the other way round."""
    from onward import LanguageModel
    from onward.testing import tiny_model

    plain = LanguageModel(tiny_model()).generate([1, 2, 3], max_new_tokens=8, logprobs=1)
    lm = LanguageModel(tiny_model())
    with torch.autocast("cpu", torch.bfloat16):
        lm.generate([1, 2, 3], max_new_tokens=8)
    after = lm.generate([1, 2, 3], max_new_tokens=8, logprobs=1)
    assert (after.token_ids, after.logprobs) == (plain.token_ids, plain.logprobs)
