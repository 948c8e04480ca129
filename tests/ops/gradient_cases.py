"""Every op with a gradient, and its formula in plain torch, whose gradient in float64 is the reference."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from rounding import random
from torch import Tensor
from torch.nn import functional as F

from onward import ops
from onward.ops.heads import BLOCK
from onward.ops.packed import in_graph_of
from onward.quantization import quantize_int8, quantize_iq4_nl

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Case:
    """inputs: the shapes of the tensors that get a gradient. constants: of those that get none, such as the weight that
    is packed. float32: the names of those that are float32 whatever the dtype. rounds: whether the op rounds an input
    to few bits, so that differences of its results are no derivative. reverse_only: a weight is packed in the call,
    which only reverse mode follows."""

    call: Callable[[Any], Tensor]
    formula: Callable[[Any], Tensor]
    inputs: dict[str, tuple[int, ...]]
    constants: dict[str, tuple[int, ...]] = field(default_factory=dict)
    float32: tuple[str, ...] = ()
    rounds: bool = False
    reverse_only: bool = False

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        shapes = {**self.inputs, **self.constants}
        return {
            name: (random(*shape, seed=seed) / (8 if name in _EXPERTS else 1)).to(
                torch.float32 if name in self.float32 else dtype
            )
            for seed, (name, shape) in enumerate(shapes.items())
        }


def _turned(x: Tensor, radians: Tensor) -> Tensor:
    """Pairs (i, i + R) of x [B, H, T, D] turned by radians [B, T, R]."""
    cos, sin, half = radians.cos().unsqueeze(1), radians.sin().unsqueeze(1), radians.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def _apart(x: Tensor, parts: int) -> Tensor:
    """Pairs (2i, 2i + 1) as pairs (i, 4 + i) with 4 parts, and back with 2."""
    return x.unflatten(-1, (parts, -1)).mT.flatten(-2)


def _attended(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, mask: Any = 0.0, sinks: Any = None, softcap: Any = None
) -> Tensor:
    """visible: bool, broadcast to [B, H, T, S]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores + mask).masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v


_RADIANS = random(2, 3, 4)
_CAUSAL = torch.ones(3, 5, dtype=torch.bool).tril(2)
_EVERY = torch.ones(3, 5, dtype=torch.bool)
_OFFSETS = torch.tensor([1, 4], dtype=torch.int32)
_SEEN = torch.arange(2 * BLOCK) <= (_OFFSETS.unsqueeze(1) + torch.arange(3)).view(2, 1, 3, 1)
_TABLE = torch.tensor([[2, 1], [0, 3]], dtype=torch.int32)
_QKV = {"q": (2, 4, 3, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 6)}
_CACHE = {"q": (2, 4, 3, 8), "keys": (2, 2, 2 * BLOCK, 8), "values": (2, 2, 2 * BLOCK, 6)}
_BLOCKS = {"q": (2, 4, 3, 8), "keys": (4, 2, BLOCK, 8), "values": (4, 2, BLOCK, 6)}


def _rows_of_blocks(blocks: Tensor) -> Tensor:
    return blocks[_TABLE.long()].transpose(1, 2).flatten(2, 3)


_SLOTS, _RANKS = torch.tensor([2, 1, 0], dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)
_LORA = {"x": (3, 2, 8), "y": (3, 2, 5), "a": (3, 3, 8), "b": (3, 3, 5)}


def _low_rank(t: Any, scale: Any = None, shift: Any = None) -> Tensor:
    rows = []
    for row, slot in enumerate(_SLOTS.tolist()):
        rank = int(_RANKS[slot])
        out = t["y"][row]
        if rank:
            out = out if scale is None else out * scale[slot] + shift[slot]
            out = out + t["x"][row] @ t["a"][slot, :rank].T @ t["b"][slot, :rank]
        rows.append(out)
    return torch.stack(rows)


_CHOSEN = torch.tensor([[0, 2], [1, 2], [2, 0]], dtype=torch.int32)
_EXPERTS = {"gate": (3, 32, 64), "up": (3, 32, 64), "down": (3, 64, 32)}
_ROUTES = {"x": (3, 64), "shares": (3, 2), "gate_bias": (3, 32), "up_bias": (3, 32), "down_bias": (3, 64)}


def _mixed(t: Any) -> Tensor:
    rows = []
    for row, ids in enumerate(_CHOSEN.tolist()):
        total = 0.0
        for place, e in enumerate(ids):
            gate = t["gate"][e] @ t["x"][row] + t["gate_bias"][e]
            hidden = F.silu(gate) * (t["up"][e] @ t["x"][row] + t["up_bias"][e])
            total = total + t["shares"][row, place] * (t["down"][e] @ hidden + t["down_bias"][e])
        rows.append(total)
    return torch.stack(rows)


def _through_experts(t: Any, **layer: Any) -> Tensor:
    biases = {name: t[name] for name in ("gate_bias", "up_bias", "down_bias")}
    return ops.experts(t["x"], _CHOSEN, t["shares"], **layer, **biases)


def _eight_bits(t: Any) -> dict[str, Any]:
    return {name: ops.QuantizedExperts.stack([quantize_int8(w.float()) for w in t[name]]) for name in _EXPERTS}


def _with_values(t: Any) -> Any:
    """The weights of the formula are the float32 weights, quantized to eight bits and back."""
    return {**t, **{name: weights.dequantize().double() for name, weights in _eight_bits(t).items()}}


def _followed(w: Tensor) -> ops.NativeWeight | Tensor:
    """The packed weight, in the graph of the stock one."""
    packed = ops.pack(w.detach())
    return packed._replace(data=in_graph_of(packed.data, w)) if isinstance(packed, ops.NativeWeight) else w


def _followed_experts(w: Tensor) -> ops.NativeExperts | Tensor:
    packed = ops.pack_experts(w.detach())
    return packed._replace(data=in_graph_of(packed.data, *w)) if isinstance(packed, ops.NativeExperts) else w


_LONG = {"q": (1, 4, 150, 8), "k": (1, 2, 160, 8), "v": (1, 2, 160, 8)}


def _long(window: int | None = None) -> Tensor:
    before = torch.arange(160) - torch.arange(10, 160).unsqueeze(1)
    return (before <= 0) & (before > -(window or 1000))


def _routed(logits: Tensor) -> Tensor:
    best = logits.softmax(-1).topk(2).values
    return best / best.sum(-1, keepdim=True)


_WORDS = torch.tensor([[0b1011], [0b1101]], dtype=torch.int32)


def _admitted(t: Any) -> Tensor:
    return ops.apply_token_mask(t["x"], _WORDS)[0][:, :2].masked_fill(
        torch.tensor([[False, False], [False, True]]), 0.0
    )


CASES = {
    "add": Case(lambda t: ops.add(t["a"], t["b"]), lambda t: t["a"] + t["b"], {"a": (3, 8), "b": (3, 8)}),
    "swiglu": Case(lambda t: ops.swiglu(t["g"], t["u"]), lambda t: F.silu(t["g"]) * t["u"], {"g": (3, 8), "u": (3, 8)}),
    "geglu": Case(
        lambda t: ops.geglu(t["g"], t["u"], approximate=False),
        lambda t: F.gelu(t["g"]) * t["u"],
        {"g": (3, 8), "u": (3, 8)},
    ),
    "sigmoid_gate": Case(
        lambda t: ops.sigmoid_gate(t["g"], t["u"]), lambda t: t["g"].sigmoid() * t["u"], {"g": (3, 8), "u": (3, 8)}
    ),
    "tanh": Case(lambda t: ops.tanh(t["x"]), lambda t: t["x"].tanh(), {"x": (3, 8)}),
    "log": Case(lambda t: ops.log(t["x"].square() + 1), lambda t: (t["x"].square() + 1).log(), {"x": (3, 8)}),
    "rms_norm": Case(
        lambda t: ops.rms_norm(t["x"], t["w"]),
        lambda t: F.rms_norm(t["x"], (8,), t["w"], 1e-6),
        {"x": (3, 8), "w": (8,)},
    ),
    "geglu in tanh": Case(
        lambda t: ops.geglu(t["g"], t["u"]),
        lambda t: F.gelu(t["g"], approximate="tanh") * t["u"],
        {"g": (3, 8), "u": (3, 8)},
    ),
    "rms_norm in float32": Case(
        lambda t: ops.rms_norm(t["x"], t["w"], after_cast=False),
        lambda t: F.rms_norm(t["x"], (8,), t["w"], 1e-6),
        {"x": (3, 8), "w": (8,)},
    ),
    "rms_norm of 1 + w": Case(
        lambda t: ops.rms_norm(t["x"], t["w"], offset=1.0),
        lambda t: F.rms_norm(t["x"], (8,), 1 + t["w"], 1e-6),
        {"x": (3, 8), "w": (8,)},
    ),
    "layer_norm": Case(
        lambda t: ops.layer_norm(t["x"], t["w"], t["b"]),
        lambda t: F.layer_norm(t["x"], (8,), t["w"], t["b"], 1e-5),
        {"x": (3, 8), "w": (8,), "b": (8,)},
    ),
    "rope": Case(
        lambda t: ops.rope(t["x"], torch.tensor([0, 2], dtype=torch.int32), dims=6, inv_freqs=t["freqs"]),
        lambda t: _turned(t["x"], torch.tensor([[0.0, 1, 2], [2, 3, 4]]).double().unsqueeze(2) * t["freqs"]),
        {"x": (2, 2, 3, 8), "freqs": (3,)},
        float32=("freqs",),
    ),
    "rotate, rotary_angles": Case(
        lambda t: ops.rotate(t["x"], *ops.rotary_angles(t["radians"], magnitude=1.5)),
        lambda t: torch.cat((1.5 * _turned(t["x"], t["radians"])[..., :6], t["x"][..., 6:]), -1),
        {"x": (2, 2, 3, 8), "radians": (2, 3, 3)},
        float32=("radians",),
    ),
    "rotate, interleaved": Case(
        lambda t: ops.rotate(t["x"], *ops.rotary_angles(_RADIANS), interleaved=True),
        lambda t: _apart(_turned(_apart(t["x"], 4), _RADIANS.double()), 2),
        {"x": (2, 2, 3, 8)},
    ),
    "attention": Case(
        lambda t: ops.scaled_dot_product_attention(t["q"], t["k"], t["v"], causal=True),
        lambda t: _attended(t["q"], t["k"], t["v"], _CAUSAL),
        _QKV,
    ),
    "attention of one query": Case(
        lambda t: ops.scaled_dot_product_attention(t["q"], t["k"], t["v"], causal=True),
        lambda t: _attended(t["q"], t["k"], t["v"], torch.ones(1, 5, dtype=torch.bool)),
        {**_QKV, "q": (2, 4, 1, 8)},
    ),
    "attention to all": Case(
        lambda t: ops.scaled_dot_product_attention(t["q"], t["k"], t["v"]),
        lambda t: _attended(t["q"], t["k"], t["v"], _EVERY),
        _QKV,
    ),
    "attention with a mask, sinks and a softcap": Case(
        lambda t: ops.scaled_dot_product_attention(
            t["q"], t["k"], t["v"], mask=t["mask"], sinks=t["sinks"], softcap=2.0
        ),
        lambda t: _attended(t["q"], t["k"], t["v"], _EVERY, t["mask"], t["sinks"], 2.0),
        {**_QKV, "mask": (3, 5), "sinks": (4,)},
    ),
    "attention of a whole text": Case(
        lambda t: ops.scaled_dot_product_attention(t["q"], t["k"], t["v"], causal=True),
        lambda t: _attended(t["q"], t["k"], t["v"], torch.ones(5, 5, dtype=torch.bool).tril()),
        {"q": (2, 4, 5, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 8)},
    ),
    "attention of many queries": Case(
        lambda t: ops.scaled_dot_product_attention(t["q"], t["k"], t["v"], causal=True),
        lambda t: _attended(t["q"], t["k"], t["v"], _long()),
        _LONG,
    ),
    "attention with a window, sinks and a softcap": Case(
        lambda t: ops.scaled_dot_product_attention(t["q"], t["k"], t["v"], window=20, sinks=t["sinks"], softcap=2.0),
        lambda t: _attended(t["q"], t["k"], t["v"], _long(20), 0.0, t["sinks"], 2.0),
        {**_LONG, "sinks": (4,)},
    ),
    "cached_attention": Case(
        lambda t: ops.cached_attention(t["q"], t["keys"], t["values"], _OFFSETS, sinks=t["sinks"]),
        lambda t: _attended(t["q"], t["keys"], t["values"], _SEEN, 0.0, t["sinks"]),
        {**_CACHE, "sinks": (4,)},
    ),
    "cached_attention over blocks": Case(
        lambda t: ops.cached_attention(t["q"], t["keys"], t["values"], _OFFSETS, table=_TABLE),
        lambda t: _attended(t["q"], _rows_of_blocks(t["keys"]), _rows_of_blocks(t["values"]), _SEEN),
        _BLOCKS,
    ),
    "linear": Case(
        lambda t: ops.linear(t["x"], t["w"], t["b"]),
        lambda t: F.linear(t["x"], t["w"], t["b"]),
        {"x": (3, 8), "w": (5, 8), "b": (5,)},
    ),
    "packed_linear": Case(
        lambda t: ops.linear(t["x"], ops.pack(t["w"]), t["b"]),
        lambda t: F.linear(t["x"], t["w"], t["b"]),
        {"x": (3, 8), "b": (5,)},
        {"w": (5, 8)},
    ),
    "packed_linear in the graph of its weight": Case(
        lambda t: ops.linear(t["x"], _followed(t["w"]), t["b"]),
        lambda t: F.linear(t["x"], t["w"], t["b"]),
        {"x": (3, 7), "w": (5, 7), "b": (5,)},
        reverse_only=True,
    ),
    "packed_rows": Case(
        lambda t: ops.embedding(torch.tensor([[1, 0], [1, 17]]), _followed(t["table"])),
        lambda t: t["table"][torch.tensor([[1, 0], [1, 17]])],
        {"table": (20, 8)},
        reverse_only=True,
    ),
    "quantized_linear": Case(
        lambda t: ops.linear(t["x"], quantize_iq4_nl(t["w"]), t["b"]),
        lambda t: F.linear(t["x"], quantize_iq4_nl(t["w"].float()).dequantize().double(), t["b"]),
        {"x": (3, 64), "b": (5,)},
        {"w": (5, 64)},
        rounds=True,
    ),
    "linear_by_head": Case(
        lambda t: ops.linear_by_head(t["x"], t["w"]),
        lambda t: torch.einsum("thk,hnk->thn", t["x"], t["w"]),
        {"x": (3, 2, 8), "w": (2, 5, 8)},
    ),
    "packed_linear_by_head": Case(
        lambda t: ops.linear_by_head(t["x"], ops.pack_experts(t["w"])),
        lambda t: torch.einsum("thk,hnk->thn", t["x"], t["w"]),
        {"x": (3, 2, 8)},
        {"w": (2, 5, 8)},
    ),
    "packed_linear_by_head in the graph of its weight": Case(
        lambda t: ops.linear_by_head(t["x"], _followed_experts(t["w"])),
        lambda t: torch.einsum("thk,hnk->thn", t["x"], t["w"]),
        {"x": (3, 2, 8), "w": (2, 5, 8)},
        reverse_only=True,
    ),
    "embedding": Case(
        lambda t: ops.embedding(torch.tensor([[1, 0], [1, 3]]), t["table"]),
        lambda t: t["table"][torch.tensor([[1, 0], [1, 3]])],
        {"table": (4, 8)},
    ),
    "einsum": Case(
        lambda t: ops.einsum("ij,jk,k->i", t["a"], t["b"], t["c"]),
        lambda t: t["a"] @ t["b"] @ t["c"],
        {"a": (3, 8), "b": (8, 5), "c": (5,)},
    ),
    "lora": Case(lambda t: ops.lora(t["x"], t["y"], t["a"], t["b"], _SLOTS, _RANKS), lambda t: _low_rank(t), _LORA),
    "lora with scales": Case(
        lambda t: ops.lora(t["x"], t["y"], t["a"], t["b"], _SLOTS, _RANKS, scale=t["scale"], shift=t["shift"]),
        lambda t: _low_rank(t, t["scale"], t["shift"]),
        {**_LORA, "scale": (3, 5), "shift": (3, 5)},
        float32=("scale", "shift"),
    ),
    "top_experts": Case(
        lambda t: ops.top_experts(t["logits"], 2, normalize=True)[1],
        lambda t: _routed(t["logits"]),
        {"logits": (3, 6)},
    ),
    "experts": Case(
        lambda t: _through_experts(t, **{name: t[name] for name in _EXPERTS}),
        _mixed,
        {**_ROUTES, **_EXPERTS},
        float32=("shares",),
    ),
    "experts, packed": Case(
        lambda t: _through_experts(t, **{name: ops.pack_experts(t[name]) for name in _EXPERTS}),
        _mixed,
        _ROUTES,
        _EXPERTS,
        float32=("shares",),
    ),
    "experts, packed, in the graph of their weights": Case(
        lambda t: _through_experts(t, **{name: _followed_experts(t[name]) for name in _EXPERTS}),
        _mixed,
        {**_ROUTES, **_EXPERTS},
        float32=("shares",),
        reverse_only=True,
    ),
    "experts in 8 bits": Case(
        lambda t: _through_experts(t, **_eight_bits(t)),
        lambda t: _mixed(_with_values(t)),
        _ROUTES,
        _EXPERTS,
        float32=("shares",),
        rounds=True,
    ),
    "apply_token_mask": Case(
        _admitted, lambda t: t["x"][:, :2] * torch.tensor([[1.0, 1.0], [1.0, 0.0]]), {"x": (2, 4)}
    ),
}
