"""Mixtures of experts: feed-forward blocks of which each token passes through a few (Shazeer et al., arXiv 1701.06538).

Shapes: E experts, C of them chosen for each token, D width of x, I inner width of an expert.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.errors import NativeError, RequestError
from onward.native.interface import Code, Float, Format, Int, Pointer, Structure, kernel
from onward.ops import quantized
from onward.ops.expert_weights import ExpertWeights, NativeExperts, QuantizedExperts, matrix, pack_experts
from onward.ops.kernel_calls import DTYPES, KernelCalls, Operand, Unsupported
from onward.ops.operator import (
    Backward,
    Gradients,
    Operator,
    autocast_dtype,
    autocast_to,
    like_first,
    no_autocast,
    shapes,
    usable_library,
)
from onward.ops.packed import FORMATS as PACKED_FORMATS
from onward.ops.packed import packed_view

ExpertActivation = Literal["swiglu", "geglu", "geglu_tanh", "clamped_swiglu", "relu2"]
ACTIVATIONS: tuple[ExpertActivation, ...] = get_args(ExpertActivation)  # in the order of the codes of onward_experts


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate: ExpertWeights | None,
    up: ExpertWeights,
    down: ExpertWeights,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "swiglu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """The sum over a token's experts of `weight * down(activation(gate(x), up(x)))`.

    Only the weights of chosen experts are read. A token's bits do not depend on its neighbours: its sum is over its own
    experts, in the order of their numbers. Sums and the activation are float32; before each product its input is
    rounded as in `linear`.

    Args:
        x: float [..., D].
        chosen: int32 [..., C], each in 0 … E - 1, and weights: float32 [..., C]; from `top_experts`.
        gate, up: [E, I, D] and down: [E, D, I], all stacked, all from `pack_experts`, or all `QuantizedExperts` of one
            format. Float weights have x's dtype. gate is None for "relu2" only.
        gate_bias, up_bias: float [E, I], or None; down_bias: [E, D]. Of one dtype.
        activation: "swiglu", "geglu" (with the exact gelu), "geglu_tanh", "clamped_swiglu": g * sigmoid(alpha * g) * (u
            + 1) of g = min(gate, limit) and u = up within ±limit (gpt-oss, arXiv 2508.10925), or "relu2": relu(up)^2
            without a gate (arXiv 2109.08668).

    Returns:
        [..., D] in x's dtype.

    Raises:
        RequestError: shapes, dtypes or formats that don't match.
    """
    parts: tuple[Any, ...] = gate, up, down, gate_bias, up_bias, down_bias
    dtype = autocast_dtype(x)
    if dtype is not None:
        product_dtype = up.dtype if isinstance(up, NativeExperts) else dtype  # packed weights keep their dtype
        cast = [autocast_to(product_dtype, part)[0] if isinstance(part, Tensor) else part for part in parts]
        options: dict[str, Any] = dict(zip(("gate_bias", "up_bias", "down_bias"), cast[3:], strict=True))
        options |= {"activation": activation, "alpha": alpha, "limit": limit}
        with no_autocast(x):
            return experts(x.to(product_dtype), chosen, weights, cast[0], cast[1], cast[2], **options).to(dtype)
    _check_routes(x, chosen, weights)
    if activation not in ACTIVATIONS:
        raise RequestError(f"experts: activation is one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    if (gate is None) != (activation == "relu2"):
        got = "no gate" if gate is None else "a gate"
        raise RequestError(f"experts: 'relu2' has no gate, all others require one; got {activation!r} with {got}")
    format = _check_weights(x, parts)
    data = [weight if weight is None or isinstance(weight, Tensor) else weight.data for weight in parts[:3]]
    layer = (*data, *parts[3:], format, up.shape[1], activation, float(alpha), float(limit))
    try:
        return _experts(x, chosen, weights, *layer)
    except NativeError:
        if int(chosen.min()) >= 0 and int(chosen.max()) < up.shape[0]:
            raise
        raise _no_such_expert(chosen, up.shape[0]) from None


def _check_routes(x: Tensor, chosen: Tensor, weights: Tensor) -> None:
    fits = x.dim() > 0 and chosen.dim() == x.dim() and chosen.shape[:-1] == x.shape[:-1] and chosen.shape[-1] > 0
    dtypes = x.dtype in DTYPES and chosen.dtype == torch.int32 and weights.dtype == torch.float32
    if not fits or not dtypes or weights.shape != chosen.shape:
        raise RequestError(
            "experts expects float x [..., D], int32 chosen [..., C] and float32 weights [..., C]; got "
            f"{shapes(x=x, chosen=chosen, weights=weights)}"
        )


def _check_weights(x: Tensor, parts: tuple[Any, ...]) -> str:
    """The format of the weights."""
    width, (_, up, down) = x.shape[-1], parts[:3]
    gate = up if parts[0] is None else parts[0]
    count, inner = tuple(gate.shape)[:2] if len(gate.shape) == 3 else (0, 0)
    expected = [(count, inner, width), (count, inner, width), (count, width, inner)]
    formats = {_format(weight) for weight in (gate, up, down)}
    dtypes = {weight.dtype for weight in (gate, up, down)}
    dtype_fits = dtypes == {x.dtype} or isinstance(gate, QuantizedExperts)
    got = [tuple(weight.shape) for weight in (gate, up, down)]
    if got != expected or count < 1 or inner < 1 or len(formats) != 1 or not dtype_fits:
        raise RequestError(
            f"experts: x {x.dtype} [..., {width}] expects gate and up [E, I, {width}] and down [E, {width}, I], all of "
            f"one format, float ones of x's dtype; got {', '.join(map(str, got))}, {' and '.join(sorted(formats))} of "
            f"{', '.join(map(str, dtypes))}"
        )
    biases = [(bias, shape[:2]) for bias, shape in zip(parts[3:], expected, strict=True) if bias is not None]
    dtypes = {bias.dtype for bias, _ in biases}
    if any(bias.shape != shape for bias, shape in biases) or len(dtypes) > 1 or dtypes - set(DTYPES):
        raise RequestError(
            f"experts: biases are [{count}, {inner}] of gate and up and [{count}, {width}] of down, all of one float "
            f"dtype; got {', '.join(f'{bias.dtype} {list(bias.shape)}' for bias, _ in biases)}"
        )
    return formats.pop()


def _format(weights: ExpertWeights) -> str:
    if isinstance(weights, QuantizedExperts):
        return weights.format
    return "packed" if isinstance(weights, NativeExperts) else "stock"


def format_code(format: str, data: Tensor) -> Format:
    """The kernels' code of a format."""
    return PACKED_FORMATS[data.dtype] if format == "packed" else quantized.FORMATS[format]


def activated(gate: Tensor | None, up: Tensor, activation: str, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """The input of an expert's last product, from float32 gate and up [..., I]; see `experts`."""
    if gate is None:
        return up.relu().square()
    if activation == "swiglu":
        return F.silu(gate) * up
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    return F.gelu(gate, approximate="tanh" if activation == "geglu_tanh" else "none") * up


class _Experts(NamedTuple):
    """The arguments of the operator after x, chosen and weights."""

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    format: str
    inner: int
    activation: str
    alpha: float
    limit: float

    def one(self, index: int, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The tokens x, float32 [T, D], through one expert. dtype: of float weights."""
        return self.through(x, dtype, self.weights_of(index, x.shape[-1]))

    def weights_of(self, index: int, width: int) -> list[Any]:
        """The gate, up and down matrix of one expert and their biases, in float32."""
        sizes = (self.inner, width), (self.inner, width), (width, self.inner)
        matrices = [
            None if data is None else matrix(data, index, self.format, *size)
            for data, size in zip(self[:3], sizes, strict=True)
        ]
        return matrices + [None if bias is None else bias[index].to(torch.float32) for bias in self[3:6]]

    def through(self, x: Tensor, dtype: torch.dtype, weights: Sequence[Any]) -> Tensor:
        """The tokens x, float32 [T, D], through an expert of these weights (`weights_of`)."""
        gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias = weights
        x = self._rounded(x, dtype)
        hidden = F.linear(x, up_weight, up_bias)
        gate = None if gate_weight is None else F.linear(x, gate_weight, gate_bias)
        hidden = activated(gate, hidden, self.activation, self.alpha, self.limit)
        return F.linear(self._rounded(hidden, dtype), down_weight, down_bias)

    def _rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """float32 x, rounded as a product with these weights requires."""
        if self.format in quantized.FORMATS:
            return quantized.rounded_activations(x, self.format)
        return x.to(dtype).to(torch.float32) if dtype == torch.bfloat16 else x


def _definition(x: Tensor, chosen: Tensor, weights: Tensor, *rest: Any) -> Tensor:
    """Run every expert for every token, since the choice is a value on the device, and sum the chosen ones."""
    tokens, ids, shares = _flat(x, chosen, weights)
    layer = _Experts(*rest)
    total = torch.zeros_like(tokens)
    for index in range(len(layer.up)):
        mine = ids == index
        share = torch.where(mine, shares, 0.0).sum(-1, keepdim=True)
        total = torch.where(mine.any(-1, keepdim=True), total + share * layer.one(index, tokens, x.dtype), total)
    return total.to(x.dtype).view(x.shape)


def _without_kernels(x: Tensor, chosen: Tensor, weights: Tensor, *rest: Any) -> Tensor:
    """The same sums, from the chosen experts only: on the CPU values may be read. With a library, the kernel computes
    stock weights too, packed for the call: torch's product rounds a row depending on the number of an expert's rows."""
    layer = _Experts(*rest)
    if layer.format == "stock" and usable_library() is not None:
        chosen, layer = _packed_for_a_call(chosen, layer)
        return _experts(x, chosen, weights, *layer)
    tokens, ids, shares = _flat(x, chosen, weights)
    total = torch.zeros_like(tokens)
    for index in sorted(set(ids.flatten().tolist())):
        if not 0 <= index < len(layer.up):
            raise _no_such_expert(chosen, len(layer.up))
        rows, places = (ids == index).nonzero(as_tuple=True)
        total.index_add_(0, rows, shares[rows, places].unsqueeze(-1) * layer.one(index, tokens[rows], x.dtype))
    return total.to(x.dtype).view(x.shape)


def _flat(x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32 x [T, D], chosen [T, C] and weights [T, C]."""
    count = chosen.shape[-1]
    return x.reshape(-1, x.shape[-1]).to(torch.float32), chosen.reshape(-1, count), weights.reshape(-1, count)


def _gradient(backward: Backward, x: Tensor, chosen: Tensor, weights: Tensor, *rest: Any) -> Gradients:
    """An expert at a time, of those that are chosen, run again for its tokens."""
    layer, needs = _Experts(*rest), backward.needs
    tokens, ids, shares = _flat(x, chosen, weights)
    grad = backward.grad.reshape(tokens.shape).to(torch.float32)
    to_x, to_shares = torch.zeros_like(tokens), torch.zeros_like(shares)
    parts = [layer.gate, layer.up, layer.down, layer.gate_bias, layer.up_bias, layer.down_bias]
    needed = [part is not None and need for part, need in zip(parts, needs[3:9], strict=True)]
    stock: list[list[Tensor]] = [[] for _ in parts]  # the gradients of each part's experts
    for index in range(len(layer.up)):
        rows, places = (ids == index).nonzero(as_tuple=True)
        of_expert = [None if part is None else part.detach() for part in layer.weights_of(index, x.shape[-1])]
        with torch.enable_grad():
            leaves = [tokens[rows].requires_grad_(), shares[rows, places].requires_grad_()]
            own = zip(of_expert, needed, strict=True)
            parameters = [part.requires_grad_() for part, need in own if need and part is not None]
            out = leaves[1].unsqueeze(-1) * layer.through(leaves[0], x.dtype, of_expert)
        found = torch.autograd.grad(out, [*leaves, *parameters], grad[rows])
        to_x.index_add_(0, rows, found[0])
        to_shares[rows, places] = found[1]
        of_weights = iter(found[2:])
        for part, need in zip(stock, needed, strict=True):
            part += [next(of_weights)] if need else []
    found_parts = [
        _like(part, torch.stack(gradients), layer.format) if part is not None and gradients else None
        for part, gradients in zip(parts, stock, strict=True)
    ]
    return to_x.to(x.dtype).view(x.shape), None, to_shares.to(weights.dtype).view(weights.shape), *found_parts


def _like(part: Tensor, gradients: Tensor, format: str) -> Tensor:
    """float32 gradients [E, …] of stock weights or biases, as those of `part`."""
    gradients = gradients.to(part.dtype)
    return packed_view(gradients) if format == "packed" and part.dim() == 5 else gradients


class ExpertsArguments(Structure):
    """OnwardExperts of native/src/experts/experts.h, which documents the fields."""

    _fields_ = (
        *((name, Int) for name in ("tokens", "width", "inner", "experts", "chosen")),
        ("x", Pointer),
        ("x_stride", Int),
        *((name, Pointer) for name in ("ids", "weights", "gate", "up", "down", "gate_bias", "up_bias", "down_bias")),
        ("out", Pointer),
        ("out_stride", Int),
        *((name, Code) for name in ("x_dtype", "bias_dtype", "out_dtype", "format", "activation")),
        *((name, Float) for name in ("alpha", "limit")),
    )


@kernel
def onward_experts(arguments: ExpertsArguments) -> Code: ...


def _call(k: KernelCalls, out: Operand, x: Operand, chosen: Operand, weights: Operand, *rest: Any) -> None:
    layer = _Experts(*rest)
    if layer.format == "stock":
        raise Unsupported("unpacked weights, which every call packs again: pass weights from ops.pack_experts")
    x, rows, width, stride = k.rows(x)
    fields = {
        "tokens": rows, "width": width, "inner": layer.inner, "experts": layer.up.shape[0],
        "chosen": chosen.shape[-1], "x": k.address(x), "x_stride": stride, "x_dtype": k.code(x),
        "ids": k.address(k.contiguous(chosen)), "weights": k.address(k.contiguous(weights)),
        "gate": k.optional(layer.gate), "up": k.optional(layer.up), "down": k.optional(layer.down),
        "out": k.address(out), "out_stride": width, "out_dtype": k.code(out),
        "format": format_code(layer.format, layer.up), "activation": ACTIVATIONS.index(layer.activation),
        "alpha": layer.alpha, "limit": layer.limit,
    }  # fmt: skip
    for name in ("gate_bias", "up_bias", "down_bias"):
        bias = getattr(layer, name)
        if bias is not None:
            fields |= {name: k.optional(bias), "bias_dtype": k.code(bias)}
    k.call(onward_experts, k.array([k.struct(ExpertsArguments, **fields)]))


def _packed_for_a_call(chosen: Tensor, layer: _Experts) -> tuple[Tensor, _Experts]:
    """The chosen experts of a stock layer, packed, and `chosen` as indices into these."""
    used, places = torch.unique(chosen, return_inverse=True)
    if used.numel() and not 0 <= int(used[0]) <= int(used[-1]) < len(layer.up):
        raise _no_such_expert(chosen, len(layer.up))
    weights = [None if weight is None else _packed_of(weight, used) for weight in layer[:3]]
    biases = [None if bias is None else bias[used] for bias in layer[3:6]]
    packed: tuple[Any, ...] = (*weights, *biases, "packed", *layer[7:])
    return places.to(torch.int32), _Experts(*packed)


def _packed_of(weights: Tensor, used: Tensor) -> Tensor:
    """The data of these experts' weights, packed; without tokens, that of the first expert."""
    packed = pack_experts([weights[index] for index in used.tolist() or [0]])
    assert isinstance(packed, NativeExperts), "on the CPU, with a library"
    return packed.data


def _no_such_expert(chosen: Tensor, count: int) -> RequestError:
    return RequestError(f"chosen experts lie in 0 … {count - 1}; got {int(chosen.min())} … {int(chosen.max())}")


_experts = Operator(
    "experts(Tensor x, Tensor chosen, Tensor weights, Tensor? gate, Tensor up, Tensor down, Tensor? gate_bias, "
    "Tensor? up_bias, Tensor? down_bias, str format, int inner, str activation, float alpha, float limit) -> Tensor",
    _definition, _call, like_first, _without_kernels, gradient=_gradient, lean=True,
)  # fmt: skip
