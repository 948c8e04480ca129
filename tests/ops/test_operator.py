"""Every op works wherever torch does: compiled, under autograd, with fake tensors. And the choice of its form."""

import os
import subprocess
import sys

import pytest
import torch
from gradient_cases import CASES
from rounding import UNIT, random, same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from onward import native, ops
from onward.errors import NativeUnavailableError, RequestError
from onward.ops.operator import Operator

WEIGHT, MASK, MATRIX, SINKS = random(33, 32, seed=3), random(5, 5), random(2, 5), torch.zeros(2)
COS, SIN = ops.rotary_angles(random(2, 5, 8))


OPS = {
    "rms_norm": lambda x: ops.rms_norm(x, torch.ones(32)),
    "rms_norm of 1 + w": lambda x: ops.rms_norm(x, torch.ones(32), offset=1.0),
    "layer_norm": lambda x: ops.layer_norm(x, torch.ones(32), torch.zeros(32)),
    "add": lambda x: ops.add(x, x + 1),
    "swiglu": lambda x: ops.swiglu(x, x + 1),
    "sigmoid_gate": lambda x: ops.sigmoid_gate(x, x + 1),
    "geglu": lambda x: ops.geglu(x, x + 1),
    "rope": lambda x: ops.rope(x, 3, dims=16),
    "rotate": lambda x: ops.rotate(x, COS, SIN),
    "attention": lambda x: ops.scaled_dot_product_attention(x, x[:, :1], x[:, 1:], causal=True),
    "attention with a mask and sinks": lambda x: ops.scaled_dot_product_attention(x, x, x, mask=MASK, sinks=SINKS),
    "attention with a softcap": lambda x: ops.scaled_dot_product_attention(x, x, x, causal=True, softcap=2.0),
    "attention with narrower values": lambda x: ops.scaled_dot_product_attention(x, x, x[..., :7]),
    "linear": lambda x: ops.linear(x, WEIGHT),
    "einsum": lambda x: ops.einsum("bhtd,bhsd,hs->bhts", x, x, MATRIX),
}


def _x():
    return random(2, 2, 5, 32)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.stride(3)
def test_compiled_equals_eager(name):
    torch.compiler.reset()
    compiled = torch.compile(OPS[name], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(_x()), OPS[name](_x()))


@pytest.mark.parametrize("name", CASES)
def test_the_layout_of_arguments_changes_no_bit(name, form, monkeypatch):
    if form == "definition":
        pytest.skip("torch's operators round by layout")
    case = CASES[name]
    with torch.no_grad():
        want = case.call(case.tensors(torch.float32))
        call, strided = Operator.__call__, 0

        def with_strided_arguments(self, *arguments):
            nonlocal strided
            strided += 1
            return call(self, *(_strided(each) if isinstance(each, Tensor) else each for each in arguments))

        monkeypatch.setattr(Operator, "__call__", with_strided_arguments)
        got = case.call(case.tensors(torch.float32))
    assert same_bits(got, want)
    assert strided or name in ("einsum", "embedding", "linear", "linear_by_head")  # these call torch's own


def _strided(tensor: Tensor) -> Tensor:
    """The same numbers, no two of them neighbours in memory."""
    return torch.stack([tensor, tensor], -1)[..., 0]


@pytest.mark.parametrize("name", OPS)
def test_the_fake_form_has_the_shape_and_layout_of_the_result(name):
    real = OPS[name](_x())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = OPS[name](mode.from_tensor(_x()))
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize("name", OPS)
def test_gradients_equal_those_of_the_definition(name, form):
    def gradient(form_):
        ops.choose(form_)
        x = _x().requires_grad_()
        result = OPS[name](x)
        (result * random(*result.shape, seed=9)).sum().backward()
        return x.grad

    exact = gradient("definition").double()
    # Both round a few times between an input and its gradient.
    assert float((gradient(form).double() - exact).norm() / exact.norm()) <= 8 * UNIT[torch.float32]


def test_cached_attention_is_one_node_for_all_offsets():
    q, keys, values = random(2, 4, 1, 16), random(2, 2, 64, 16, seed=1), random(2, 2, 64, 16, seed=2)
    run = torch.compile(ops.cached_attention, fullgraph=True, backend="aot_eager")
    for offsets in (torch.tensor([0, 5], dtype=torch.int32), torch.tensor([63, 7], dtype=torch.int32)):
        assert torch.equal(run(q, keys, values, offsets), ops.cached_attention(q, keys, values, offsets))


def test_a_packed_weight_traces():
    weight = ops.pack(WEIGHT.to(torch.bfloat16))
    if not isinstance(weight, torch.Tensor) and ops.choice().form == "native":
        run = torch.compile(lambda x: ops.linear(x, weight), fullgraph=True, backend="aot_eager")
        x = random(3, 32, dtype=torch.bfloat16)
        assert torch.equal(run(x), ops.linear(x, weight))


def test_argmax_returns_the_first_maximum_or_the_first_nan():
    assert ops.argmax(torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, 0.0]])).tolist() == [1, 0]
    assert ops.argmax(torch.tensor([[1.0, float("nan"), 3.0]])).tolist() == [1]
    x = random(3, 5000, dtype=torch.bfloat16)
    assert torch.equal(ops.argmax(x), x.argmax(-1))


def test_choice_reports_the_chosen_form(form):
    expected = ("definition", "none") if form == "definition" else ("native", form)
    assert ops.choice() == expected


def test_an_unknown_form_is_an_error():
    with pytest.raises(RequestError, match=r"native, definition.*'sse'"):
        ops.choose("sse")


def test_the_environment_variable_chooses_the_form():
    code = "from onward import ops; print(*ops.choice())"
    environment = os.environ | {"ONWARD_OPS": "definition"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["definition", "none"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.rms_norm(torch.ones(2, 3), torch.ones(4)), r"\[2, 3\].*\[4\]"),
        (lambda: ops.layer_norm(torch.ones(2, 3), torch.ones(3), torch.ones(2)), r"\[2, 3\].*\[3\].*\[2\]"),
        (lambda: ops.swiglu(torch.ones(2, 3), torch.ones(2, 4)), r"\[2, 3\].*\[2, 4\]"),
        (lambda: ops.linear(torch.ones(2, 3), torch.ones(5, 4)), r"\[5, 4\].*\[2, 3\]"),
        (lambda: ops.linear(torch.ones(2, 3), torch.ones(5, 3).bfloat16()), "bfloat16.*float32"),
        (lambda: ops.linear(torch.ones(2, 3), ops.pack(torch.ones(5, 3)), torch.ones(5).half()), r"bias torch.float16"),
        (lambda: ops.linear(torch.ones(2, 3), torch.ones(5, 3), torch.ones(4)), r"\[5, 3\].*bias torch.float32 \[4\]"),
        (lambda: ops.rope(torch.ones(1, 1, 2, 4), 0, dims=6), r"dims 6.*\[1, 1, 2, 4\]"),
        (lambda: ops.rope(torch.ones(1, 1, 2, 4), torch.tensor([0, 1]), dims=4), r"\[2\].*\[1, 1, 2, 4\]"),
        (lambda: ops.rope(torch.ones(1, 1, 2, 4), 0, dims=4, inv_freqs=torch.ones(3)), r"\[2\].*\[3\]"),
        (lambda: ops.rotate(torch.ones(1, 1, 2, 4), torch.ones(1, 3, 4), torch.ones(1, 3, 4)), r"\[1, 3, 4\]"),
        (
            lambda: ops.rotate(torch.ones(1, 1, 2, 4), torch.ones(1, 2, 4).bfloat16(), torch.ones(1, 2, 4).bfloat16()),
            "float32 cos, sin.*bfloat16",
        ),
        (lambda: ops.rotate(torch.ones(1, 1, 2, 4), torch.ones(1, 2, 3), torch.ones(1, 2, 3)), r"2R.*\[1, 2, 3\]"),
        (lambda: ops.einsum("ij,jk->ik", torch.ones(2, 3), torch.ones(4, 5)), r"\[2, 3\], \[4, 5\]"),
        (lambda: ops.scaled_dot_product_attention(*[torch.ones(1, 2, 3, 4)] * 3, window=0), "window.*0"),
        (
            lambda: ops.scaled_dot_product_attention(*[torch.ones(1, 2, 3, 4).double()] * 3),
            r"float32, bfloat16, float16; got q torch.float64",
        ),
        (
            lambda: ops.scaled_dot_product_attention(*[torch.ones(1, 2, 3, 4)] * 3, mask=torch.ones(2, 3)),
            r"\[1, 2, 3, 3\].*\[2, 3\]",
        ),
        (
            lambda: ops.scaled_dot_product_attention(*[torch.ones(1, 2, 3, 4)] * 3, sinks=torch.ones(3)),
            r"sinks.*\[3\]",
        ),
    ],
)
def test_wrong_shapes_are_named(call, message):
    with pytest.raises(RequestError, match=message):
        call()


@pytest.mark.skipif(bool(native.available_isas()), reason="there is a native library")
def test_native_needs_a_library():
    with pytest.raises(NativeUnavailableError, match="compiler"):
        ops.choose("native")
