"""Plain torch that spells out an op runs as that op, with its bits; similar code stays as it is."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import onward
from onward import native, ops

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library was built")
VOCAB, HEADS, DIM = 37, 3, 16
WIDTH = HEADS * DIM
EPS = 1e-5
Params = dict[str, Tensor]
Body = Callable[[Tensor, Tensor, Params], Tensor]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def params(dtype: torch.dtype) -> Params:
    generator = torch.Generator().manual_seed(0)
    shapes = {"table": (VOCAB, WIDTH), "weight": (WIDTH,), "bias": (WIDTH,), "head": (DIM,), "matrix": (20, WIDTH)}
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return made | {"inverse": 100.0 ** -(torch.arange(0, DIM, 2).float() / DIM)}


def forward_of(body: Body) -> Callable[..., tuple[Tensor, Tensor]]:
    """A forward around body(x [B, T, W], positions [B, T], params)."""

    def forward(tokens: Tensor, offsets: Tensor, cache: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        x = F.embedding(tokens, params["table"])
        positions = offsets[:, None] + torch.arange(tokens.shape[1])
        return body(x, positions, params).reshape(*tokens.shape, -1), cache

    return forward


def run(
    body: Body, dtype: torch.dtype, batch: int = 2, tokens: int = 5, frozen: bool = False
) -> tuple[Tensor, set[str]]:
    """The logits of a program of the body, and the operators that it runs."""
    weights, cache = params(dtype), torch.zeros(batch, 1)
    program = onward.compile(forward_of(body), params=weights, cache=cache, fallback="raise", frozen=frozen)
    logits, _ = program(*inputs(batch, tokens), cache)
    return logits, {row.op for row in program.explain(cache, batch, tokens).rows}


def inputs(batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCAB, (batch, tokens), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(batch, dtype=torch.int32) * 7


def eagerly(body: Body, dtype: torch.dtype, batch: int = 2, tokens: int = 5) -> Tensor:
    with torch.no_grad():
        return forward_of(body)(*inputs(batch, tokens), torch.zeros(batch, 1), params(dtype))[0]


def by_op(body: Body, dtype: torch.dtype, batch: int = 2, tokens: int = 5) -> Tensor:
    """A body that calls `onward.ops`, whose program gives the bits of eager calls."""
    return eagerly(body, dtype, batch, tokens)


# ── norms ─────────────────────────────────────────────────────────────────────────────────────────────────────


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + EPS)).to(x.dtype)


def t5_norm(x: Tensor, weight: Tensor) -> Tensor:
    quotient = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    return (quotient if quotient.dtype == x.dtype else quotient.to(x.dtype)) * weight


def power_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (torch.pow((wide * wide).mean(-1, keepdim=True) + EPS, -0.5) * wide).type_as(x) * weight


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (normed * (1.0 + weight.float())).type_as(x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("norm", [llama_norm, t5_norm, power_norm])
def test_a_norm_with_a_weight(norm: Callable[..., Tensor], dtype: torch.dtype, tokens: int) -> None:
    ours, names = run(lambda x, _, p: norm(x, p["weight"]), dtype, tokens=tokens)
    expected = by_op(lambda x, _, p: ops.rms_norm(x, p["weight"], eps=EPS), dtype, tokens=tokens)
    assert torch.equal(ours, expected)
    assert names == {"aten.embedding", "rms_norm"}


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_norm_with_one_plus_a_weight(dtype: torch.dtype) -> None:
    ours, names = run(lambda x, _, p: gemma_norm(x, p["weight"]), dtype)
    expected = by_op(lambda x, _, p: ops.rms_norm(x, p["weight"], eps=EPS, offset=1.0), dtype)
    assert torch.equal(ours, expected)
    assert names == {"aten.embedding", "rms_norm"}


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_norm_without_a_weight(dtype: torch.dtype) -> None:
    def body(x: Tensor, _: Tensor, p: Params) -> Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)

    ours, names = run(body, dtype)
    assert torch.equal(ours, by_op(lambda x, _, p: ops.rms_norm(x, torch.ones_like(p["weight"]), eps=EPS), dtype))
    assert names == {"aten.embedding", "aten.rms_norm"}


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_norm_of_heads_behind_a_transpose(dtype: torch.dtype) -> None:
    def heads(x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], HEADS, DIM).transpose(1, 2)

    ours, names = run(lambda x, _, p: llama_norm(heads(x), p["head"]).transpose(1, 2), dtype)
    expected = by_op(lambda x, _, p: ops.rms_norm(heads(x), p["head"], eps=EPS).transpose(1, 2), dtype)
    assert torch.equal(ours, expected)
    assert names == {"aten.embedding", "rms_norm"}


@pytest.mark.parametrize("dtype", FLOATS)
def test_torchs_own_norms(dtype: torch.dtype) -> None:
    ours, names = run(lambda x, _, p: F.layer_norm(x, (WIDTH,), p["weight"], p["bias"], EPS), dtype)
    assert torch.equal(ours, by_op(lambda x, _, p: ops.layer_norm(x, p["weight"], p["bias"], eps=EPS), dtype))
    assert names == {"aten.embedding", "layer_norm"}
    ours, names = run(lambda x, _, p: F.rms_norm(x, (WIDTH,), p["weight"], EPS), dtype)
    assert torch.equal(ours, by_op(lambda x, _, p: ops.rms_norm(x, p["weight"], eps=EPS), dtype))
    assert names == {"aten.embedding", "rms_norm"}


def of_another_axis(x: Tensor, p: Params) -> Tensor:
    wide = x.float()
    return p["weight"] * (wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + EPS)).to(x.dtype)


def of_another_array(x: Tensor, p: Params) -> Tensor:
    wide, other = x.float(), x.float() + 1
    return p["weight"] * (wide * torch.rsqrt(other.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def of_a_rounded_copy(x: Tensor, p: Params) -> Tensor:
    wide = x.float() * 1.1
    short = wide.to(torch.bfloat16)
    return p["weight"] * (wide * torch.rsqrt(short.float().pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def of_cubes(x: Tensor, p: Params) -> Tensor:
    wide = x.float()
    return p["weight"] * (wide * torch.rsqrt((wide.pow(2) * wide).abs().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def by_a_square_root(x: Tensor, p: Params) -> Tensor:
    wide = x.float()
    return p["weight"] * (wide * torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def of_changing_params(x: Tensor, p: Params) -> Tensor:
    wide = x.float() * 2
    square = wide.pow(2)
    square += 1
    return p["weight"] * (wide * torch.rsqrt(square.mean(-1, keepdim=True) + EPS)).to(x.dtype)


def with_weight_per_row(x: Tensor, p: Params) -> Tensor:
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return x * normed


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "body",
    [of_another_axis, of_another_array, of_a_rounded_copy, of_cubes, by_a_square_root, of_changing_params],
)
def test_other_expressions_are_not_fused_into_a_norm(body: Callable[..., Tensor], dtype: torch.dtype) -> None:
    ours, names = run(lambda x, _, p: body(x, p), dtype)
    assert not names & {"rms_norm", "aten.rms_norm"}
    assert close(ours, eagerly(lambda x, _, p: body(x, p), dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_product_with_a_norm_is_no_weight(dtype: torch.dtype) -> None:
    ours, names = run(lambda x, _, p: with_weight_per_row(x, p), dtype)
    assert "rms_norm" not in names
    assert close(ours, eagerly(lambda x, _, p: with_weight_per_row(x, p), dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_in_float32_is_not_fused(dtype: torch.dtype) -> None:
    def body(x: Tensor, _: Tensor, p: Params) -> Tensor:
        wide = x.float()
        return (p["weight"] * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS))).to(x.dtype)

    assert "rms_norm" not in run(body, dtype)[1]
    assert "rms_norm" in run(body, torch.float32)[1]


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Within a few roundings of the dtype: the program computes in another order."""
    unit = torch.finfo(ours.dtype).eps
    return bool(((ours.double() - theirs.double()).abs() <= 8 * unit * (1 + theirs.double().abs())).all())


# ── rotations ─────────────────────────────────────────────────────────────────────────────────────────────────


def rotate_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def angles(positions: Tensor, p: Params, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    radians = positions[..., None].float() * p["inverse"]
    both = torch.cat((radians, radians), dim=-1)
    return (both.cos() * 1.25).to(dtype).unsqueeze(1), (both.sin() * 1.25).to(dtype).unsqueeze(1)


def ops_angles(positions: Tensor, p: Params) -> tuple[Tensor, Tensor]:
    cos, sin = ops.rotary_angles(positions[..., None].float() * p["inverse"])
    return cos * 1.25, sin * 1.25


def split_heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], HEADS, DIM).transpose(1, 2)


def rotated(x: Tensor, positions: Tensor, p: Params) -> Tensor:
    q, (cos, sin) = split_heads(x), angles(positions, p)
    return ((q * cos) + (rotate_half(q) * sin)).to(x.dtype).transpose(1, 2)


def rotated_wide(x: Tensor, positions: Tensor, p: Params) -> Tensor:
    q, (cos, sin) = split_heads(x), angles(positions, p)
    return (sin * rotate_half(q.float()) + cos * q.float()).to(x.dtype).transpose(1, 2)


def rotated_in_part(x: Tensor, positions: Tensor, p: Params) -> Tensor:
    q, (cos, sin) = split_heads(x), angles(positions, p)
    cos, sin = (torch.cat((each[..., :4], each[..., :4]), -1) for each in (cos, sin))
    turning = q[..., :8]
    turned = ((turning * cos) + (rotate_half(turning) * sin)).to(x.dtype)
    return torch.cat((turned, q[..., 8:]), -1).transpose(1, 2)


def rotated_in_part_by_op(x: Tensor, positions: Tensor, p: Params) -> Tensor:
    cos, sin = ops_angles(positions, p)
    halves = torch.cat((cos[..., :4], cos[..., :4]), -1), torch.cat((sin[..., :4], -sin[..., :4]), -1)
    return ops.rotate(split_heads(x), *halves).transpose(1, 2)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("body", [rotated, rotated_wide, rotated_in_part])
def test_a_rotation_in_float32(body: Body, dtype: torch.dtype, tokens: int) -> None:
    def plain(x: Tensor, positions: Tensor, p: Params) -> Tensor:
        return ops.rotate(split_heads(x), *ops_angles(positions, p)).transpose(1, 2)

    ours, names = run(body, dtype, tokens=tokens)
    expected = by_op(rotated_in_part_by_op if body is rotated_in_part else plain, dtype, tokens=tokens)
    assert "rotate" in names
    # The scaled sines are the same numbers; cos and sin themselves are within a unit of one another.
    assert close(ours, expected)
    assert close(ours, eagerly(body, dtype, tokens=tokens))


def test_two_rotations_share_their_angles_and_one_call_each() -> None:
    def body(x: Tensor, positions: Tensor, p: Params) -> Tensor:
        cos, sin = angles(positions, p)
        turned = [(h * cos) + (rotate_half(h) * sin) for h in (split_heads(x), split_heads(x * 2))]
        return torch.stack(turned)[0].transpose(1, 2) + turned[1].transpose(1, 2)

    ours, names = run(body, torch.float32)
    assert "rotate" in names
    assert close(ours, eagerly(body, torch.float32))


def different_halves(x: Tensor, positions: Tensor, p: Params) -> Tensor:
    q, radians = split_heads(x), positions[..., None].float() * p["inverse"]
    both = torch.cat((radians, 2 * radians), dim=-1).unsqueeze(1)
    return (q * both.cos() + rotate_half(q) * both.sin()).to(x.dtype).transpose(1, 2)


def rotated_in_reverse(x: Tensor, positions: Tensor, p: Params) -> Tensor:
    q, (cos, sin) = split_heads(x), angles(positions, p)
    half = DIM // 2
    other = torch.cat((q[..., half:], -q[..., :half]), -1)
    return (q * cos + other * sin).to(x.dtype).transpose(1, 2)


def halves_of_another(x: Tensor, positions: Tensor, p: Params) -> Tensor:
    q, (cos, sin) = split_heads(x), angles(positions, p)
    return (q * cos + rotate_half(q + 1) * sin).to(x.dtype).transpose(1, 2)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("body", [different_halves, rotated_in_reverse, halves_of_another])
def test_other_expressions_are_not_fused_into_a_rotation(body: Body, dtype: torch.dtype) -> None:
    ours, names = run(body, dtype)
    assert "rotate" not in names
    assert close(ours, eagerly(body, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rotation_with_rounded_products_is_not_fused(dtype: torch.dtype) -> None:
    def body(x: Tensor, positions: Tensor, p: Params) -> Tensor:
        q, (cos, sin) = split_heads(x), angles(positions, p, dtype)
        return ((q * cos) + (rotate_half(q) * sin)).transpose(1, 2)

    ours, names = run(body, dtype)
    assert "rotate" not in names
    assert close(ours, eagerly(body, dtype))


# ── gates ─────────────────────────────────────────────────────────────────────────────────────────────────────

GATES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., Tensor], str]] = {
    "silu": (F.silu, ops.swiglu, "swiglu"),
    "gelu": (F.gelu, lambda a, b: ops.geglu(a, b, approximate=False), "geglu"),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), ops.geglu, "geglu"),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", GATES)
def test_a_gate(name: str, dtype: torch.dtype) -> None:
    activation, op, op_name = GATES[name]

    def spelled(x: Tensor, _: Tensor, p: Params) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return up * activation(gate)

    ours, names = run(spelled, dtype)
    assert torch.equal(ours, by_op(lambda x, _, p: op(*x.chunk(2, dim=-1)), dtype))
    assert names == {"aten.embedding", op_name}


def test_a_gate_of_another_shape_is_not_fused() -> None:
    def body(x: Tensor, _: Tensor, p: Params) -> Tensor:
        return F.silu(x) * p["weight"]

    ours, names = run(body, torch.float32)
    assert "swiglu" not in names
    assert close(ours, eagerly(body, torch.float32))


# ── products with params that do not change ───────────────────────────────────────────────────────────────────


def linear(x: Tensor, _: Tensor, p: Params) -> Tensor:
    return F.linear(x, p["matrix"])


def matmul(x: Tensor, _: Tensor, p: Params) -> Tensor:
    return x @ p["matrix"].T


def addmm(x: Tensor, _: Tensor, p: Params) -> Tensor:
    return torch.addmm(p["bias"][:20], x.reshape(-1, WIDTH), p["matrix"].T)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("body", [linear, matmul, addmm])
def test_frozen_params_are_packed(body: Body, dtype: torch.dtype) -> None:
    def packed(x: Tensor, _: Tensor, p: Params) -> Tensor:
        return ops.linear(x, ops.pack(p["matrix"]), p["bias"][:20] if body is addmm else None)

    assert "packed_linear" not in run(body, dtype)[1]
    ours, names = run(body, dtype, frozen=True)
    assert names == {"aten.embedding", "packed_linear"}
    assert torch.equal(ours, by_op(packed, dtype))


def test_programs_for_every_shape_share_the_packed_copies() -> None:
    weights, cache = params(torch.float32), torch.zeros(1, 1)
    program = onward.compile(forward_of(linear), params=weights, cache=cache, frozen=True)
    expected = [F.linear(F.embedding(inputs(1, t)[0], weights["table"]), weights["matrix"]) for t in range(1, 9)]
    for tokens in range(1, 9):
        assert close(program(*inputs(1, tokens), cache)[0], expected[tokens - 1])
    run_of: Any = program.executable
    assert len(run_of._programs.packed._packed) == 1


def test_params_that_may_change_are_read_at_every_call() -> None:
    weights, cache = params(torch.float32), torch.zeros(1, 1)
    program = onward.compile(forward_of(linear), params=weights, cache=cache)
    before, _ = program(*inputs(1, 3), cache)
    weights["matrix"].mul_(2)
    assert torch.equal(program(*inputs(1, 3), cache)[0], 2 * before)


def test_a_third_power_has_a_kernel() -> None:
    def gelu_new(x: Tensor, _: Tensor, p: Params) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

    ours, _ = run(gelu_new, torch.float32)
    assert close(ours, eagerly(gelu_new, torch.float32))
