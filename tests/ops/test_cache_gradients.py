"""A forward through a cache has no gradient, and says so; a forward over whole sequences has the right one."""

import pytest
import torch
from rounding import UNIT
from torch import nn
from torch.nn import functional as F

import onward
from onward import ops
from onward.cache import CachePlan, KVPool, LayerShape
from onward.errors import RequestError

WIDTH, HEADS, LAYERS, VOCAB = 16, 2, 2, 11


class Gpt(nn.Module):
    """A small transformer in ops; without a cache it is its own training forward."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norms = nn.ParameterList(torch.ones(WIDTH) for _ in range(LAYERS))
        self.to(dtype)

    def forward(self, tokens, offsets, cache=None):
        x = self.tokens(tokens)
        for layer, (qkv, out, norm) in enumerate(zip(self.qkv, self.out, self.norms, strict=True)):
            normed = ops.rms_norm(x, norm) if x.dtype in UNIT else F.rms_norm(x, (WIDTH,), norm)
            q, k, v = qkv(normed).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            if cache is not None:
                mixed = cache.attend(layer, q, k, v, offsets)
            else:
                mixed = ops.scaled_dot_product_attention(q, k, v, causal=True)
            x = ops.add(x, out(mixed.transpose(1, 2).flatten(2)))
        return ops.linear(x, self.tokens.weight)


def _cache(dtype: torch.dtype, *, paged: bool):
    plan = CachePlan((LayerShape(HEADS, WIDTH // HEADS, WIDTH // HEADS),) * LAYERS, dtype)
    if not paged:
        return onward.KVCache.of(plan, 2, 32)
    return KVPool(plan, 2).view(torch.tensor([[1], [0]], dtype=torch.int32))


IDS = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
OFFSETS = torch.zeros(2, dtype=torch.int32)


def _loss(module: nn.Module, cache=None) -> torch.Tensor:
    return F.cross_entropy(module(IDS[:, :-1], OFFSETS, cache).flatten(0, 1).float(), IDS[:, 1:].flatten())


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_forward_through_a_cache_raises_under_autograd(dtype, paged):
    module, cache = Gpt(dtype), _cache(dtype, paged=paged)
    with pytest.raises(RequestError, match=r"write_cache has no gradient.*torch\.no_grad.*scaled_dot_product"):
        _loss(module, cache)
    assert not any(bool(layer.any()) for layer in (*cache.keys, *cache.values))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_gradients_it_gives_the_loss_of_the_whole_sequence(dtype, paged):
    module = Gpt(dtype)
    with torch.no_grad():
        whole, cached = _loss(module), _loss(module, _cache(dtype, paged=paged))
    # Two layers round some 10 times each, and logits of size 4 change the loss by as much at most.
    assert abs(float(whole - cached)) <= 4 * 20 * UNIT[dtype]


def test_the_gradient_equals_finite_differences_of_the_kernels():
    module = Gpt(torch.float32)
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(_loss(module), parameters)
    size = sum(float(g.double().square().sum()) for g in gradients) ** 0.5

    def moved(step: float) -> float:
        with torch.no_grad():
            before = [p.clone() for p in parameters]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter += step / size * gradient
            loss = float(_loss(module))
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old)
        return loss

    step = 2.0**-5
    wide, narrow = (moved(2 * step) - moved(-2 * step)) / (4 * step), (moved(step) - moved(-step)) / (2 * step)
    # Halving the step takes the error of a difference to a quarter; the loss is rounded some 20 times.
    tolerance = abs(wide - narrow) + 20 * UNIT[torch.float32] * 4 / step
    assert tolerance < 0.05 * size
    assert abs(narrow - size) <= tolerance
