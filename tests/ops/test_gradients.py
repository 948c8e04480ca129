"""Every op has the right gradient, or raises if one is needed: in every dtype and form, however it is called."""

import pytest
import torch
from gradient_cases import CASES, Case
from rounding import UNIT, random, same_bits
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from onward import ops
from onward.errors import RequestError
from onward.ops import activation
from onward.ops.operator import FAKES, Operator
from onward.quantization import quantize_int4, quantize_int8, quantize_iq4_nl
from onward.sampling import History, Sampler, SamplingParams, logprobs

# torch's own, when forward mode is first used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

DTYPES = (torch.float32, torch.bfloat16)

# Roundings between an input and its gradient, one after the other: an op computes in float32 or rounds after each of
# its few steps, and its backward does the same.
ROUNDINGS = 8


def _leaves(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = case.tensors(dtype)
    return {name: t.requires_grad_() if name in case.inputs else t for name, t in tensors.items()}


def _gradients(result: Tensor, leaves: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    weights = random(*result.shape, seed=9).to(result.dtype)
    return dict(
        zip(case.inputs, torch.autograd.grad((result * weights).sum(), [leaves[n] for n in case.inputs]), strict=True)
    )


def _exact_gradients(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """In float64, by the formula, at the numbers that the dtype has."""
    leaves = {name: t.detach().double() for name, t in case.tensors(dtype).items()}
    leaves |= {name: leaves[name].requires_grad_() for name in case.inputs}
    result = case.formula(leaves)
    weights = random(*result.shape, seed=9).to(dtype).double()
    return dict(
        zip(case.inputs, torch.autograd.grad((result * weights).sum(), [leaves[n] for n in case.inputs]), strict=True)
    )


def _assert_near(got: dict[str, Tensor], exact: dict[str, Tensor], unit: float) -> None:
    assert got.keys() == exact.keys()
    for name, gradient in exact.items():
        error = (got[name].double() - gradient).norm() / gradient.norm()
        assert error <= ROUNDINGS * unit, f"{name}: {error / unit:.3g} roundings"


def _unit(case: Case, dtype: torch.dtype) -> float:
    """The relative size of one rounding. Rounding x to 8 bits is one of 1/254 of its largest number."""
    return max(UNIT[dtype], 1 / 254 if case.rounds else 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_the_formula_in_float64(name, dtype):
    case = CASES[name]
    leaves = _leaves(case, dtype)
    got = _gradients(case.call(leaves), leaves, case)
    _assert_near(got, _exact_gradients(case, dtype), _unit(case, dtype))


@pytest.mark.parametrize("name", ["swiglu", "geglu", "geglu in tanh"])
def test_gradients_of_gated_activations_in_blocks(name, monkeypatch):
    monkeypatch.setattr(activation, "_GRADIENT_BLOCK", 7)  # of 24 elements
    for dtype in DTYPES:
        test_gradients_equal_the_formula_in_float64(name, dtype)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.rounds])
def test_gradients_equal_finite_differences_of_the_kernels(name):
    case = CASES[name]
    leaves = _leaves(case, torch.float32)
    gradients = _gradients(case.call(leaves), leaves, case)
    size = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5

    def value(step: float) -> tuple[float, float]:
        """The weighted sum of the results a step along the gradient, and the sum of the magnitudes in it."""
        moved = {
            n: t + (step / size) * gradients[n] if n in gradients else t for n, t in case.tensors(torch.float32).items()
        }
        with torch.no_grad():
            result = case.call(moved).double()
        terms = result * random(*result.shape, seed=9)
        return float(terms.sum()), float(terms.abs().sum())

    step = 2.0**-6
    (far, _), (back, _) = value(2 * step), value(-2 * step)
    (near, magnitude), (before, _) = value(step), value(-step)
    wide, narrow = (far - back) / (4 * step), (near - before) / (2 * step)
    # Halving the step takes the error of a difference to a quarter. Each result is rounded a few times.
    tolerance = abs(wide - narrow) + ROUNDINGS * UNIT[torch.float32] * magnitude / step
    assert tolerance < 0.05 * size
    assert abs(narrow - size) <= tolerance


@pytest.mark.parametrize("name", CASES)
def test_a_direct_call_of_the_registered_op_has_the_same_gradients(name, monkeypatch):
    case = CASES[name]
    leaves = _leaves(case, torch.float32)
    expected = _gradients(case.call(leaves), leaves, case)
    monkeypatch.setattr(Operator, "__call__", lambda self, *arguments: self._registered(*arguments))
    got = _gradients(case.call(leaves), leaves, case)
    assert all(torch.equal(got[n], gradient) for n, gradient in expected.items())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.constants and not case.reverse_only])
def test_torch_func_and_checkpoints_have_the_same_gradients(name):
    case = CASES[name]
    leaves = _leaves(case, torch.float32)
    expected = _gradients(case.call(leaves), leaves, case)
    result = checkpoint(lambda: case.call(leaves), use_reentrant=False)
    assert all(torch.equal(g, expected[n]) for n, g in _gradients(result, leaves, case).items())

    def loss(inputs: dict[str, Tensor]) -> Tensor:
        result = case.call({**case.tensors(torch.float32), **inputs})
        return (result * random(*result.shape, seed=9)).sum()

    inputs = {n: leaves[n].detach() for n in case.inputs}
    _assert_near(torch.func.grad(loss)(inputs), {n: g.double() for n, g in expected.items()}, UNIT[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_have_the_same_bits_with_and_without_autograd(name, dtype):
    if ops.choice().form == "definition":
        pytest.skip("without kernels, a form without a gradient may read values to do less")
    case = CASES[name]
    with torch.no_grad():
        expected = case.call(case.tensors(dtype))
    assert same_bits(case.call(_leaves(case, dtype)).detach(), expected)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.reverse_only])
def test_only_arguments_that_require_a_gradient_get_one(name):
    case = CASES[name]
    leaves = _leaves(case, torch.float32)
    expected = _gradients(case.call(leaves), leaves, case)
    for name in case.inputs:
        alone = {n: t.detach().requires_grad_(n == name) for n, t in leaves.items()}
        result = case.call(alone)
        (result * random(*result.shape, seed=9)).sum().backward()
        assert [n for n, t in alone.items() if t.grad is not None] == [name]
        _assert_near({name: alone[name].grad}, {name: expected[name].double()}, UNIT[torch.float32])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.reverse_only and not case.rounds])
def test_gradients_of_gradients(name):
    """That of the sum of squares of the gradient: by the op, and by the formula in float64."""
    case = CASES[name]

    def second(call, leaves):
        result = call(leaves)
        inputs = [leaves[n] for n in case.inputs]
        weights = random(*result.shape, seed=9).to(result.dtype)
        first = torch.autograd.grad((result * weights).sum(), inputs, create_graph=True)
        total = sum(g.square().sum() for g in first if g.requires_grad)
        if not isinstance(total, Tensor):  # linear in every input
            return {}
        found = torch.autograd.grad(total, inputs, allow_unused=True)
        return {n: g for n, g in zip(case.inputs, found, strict=True) if g is not None}

    exact = {n: t.detach().double() for n, t in case.tensors(torch.float32).items()}
    expected = second(case.formula, {n: t.requires_grad_() if n in case.inputs else t for n, t in exact.items()})
    got = second(case.call, _leaves(case, torch.float32))
    size = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
    for n in expected.keys() | got.keys():
        error = got.get(n, torch.zeros(())).double() - expected.get(n, torch.zeros(()))
        assert float(error.norm()) <= 8 * ROUNDINGS * UNIT[torch.float32] * max(size, 1.0)


@pytest.mark.parametrize("pack", [ops.pack, quantize_int8, quantize_iq4_nl])
def test_torch_func_differentiates_a_product_with_a_packed_weight(pack):
    weight, x, bias, factors = pack(random(5, 64)), random(3, 64), random(5), random(3, 5, seed=9)
    if not isinstance(weight, ops.NativeWeight | ops.QuantizedWeight):
        pytest.skip("torch.func does not take torch's own blocked layout")
    values = weight.dequantize() if isinstance(weight, ops.QuantizedWeight) else random(5, 64)
    expected = factors @ values

    def loss(x: Tensor) -> Tensor:
        return (ops.linear(x, weight, bias) * factors).sum()

    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    torch.testing.assert_close(torch.func.jacfwd(loss)(x), expected)
    rows = torch.func.vmap(torch.func.grad(lambda row: (ops.linear(row, weight, bias)).sum()))(x)
    torch.testing.assert_close(rows, values.sum(0).expand(3, 64))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.reverse_only])
def test_forward_mode_has_the_same_derivative(name):
    case = CASES[name]
    leaves = _leaves(case, torch.float32)
    gradients = _gradients(case.call(leaves), leaves, case)
    tensors = {n: t.detach() for n, t in leaves.items()}
    with forward_ad.dual_level():
        duals = {n: forward_ad.make_dual(tensors[n], gradients[n]) for n in case.inputs}
        result, tangent = forward_ad.unpack_dual(case.call({**tensors, **duals}))
    derivative = float((tangent.double() * random(*result.shape, seed=9)).sum())
    size = sum(float(g.double().square().sum()) for g in gradients.values())
    assert derivative == pytest.approx(size, rel=2 * ROUNDINGS * UNIT[torch.float32])


# ── ops without a gradient ────────────────────────────────────────────────────────────────────────────────────


def _cache_write(dtype: torch.dtype, table: bool) -> dict[str, object]:
    cache = torch.zeros(2, 2, 64, 8, dtype=dtype)
    blocks = torch.tensor([[1], [0]], dtype=torch.int32) if table else None
    new = random(2, 2, 2, 8).to(dtype)
    return {"cache": cache, "new": new, "offsets": torch.tensor([0, 5], dtype=torch.int32), "table": blocks}


def _state(*width: int, dtype: torch.dtype = torch.float32) -> dict[str, object]:
    block_numbers, offsets = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return {
        "state": torch.zeros(1, 2, *width, dtype=dtype),
        "block_numbers": block_numbers,
        "offsets": offsets,
        "rows": None,
    }


def _convolved(dtype: torch.dtype) -> dict[str, object]:
    floats = {"x": random(1, 3, 4).to(dtype), "weight": random(2, 4).to(dtype), "bias": random(4).to(dtype)}
    return {**floats, **_state(17, 4, dtype=dtype), "silu": True}


def _delta(dtype: torch.dtype) -> dict[str, object]:
    floats = {"qkv": random(1, 3, 12).to(dtype), "decay": random(1, 3, 1).to(dtype), "beta": random(1, 3, 1).to(dtype)}
    rates = {"A_log": random(1), "decay_bias": random(1)}
    width = ops.gated_delta.__globals__["state_width"](4, 4)
    return {**floats, **rates, **_state(1, width), "key_heads": 1, "key_dim": 4}


def _scanned(dtype: torch.dtype) -> dict[str, object]:
    floats = {"mixed": random(1, 3, 12).to(dtype), "dt": random(1, 3, 1).to(dtype)}
    rates = {"A_log": random(1), "step_bias": random(1), "skip": random(1)}
    width = ops.ssd.__globals__["ssd_state_width"](1, 4, 4)
    numbers = {"groups": 1, "state_dim": 4, "least": 0.0, "most": float("inf")}
    return {**floats, **rates, **_state(1, width), **numbers}


def _ssd(**arguments):
    limits = arguments.pop("least"), arguments.pop("most")
    return ops.ssd(**arguments, limits=limits)


# The public function, and the arguments of the registered op by name, in its order.
REFUSED = {
    "write_cache": (ops.write_cache, lambda dtype: _cache_write(dtype, table=False)),
    "write_cache over blocks": (ops.write_cache, lambda dtype: _cache_write(dtype, table=True)),
    "short_conv": (ops.short_conv, _convolved),
    "gated_delta": (ops.gated_delta, _delta),
    "ssd": (_ssd, _scanned),
}
FLOATS = [
    (name, argument)
    for name, (_, arguments) in REFUSED.items()
    for argument, value in arguments(torch.float32).items()
    if isinstance(value, Tensor) and value.is_floating_point()
]


def _in_order(name: str, arguments: dict[str, object]) -> list[object]:
    op = getattr(torch.ops.onward, name.split()[0]).default
    return [arguments[each.name] for each in op._schema.arguments]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "argument"), FLOATS)
def test_in_place_ops_raise_if_a_gradient_is_required(name, argument, dtype):
    public, arguments = REFUSED[name]
    if dtype == torch.float64 and not name.startswith("write_cache"):
        pytest.skip("it takes no float64")
    before = arguments(dtype)
    message = f"^{name.split()[0]} has no gradient, but autograd follows {argument}: .*torch.no_grad.*train with"

    def follow(call):
        """Ask for the gradient by one argument in every way."""
        tensor = before[argument].clone()
        yield lambda: call({**before, argument: tensor.clone().requires_grad_()})
        yield lambda: torch.func.grad(lambda x: (call({**before, argument: x}), x.sum())[1])(tensor)
        yield lambda: torch.func.jvp(lambda x: (call({**before, argument: x}), x.sum())[1], (tensor,), (tensor,))
        yield lambda: _with_tangent(call, before, argument)

    def follow_through_vmap():
        """Within vmap a tensor does not say itself that a transform outside follows it."""
        rows = torch.stack([before[argument], before[argument]])
        sums = torch.func.vmap(lambda x: (public(**{**before, argument: x}), x.sum())[1])
        yield lambda: sums(rows.clone().requires_grad_())
        yield lambda: torch.func.grad(lambda x: sums(x).sum())(rows)
        yield lambda: torch.func.jvp(sums, (rows,), (rows,))

    for way in follow_through_vmap():
        with pytest.raises(RequestError, match=message):
            way()
    for call in (lambda a: public(**a), lambda a: getattr(torch.ops.onward, name.split()[0])(*_in_order(name, a))):
        for way in follow(call):
            with pytest.raises(RequestError, match=message):
                way()
    assert all(torch.equal(new, before[n]) for n, new in arguments(dtype).items() if isinstance(new, Tensor))


def _with_tangent(call, arguments, argument):
    with forward_ad.dual_level():
        call({**arguments, argument: forward_ad.make_dual(arguments[argument], arguments[argument])})


@pytest.mark.parametrize("name", REFUSED)
def test_a_write_within_vmap_equals_separate_writes(name):
    public, arguments = REFUSED[name]
    inputs = arguments(torch.float32)
    stacked = {n: torch.stack([v, 2 * v]) for n, v in inputs.items() if isinstance(v, Tensor) and n != "table"}

    def result(tensors: dict[str, Tensor]) -> Tensor:
        copies = {n: t.clone() for n, t in tensors.items()}
        out = public(**{**inputs, **copies})
        return copies["cache"] if out is None else out

    together = torch.func.vmap(result)(stacked)
    for index in range(2):  # as many as rows and heads, so that axes that are mixed up still fit
        torch.testing.assert_close(together[index], result({n: t[index] for n, t in stacked.items()}))


@pytest.mark.parametrize("name", REFUSED)
def test_in_place_ops_run_without_gradients_and_bump_the_version(name):
    public, arguments = REFUSED[name]
    values = {
        n: v.requires_grad_() if n in ("new", "x", "qkv", "mixed") else v for n, v in arguments(DTYPES[0]).items()
    }
    target = values["cache" if "cache" in values else "state"]
    for context in (torch.no_grad, torch.inference_mode):
        writes = target._version
        with context():
            public(**values)
        assert target._version > writes
        assert not target.requires_grad
    assert bool(target.any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packing_and_quantizing_raise_if_a_gradient_is_required(dtype):
    weight = random(3, 32).to(dtype).requires_grad_()
    for call in (
        lambda: ops.pack(weight),
        lambda: ops.pack_experts(weight.unsqueeze(0)),
        lambda: ops.pack_experts([weight.detach(), weight]),
        lambda: quantize_int8(weight),
        lambda: quantize_int4(weight),
        lambda: quantize_iq4_nl(weight),
        lambda: logprobs(weight, torch.tensor([0, 1, 2])),
    ):
        with pytest.raises(RequestError, match="has no gradient"):
            call()
        with torch.no_grad():
            call()


def test_vmap_does_not_hide_a_gradient():
    weight, pick = random(3, 32), torch.tensor(0)
    rows = torch.func.vmap(lambda row: logprobs(row, pick).chosen)
    rounded = torch.func.vmap(lambda matrix: quantize_int8(matrix).dequantize())
    for call in (
        lambda: rows(weight.clone().requires_grad_()),
        lambda: torch.func.grad(lambda w: rows(w).sum())(weight),
        lambda: torch.func.jvp(rows, (weight,), (weight,)),
        lambda: torch.func.grad(lambda w: rounded(w.unsqueeze(0)).sum())(weight),
    ):
        with pytest.raises(RequestError, match="has no gradient"):
            call()
    assert torch.equal(rows(weight), logprobs(weight, pick.expand(3)).chosen)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"typical_p": 0.8},
        {"repetition_penalty": 1.2},
        {"logit_bias": {3: 1.5}},
    ],
    ids=str,
)
def test_the_scores_of_a_sampler_have_gradients(options):
    sampler = Sampler([SamplingParams(**{"temperature": 1.0, "seed": 0, **options})], torch.device("cpu"))
    logits = random(1, 12).requires_grad_()
    histories = [History([1, 2, 3])]

    def value(at: Tensor) -> Tensor:
        scores = sampler.scores(at, torch.zeros(1, dtype=torch.int64), histories)
        return (scores.masked_fill(scores.isinf(), 0.0) * random(1, 12, seed=9)).sum()

    (gradient,) = torch.autograd.grad(value(logits), logits)
    step = 2.0**-10 * gradient / gradient.norm()  # too small to change which ids are kept
    with torch.no_grad():
        difference = float(value(logits + step) - value(logits - step)) / 2.0**-9
    # The scores are linear in the logits where they are kept; each is rounded a few times.
    magnitude = float((logits.detach().abs() * random(1, 12, seed=9).abs()).sum())
    assert abs(difference - float(gradient.norm())) <= ROUNDINGS * UNIT[torch.float32] * 2**10 * magnitude


# ── all of them ───────────────────────────────────────────────────────────────────────────────────────────────

# Ops of integers and codes, or whose results are ids: nothing that could have a gradient.
_WITHOUT = {"argmax", "quantized_rows"}
# Ops with tests of their own above.
_OTHERS = {"packed_rows", "rotary_angles", "pack", "pack_experts"}
_COVERED = {name.split()[0].rstrip(",") for name in (*CASES, *REFUSED)} | _WITHOUT | _OTHERS


def test_every_registered_op_is_covered():
    assert {op.name().removeprefix("onward::") for op in FAKES} <= _COVERED


def test_every_public_op_is_covered():
    public = {name for name in ops.__all__ if name.islower()} - {"choice", "choose", "scaled_dot_product_attention"}
    assert public <= _COVERED


def test_rows_of_a_packed_weight_have_a_gradient():
    weight, ids = ops.pack(random(20, 8)), torch.tensor([3, 17, 3])
    if isinstance(weight, ops.NativeWeight):
        data = weight.data.requires_grad_()
        (gradient,) = torch.autograd.grad(ops.embedding(ids, weight).sum(), data)
        expected = torch.zeros(20, 8).index_add_(0, ids, torch.ones(3, 8))
        assert torch.equal(ops.NativeWeight(gradient, 20, 8).unpack(), expected)


def test_an_index_has_no_gradient():
    assert not ops.argmax(random(2, 5).requires_grad_()).requires_grad
    chosen, weights = ops.top_experts(random(2, 5).requires_grad_(), 2)
    assert weights.requires_grad
    assert not chosen.requires_grad
