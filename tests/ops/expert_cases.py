"""Layers of experts for the tests: random ones in every format, and their results in float64."""

import torch
from rounding import UNIT, random
from torch import Tensor

from onward import ops
from onward.quantization import quantize_int4, quantize_int8, quantize_iq4_nl
from onward.quantization.rounding import quantize_weight

DTYPE_OF = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZERS = {"int8": quantize_int8, "int4": quantize_int4, "iq4_nl": quantize_iq4_nl}
FORMATS = (*DTYPE_OF, *QUANTIZERS)
# (experts, inner width, width, chosen, tokens)
SIZES = ((1, 1, 1, 1, 1), (4, 17, 33, 2, 1), (5, 100, 130, 5, 3), (8, 48, 64, 3, 40), (3, 33, 70, 1, 300))


def layer(format: str, experts: int, inner: int, width: int, *, biases: bool = False, seed: int = 0) -> dict:
    """The weights and biases that `ops.experts` takes, stock or quantized."""
    dtype = DTYPE_OF.get(format, torch.float32)
    shapes = {"gate": (experts, inner, width), "up": (experts, inner, width), "down": (experts, width, inner)}
    weights = {
        name: (random(*shape, seed=seed + i) / shape[2] ** 0.5).to(dtype)
        for i, (name, shape) in enumerate(shapes.items())
    }
    if format in QUANTIZERS:
        weights = {
            name: ops.QuantizedExperts.stack([quantize_weight(one, format) for one in stock])
            for name, stock in weights.items()
        }
    if biases:
        weights |= {f"{name}_bias": random(*shape[:2], dtype=dtype, seed=seed + 7) for name, shape in shapes.items()}
    return weights


def packed(weights: dict) -> dict:
    return {name: w if name.endswith("bias") else ops.pack_experts(w) for name, w in weights.items()}


def for_activation(weights: dict, activation: str) -> dict:
    """The weights that an activation takes: "relu2" has no gate."""
    if activation != "relu2":
        return weights
    return {"gate": None} | {name: weight for name, weight in weights.items() if not name.startswith("gate")}


def routes(tokens: int, experts: int, chosen: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return ops.top_experts(random(tokens, experts, seed=seed), chosen, normalize=True)


def stock(weights: object) -> Tensor:
    return (weights if isinstance(weights, Tensor) else weights.dequantize()).to(torch.float64)


def exact_and_bound(x: Tensor, chosen: Tensor, shares: Tensor, weights: dict, activation: str, read) -> tuple:
    """The sum over each token's experts in float64, and how far roundings may be from it.

    read: x as a product with these weights reads it, float32. A product's sums have K + 1 roundings, and 2 of the
    bias; an activation a(g) has a slope below 1.14 and 40 roundings (test_elementwise_kernels.py); its result is
    rounded to half a step of 8 bits or to bfloat16.
    """
    unit, dtype = UNIT[torch.float32], x.dtype
    x = read(x).to(torch.float64)
    quantized = not isinstance(weights["up"], Tensor)
    gated_by = "up" if activation == "relu2" else "gate"
    exact, bound = torch.zeros_like(x), torch.zeros_like(x)
    for index in range(len(stock(weights["up"]))):
        mine = (chosen == index).any(-1)
        share = torch.where(chosen == index, shares, 0).sum(-1, keepdim=True).to(torch.float64)[mine]
        gate, gate_error = _product(x[mine], 0.0, index, weights, gated_by)
        up, up_error = _product(x[mine], 0.0, index, weights, "up")
        activated, factor = _activation(activation, gate, up)
        hidden = activated * factor
        error = 1.14 * gate_error * (factor.abs() + up_error) + activated.abs() * up_error + 40 * unit * hidden.abs()
        if quantized:
            error = error + (hidden.abs() + error).amax(-1, keepdim=True) / 127
        elif dtype == torch.bfloat16:
            error = error + UNIT[dtype] * (hidden.abs() + error)
        out, out_error = _product(hidden, error, index, weights, "down")
        exact[mine] += share * out
        bound[mine] += share.abs() * (out_error + (2 + chosen.shape[-1]) * unit * (out.abs() + out_error))
    return exact, bound + 2 * UNIT[dtype] * (exact.abs() + bound)


def _product(x: Tensor, error: Tensor | float, index: int, weights: dict, name: str) -> tuple[Tensor, Tensor]:
    weight, bias = stock(weights[name])[index], weights.get(f"{name}_bias")
    out, size = x @ weight.T, (x.abs() + error) @ weight.abs().T
    rounding = (weight.shape[1] + 4) * UNIT[torch.float32] * size
    if bias is not None:
        bias = bias[index].to(torch.float64)
        out, rounding = out + bias, rounding + 2 * UNIT[torch.float32] * (out.abs() + bias.abs())
    carried = error @ weight.abs().T if isinstance(error, Tensor) else 0.0
    return out, rounding + carried


def _activation(name: str, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if name == "swiglu":
        return gate * torch.sigmoid(gate), up
    if name == "clamped_swiglu":
        gate = gate.clamp(max=7.0)
        return gate * torch.sigmoid(1.702 * gate), up.clamp(-7.0, 7.0) + 1
    if name == "relu2":
        return gate.relu(), up.relu()
    return torch.nn.functional.gelu(gate, approximate="tanh" if name == "geglu_tanh" else "none"), up
