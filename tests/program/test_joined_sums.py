"""A residual sum and its norm become one call, unless that would change the result."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import onward
from onward import native, ops
from onward.testing import tiny_model

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library was built")
VOCAB, WIDTH = 31, 48
Params = dict[str, Tensor]
Body = Callable[[Tensor, Tensor, Params], Tensor]


def params(dtype: torch.dtype) -> Params:
    generator = torch.Generator().manual_seed(0)
    shapes = {"table": (VOCAB, WIDTH), "other": (VOCAB, WIDTH), "weight": (WIDTH,), "bias": (WIDTH,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def forward_of(body: Body) -> Callable[..., tuple[Tensor, Tensor]]:
    """A forward around body(a, b, params), which mixes two embeddings of the tokens."""

    def forward(tokens: Tensor, offsets: Tensor, cache: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        return body(ops.embedding(tokens, params["table"]), ops.embedding(tokens, params["other"]), params), cache

    return forward


def rms(x: Tensor, params: Params) -> Tensor:
    return ops.rms_norm(x, params["weight"])


def layer(x: Tensor, params: Params) -> Tensor:
    return ops.layer_norm(x, params["weight"], params["bias"])


def both_are_used(a: Tensor, b: Tensor, params: Params) -> Tensor:
    total = ops.add(a, b)
    return ops.add(rms(total, params), total)


def both_are_used_by_layer_norm(a: Tensor, b: Tensor, params: Params) -> Tensor:
    total = a + b
    return layer(total, params) + total


def operands_are_used_later(a: Tensor, b: Tensor, params: Params) -> Tensor:
    total = a + b
    normed = rms(total, params)
    return normed + a * 2 + b * 3 + total


def two_norms_of_a_sum(a: Tensor, b: Tensor, params: Params) -> Tensor:
    total = a + b
    return rms(total, params) - layer(total, params)


def a_sum_of_itself(a: Tensor, b: Tensor, params: Params) -> Tensor:
    total = a + a
    return rms(total, params) + b


def the_sum_changes_before_the_norm(a: Tensor, b: Tensor, params: Params) -> Tensor:
    total = a + b
    total.mul_(2)
    total[..., 0] = 7
    return rms(total, params) + total


def the_sum_changes_after_the_norm(a: Tensor, b: Tensor, params: Params) -> Tensor:
    total = a + b
    normed = rms(total, params)
    total.mul_(2)
    return normed + total


def one_side_is_broadcast(a: Tensor, b: Tensor, params: Params) -> Tensor:
    return rms(a + params["bias"], params) + b


def one_side_is_multiplied(a: Tensor, b: Tensor, params: Params) -> Tensor:
    return rms(torch.add(a, b, alpha=3), params)


def one_side_is_a_number(a: Tensor, b: Tensor, params: Params) -> Tensor:
    return rms(a + 1, params) + b


def the_sum_is_transposed(a: Tensor, b: Tensor, params: Params) -> Tensor:
    total = a.transpose(0, 1) + b.transpose(0, 1)
    return rms(total, params).transpose(0, 1)


def the_weight_is_computed(a: Tensor, b: Tensor, params: Params) -> Tensor:
    total = a + b
    return ops.rms_norm(total, params["weight"] * 2)


JOINED = [
    both_are_used,
    both_are_used_by_layer_norm,
    operands_are_used_later,
    two_norms_of_a_sum,
    a_sum_of_itself,
]
APART = [
    the_sum_changes_before_the_norm,
    the_sum_changes_after_the_norm,
    one_side_is_broadcast,
    one_side_is_multiplied,
    one_side_is_a_number,
    the_sum_is_transposed,
    the_weight_is_computed,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("body", JOINED + APART)
def test_the_program_gives_the_bits_of_eager_calls(body: Body, dtype: torch.dtype) -> None:
    forward, cache, given = forward_of(body), torch.zeros(1, 2), params(dtype)
    program = onward.compile(forward, params=given, cache=cache)
    for batch, length in ((1, 1), (3, 5)):
        tokens = torch.arange(batch * length, dtype=torch.int32).view(batch, length)
        offsets, cache = torch.zeros(batch, dtype=torch.int32), torch.zeros(batch, 2)
        expected, _ = forward(tokens, offsets, cache, given)
        for _ in range(2):  # nothing is left in the program's memory by a run
            assert torch.equal(program(tokens, offsets, cache)[0], expected)


@pytest.mark.parametrize("body", JOINED)
def test_sums_are_fused(body: Body) -> None:
    kernels = calls(body)
    assert kernels["rms_norm"] + kernels["layer_norm"] == {two_norms_of_a_sum: 2}.get(body, 1)
    # Of all sums, differences and products of two arrays that the body writes down one is missing.
    separate = {operands_are_used_later: 6}.get(body, 2)
    assert kernels["add"] + kernels["binary"] == separate - 1


def calls(body: Body) -> Counter[str]:
    cache = torch.zeros(1, 2)
    report = onward.compile(forward_of(body), params=params(torch.float32), cache=cache).explain(cache)
    found: Counter[str] = Counter()
    for row in report.rows:
        found[row.kernel] += row.calls
    return found


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_built_in_families_have_no_separate_sum(family: str) -> None:
    lm = onward.LanguageModel(tiny_model(family), onward.testing.ByteTokenizer())
    assert "add" not in {row.kernel for row in lm.explain().rows}


@pytest.mark.parametrize("norm", [rms, layer])
def test_scattered_rows_are_gathered_once(norm: Callable[[Tensor, Params], Tensor]) -> None:
    forward = forward_of(lambda a, b, params: norm(a.transpose(0, 1), params).transpose(0, 1).contiguous())
    program = onward.compile(forward, params=params(torch.float32), cache=torch.zeros(2, 2))
    copies = [row for row in program.explain(torch.zeros(2, 2), batch=2, tokens=3).rows if "norm" in row.op]
    assert sum(row.calls for row in copies if row.kernel == "unary") == 1
