"""The network that is trained: a compact transformer in Qwen3's layout, in plain torch.

Parameter names are those of Hugging Face's `Qwen3ForCausalLM`, so a state dict is saved without changes.
Shape legend: B rows, T tokens, D hidden size, H query heads, K key/value heads, C head_dim, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of one model. `head_dim` is explicit: it need not be hidden_size / num_heads."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019) over the last axis, reduced in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


def rope_tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, C] of rotary embeddings in the split-half order, float32."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inverse_frequency = config.rope_theta**-half
    angle = torch.arange(length, dtype=torch.float32)[:, None] * inverse_frequency[None, :]
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x_BHTC: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Rotate pairs (i, i + C/2) of every head by the angle of their position."""
    first, second = x_BHTC.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x_BHTC * cos_TC.to(x_BHTC.dtype) + rotated * sin_TC.to(x_BHTC.dtype)


class Attention(nn.Module):
    """Causal attention with grouped heads and a norm on every head's query and key."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        B, T, _ = x_BTD.shape
        q = self.q_norm(self.q_proj(x_BTD).view(B, T, self.heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x_BTD).view(B, T, self.kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x_BTD).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        group = self.heads // self.kv_heads
        k = rotate(k, cos_TC, sin_TC).repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(rotate(q, cos_TC, sin_TC), k, v, is_causal=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(B, T, -1))
        return projected


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Layer(nn.Module):
    """One pre-norm block: attention, then the MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TC, sin_TC)
        out: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out


class Body(nn.Module):
    """Embedding, layers and the last norm: what Hugging Face calls `model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Transformer(nn.Module):
    """tokens [B, T] -> logits [B, T, V]; the head is the embedding, transposed."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        cos, sin = rope_tables(config, config.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialize()

    def _initialize(self) -> None:
        """Normal(0, 0.02); projections into the residual stream shrink with depth, as in GPT-2."""
        residual_std = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual_std if into_residual else 0.02)

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """The normed residual stream [B, T, D], before the head."""
        T = tokens_BT.shape[1]
        cos, sin = self.get_buffer("cos")[:T], self.get_buffer("sin")[:T]
        x = self.model.embed_tokens(tokens_BT)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.model.norm(x)
        return out

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of any hidden states: [..., D] -> [..., V]."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.head(self.hidden(tokens_BT))

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())
