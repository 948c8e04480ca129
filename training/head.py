"""The network of a draft head in EAGLE-3's layout (arXiv 2503.01840), in plain torch.

It is unrolled as in the paper: step j computes the token j of a draft. Its features are the head's own output of step
j - 1, and it attends to the target's features before the draft and to the head's own since. Position t of step j
belongs to the draft that begins at position t - j.

Parameter names are those of the published heads. Shape legend: B rows, T tokens, D hidden size, H query heads,
K key/value heads, C head_dim, W features of a position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .model import MLP, ModelConfig, RMSNorm, rope_tables, rotate


class Attention(nn.Module):
    """Attention over the pairs of embedding and features, with the keys of all steps so far."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def projected(self, pair: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, 2 D] -> queries, keys and values [B, H, T, C]."""
        B, T, _ = pair.shape
        q = self.q_proj(pair).view(B, T, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(pair).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(pair).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        group = self.heads // self.kv_heads
        k = rotate(k, cos_TC, sin_TC).repeat_interleave(group, dim=1)
        return rotate(q, cos_TC, sin_TC), k, v.repeat_interleave(group, dim=1)

    def forward(self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """The output [B, T, D] of the last step. keys, values: [B, H, T, C] of every step."""
        B, _, T, C = q.shape
        step = len(keys) - 1
        future = torch.ones(T, T, dtype=torch.bool).triu(1 - step)
        scores = [(q @ keys[0].transpose(-1, -2)).masked_fill(future, float("-inf"))]
        own = [(shifted(keys[i], step - i), shifted(values[i], step - i)) for i in range(1, step + 1)]
        scores += [(q * k).sum(-1, keepdim=True) for k, _ in own]
        weights = (torch.cat(scores, -1) / math.sqrt(C)).softmax(-1)
        out = weights[..., :T] @ values[0]
        for i, (_, v) in enumerate(own):
            out = out + weights[..., T + i, None] * v
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(B, T, -1))
        return projected


def shifted(x: Tensor, count: int) -> Tensor:
    """[..., T, C] with the values of `count` positions before; zeros at the first ones."""
    return F.pad(x, (0, 0, count, 0))[..., : x.shape[-2], :]


class MidLayer(nn.Module):
    """The decoder layer of the head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)


class Head(nn.Module):
    """Features [B, T, W] of positions and embeddings [B, T, D] of the tokens after them -> for each step, the logits'
    input [B, T, D]: `lm_head` makes logits of the draft ids [B, T, V] from any of its rows."""

    def __init__(self, config: ModelConfig, draft_vocab_size: int, taps: int) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size, bias=False)
        cos, sin = rope_tables(config, config.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.005 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)

    def forward(self, features: Tensor, embedded: Tensor, steps: int) -> Iterator[Tensor]:
        T, layer = features.shape[1], self.midlayer
        cos, sin = self.get_buffer("cos")[:T], self.get_buffer("sin")[:T]
        x, tokens = self.fc(features), layer.input_layernorm(embedded)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(steps):
            x = shifted(x, 1) if step else x
            q, k, v = layer.self_attn.projected(torch.cat((tokens, layer.hidden_norm(x)), -1), cos, sin)
            keys.append(k)
            values.append(v)
            x = x + layer.self_attn(q, keys, values)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            yield self.norm(x)
