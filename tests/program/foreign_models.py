"""Models written with plain torch, as their authors would write them: for tests of programs."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from onward import ops
from onward.cache import KVCache

VOCAB, WIDTH, HEADS, LAYERS = 61, 24, 3, 2
HEAD_DIM = WIDTH // HEADS


def new_cache(batch: int, max_len: int, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache.new(
        num_layers=LAYERS,
        batch=batch,
        num_kv_heads=HEADS,
        max_len=max_len,
        head_dim=HEAD_DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )


# ── GPT-2: learned positions, layer norm with bias, one matrix for q, k and v, gelu; onward.ops where they fit ────


class Gpt2Layer(NamedTuple):
    ln_1_weight: Tensor
    ln_1_bias: Tensor
    c_attn_weight: Tensor  # [W, 3W]: GPT-2 stores [in, out]
    c_attn_bias: Tensor
    c_proj_weight: Tensor
    c_proj_bias: Tensor
    ln_2_weight: Tensor
    ln_2_bias: Tensor
    fc_weight: Tensor
    fc_bias: Tensor
    proj_weight: Tensor
    proj_bias: Tensor


class Gpt2Params(NamedTuple):
    wte: Tensor
    wpe: Tensor
    layers: tuple[Gpt2Layer, ...]
    ln_f_weight: Tensor
    ln_f_bias: Tensor


def gpt2_params(seed: int = 0, positions: int = 64, dtype: torch.dtype = torch.float32) -> Gpt2Params:
    rand = _Random(seed, dtype)
    w = WIDTH
    layers = tuple(
        Gpt2Layer(
            rand.norm(w),
            rand(w),
            rand(w, 3 * w),
            rand(3 * w),
            rand(w, w),
            rand(w),
            rand.norm(w),
            rand(w),
            rand(w, 4 * w),
            rand(4 * w),
            rand(4 * w, w),
            rand(w),
        )
        for _ in range(LAYERS)
    )
    return Gpt2Params(rand(VOCAB, w), rand(positions, w), layers, rand.norm(w), rand(w))


def gpt2(tokens: Tensor, offsets: Tensor, cache: KVCache, params: Gpt2Params) -> tuple[Tensor, KVCache]:
    batch, length = tokens.shape
    positions = offsets.unsqueeze(1) + torch.arange(length, dtype=torch.int32)
    x = F.embedding(tokens, params.wte) + F.embedding(positions, params.wpe)
    for index, layer in enumerate(params.layers):
        normed = ops.layer_norm(x, layer.ln_1_weight, layer.ln_1_bias)
        q, k, v = (normed @ layer.c_attn_weight + layer.c_attn_bias).split(WIDTH, dim=-1)
        q, k, v = (t.view(batch, length, HEADS, HEAD_DIM).transpose(1, 2) for t in (q, k, v))
        mixed = cache.attend(index, q, k, v, offsets).transpose(1, 2).reshape(batch, length, WIDTH)
        x = x + (mixed @ layer.c_proj_weight + layer.c_proj_bias)
        normed = ops.layer_norm(x, layer.ln_2_weight, layer.ln_2_bias)
        hidden = F.gelu(normed @ layer.fc_weight + layer.fc_bias, approximate="tanh")
        x = x + (hidden @ layer.proj_weight + layer.proj_bias)
    return ops.layer_norm(x, params.ln_f_weight, params.ln_f_bias) @ params.wte.T, cache


# ── a user's own, in plain torch: rotary written out, a mask over the whole cache, a cache as a dict ──────────────


def plain_params(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    rand = _Random(seed, dtype)
    params = {"embed": rand(VOCAB, WIDTH), "norm": rand.norm(WIDTH), "head": rand(VOCAB, WIDTH)}
    for i in range(LAYERS):
        params |= {
            f"{i}.norm1": rand.norm(WIDTH),
            f"{i}.norm2": rand.norm(WIDTH),
            f"{i}.qkv": rand(3 * WIDTH, WIDTH),
            f"{i}.out": rand(WIDTH, WIDTH),
            f"{i}.gate": rand(40, WIDTH),
            f"{i}.up": rand(40, WIDTH),
            f"{i}.down": rand(WIDTH, 40),
        }
    return params


def plain_cache(batch: int, max_len: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shape = (LAYERS, batch, HEADS, max_len, HEAD_DIM)
    return {"k": torch.zeros(shape, dtype=dtype), "v": torch.zeros(shape, dtype=dtype)}


def plain(
    tokens: Tensor, offsets: Tensor, cache: dict[str, Tensor], params: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    batch, length = tokens.shape
    positions = offsets[:, None] + torch.arange(length)
    inverse = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angle = (positions[..., None] * inverse)[:, None]
    cos, sin = torch.cos(angle), torch.sin(angle)
    seen = torch.arange(cache["k"].shape[3])[None, None] <= positions[..., None]
    mask = torch.where(seen, 0.0, -math.inf)[:, None]
    rows = torch.arange(batch)[:, None]

    def turn(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight

    x = params["embed"][tokens.long()]
    for i in range(LAYERS):
        qkv = F.linear(norm(x, params[f"{i}.norm1"]), params[f"{i}.qkv"])
        q, k, v = qkv.view(batch, length, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        q, k = turn(q), turn(k)
        cache["k"][i][rows, :, positions] = k.transpose(1, 2)
        cache["v"][i][rows, :, positions] = v.transpose(1, 2)
        scores = q @ cache["k"][i].transpose(-1, -2) / math.sqrt(HEAD_DIM) + mask
        mixed = scores.softmax(dim=-1).to(v.dtype) @ cache["v"][i]
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), params[f"{i}.out"])
        normed = norm(x, params[f"{i}.norm2"])
        gate = F.silu(F.linear(normed, params[f"{i}.gate"]))
        x = x + F.linear(gate * F.linear(normed, params[f"{i}.up"]), params[f"{i}.down"])
    return F.linear(norm(x, params["norm"]), params["head"]), cache


class _Random:
    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype

    def __call__(self, *shape: int) -> Tensor:
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        return (torch.randn(shape, generator=self._generator) * scale).to(self._dtype)

    def norm(self, width: int) -> Tensor:
        return (1 + 0.1 * torch.randn(width, generator=self._generator)).to(self._dtype)
