"""The table of families: an architecture's name in config.json -> the function that reads its config."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from onward.errors import ConfigError, UnsupportedArchitectureError
from onward.models import llama, mistral, qwen2, qwen3
from onward.models.config import DecoderConfig
from onward.models.decoder import DecoderParams, LayerParams, Linear

FAMILIES: dict[str, Callable[[Mapping[str, Any]], DecoderConfig]] = {
    family.ARCHITECTURE: family.read_config for family in (llama, mistral, qwen2, qwen3)
}


class Tensors(Protocol):
    """The weights of a checkpoint by their stock names; raises `CheckpointError` for one it cannot give."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor: ...


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """A checkpoint's config.json -> the shape of its decoder."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ConfigError(f"config.json: 'architectures' must name one architecture; got {names!r}")
    if not isinstance(names[0], str) or names[0] not in FAMILIES:
        raise UnsupportedArchitectureError(
            f"architecture {names[0]!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[names[0]](config)


def read_params(
    config: DecoderConfig, tensors: Tensors, each_layer: Callable[[LayerParams], LayerParams] | None = None
) -> DecoderParams:
    """Take every weight of the decoder from `tensors`, under the names Hugging Face checkpoints use.

    each_layer: converts each layer (packs it, say) before the next is taken.
    """
    embed_tokens = tensors.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    stock_layers = (_read_layer(config, tensors, f"model.layers.{i}") for i in range(config.num_layers))
    layers = tuple(stock_layers if each_layer is None else map(each_layer, stock_layers))
    norm = tensors.take("model.norm.weight", (config.hidden_size,))
    tied = config.tie_word_embeddings
    lm_head = embed_tokens if tied else tensors.take("lm_head.weight", (config.vocab_size, config.hidden_size))
    return DecoderParams(embed_tokens, layers, norm, lm_head)


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every weight that `read_params` takes, under its name; no memory is used."""
    shapes = _Shapes()
    read_params(config, shapes)
    return shapes.by_name


class _Shapes:
    def __init__(self) -> None:
        self.by_name: dict[str, tuple[int, ...]] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.by_name[name] = shape
        return torch.empty(shape, device="meta")


def _read_layer(config: DecoderConfig, tensors: Tensors, prefix: str) -> LayerParams:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_out, kv_out = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def linear(name: str, out: int, into: int, bias: bool) -> Linear:
        weight = tensors.take(f"{prefix}.{name}.weight", (out, into))
        return Linear(weight, tensors.take(f"{prefix}.{name}.bias", (out,)) if bias else None)

    def norm(name: str, width: int) -> Tensor:
        return tensors.take(f"{prefix}.{name}.weight", (width,))

    return LayerParams(
        input_norm=norm("input_layernorm", hidden),
        q_proj=linear("self_attn.q_proj", q_out, hidden, config.qkv_bias),
        k_proj=linear("self_attn.k_proj", kv_out, hidden, config.qkv_bias),
        v_proj=linear("self_attn.v_proj", kv_out, hidden, config.qkv_bias),
        o_proj=linear("self_attn.o_proj", hidden, q_out, config.o_bias),
        q_norm=norm("self_attn.q_norm", head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", head_dim) if config.qk_norm else None,
        post_attention_norm=norm("post_attention_layernorm", hidden),
        gate_proj=linear("mlp.gate_proj", inner, hidden, config.mlp_bias),
        up_proj=linear("mlp.up_proj", inner, hidden, config.mlp_bias),
        down_proj=linear("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
