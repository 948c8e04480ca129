"""Models with Mamba2 on the way to GGUF: the config.json with all fields, and Falcon-H1's factors in its weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.gguf.exporting_fields import common, first, mixers
from onward.checkpoint.gguf.exporting_restated import Weights, untied
from onward.checkpoint.gguf.writer import Stored
from onward.errors import RequestError
from onward.models.blocks import Attention, Decoder, Experts, FeedForward, Mamba2, SideBySide, UngatedFeedForward

# How the fields of Falcon-H1's factors end.
_FACTORS = "_multiplier", "_multipliers"
# What Nemotron-H's layers are, and which experts it has, is said by fields that its decoder gives.
_OF_NEMOTRON = (
    *("hybrid_override_pattern", "rope_parameters", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size", "n_group", "topk_group"),
    *("norm_topk_prob", "routed_scaling_factor"),
)


def granite_hybrid(config: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    """Granite 4. What files call the feed-forward width is, in a dense model, that of the block of all tokens."""
    attention, block = first(mixers(decoder), Attention), decoder.layers[0].feed_forward
    shared = block.shared if isinstance(block, Experts) else block
    assert isinstance(shared, FeedForward), "this family has a block of all tokens"
    fields = common(config, decoder) | _mamba(decoder)
    fields |= {
        "layer_types": ["mamba" if isinstance(mixer, Mamba2) else "attention" for mixer in mixers(decoder)],
        "position_embedding_type": "nope" if attention.rope is None else "rope",
        "shared_intermediate_size": shared.intermediate_size,
    }
    if not isinstance(block, Experts):
        dense = {"num_local_experts": 0, "num_experts_per_tok": None}
        return fields | dense | {"intermediate_size": shared.intermediate_size}
    return fields | {"num_local_experts": block.num_experts, "num_experts_per_tok": block.num_chosen}


def falcon_h1(config: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    """Falcon-H1 without factors, which are in the weights (`with_factors`)."""
    mixer = decoder.layers[0].mixer
    assert isinstance(mixer, SideBySide), "this family has both in each layer"
    tied = decoder.tie_word_embeddings and decoder.embedding_multiplier == decoder.logits_multiplier
    return {
        **{name: value for name, value in common(config, decoder).items() if not name.endswith(_FACTORS)},
        **_mamba(decoder),
        "mamba_d_ssm": mixer.recurrent.widths[0],
        "mamba_norm_before_gate": mixer.recurrent.norm is not None and mixer.recurrent.norm_first,
        "tie_word_embeddings": tied,
    }


def nemotron_h(config: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    """Nemotron-H and Nemotron 3. The blocks of layers are named, not in a pattern of letters."""
    blocks = [layer.mixer or layer.feed_forward for layer in decoder.layers]
    names = {Attention: "attention", Mamba2: "mamba", UngatedFeedForward: "mlp", Experts: "moe"}
    mamba = first(blocks, Mamba2)
    fields = {name: value for name, value in common(config, decoder).items() if name not in _OF_NEMOTRON}
    fields |= {
        "layers_block_type": [names[type(block)] for block in blocks],
        "num_hidden_layers": len(blocks),
        "layer_norm_epsilon": decoder.norm.eps,
        "mamba_num_heads": mamba.num_heads,
        "mamba_head_dim": mamba.head_dim,
        "n_groups": mamba.groups,
        "ssm_state_size": mamba.state_dim,
        "conv_kernel": mamba.taps,
        "use_conv_bias": mamba.conv_bias,
    }
    if {"mlp", "moe"} <= set(fields["layers_block_type"]):
        raise RequestError("in GGUF a model of this family has experts in all layers that do not mix, or in none")
    return fields | (_nemotron_experts(blocks) if "moe" in fields["layers_block_type"] else {})


def _nemotron_experts(blocks: list[Any]) -> dict[str, Any]:
    experts = first(blocks, Experts)
    assert experts.shared is not None, "this family has a block of all tokens"
    return {
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": experts.num_chosen,
        "moe_intermediate_size": experts.intermediate_size,
        "moe_shared_expert_intermediate_size": experts.shared.intermediate_size,
        "moe_latent_size": experts.latent_dim,
        "n_group": experts.groups,
        "topk_group": experts.kept_groups,
        "norm_topk_prob": experts.normalize,
        "routed_scaling_factor": experts.scale,
    }


def _mamba(decoder: Decoder) -> dict[str, Any]:
    block = first(mixers(decoder), Mamba2)
    return {
        "mamba_n_heads": block.num_heads,
        "mamba_d_head": block.head_dim,
        "mamba_n_groups": block.groups,
        "mamba_d_state": block.state_dim,
        "mamba_d_conv": block.taps,
        "mamba_conv_bias": block.conv_bias,
    }


def with_factors(config: Mapping[str, Any], fields: Mapping[str, Any], weights: Weights) -> Weights:
    """Falcon-H1's weights times the factors of its forward: exact, or rounded to float32.

    Raises:
        RequestError: a factor is not 1, and the weight is blocks.
    """
    if not fields["tie_word_embeddings"]:
        weights = untied(config, fields, weights)
    factors, product = _factors(config, fields), dict(weights)
    for name, weight in weights.items():
        module, _, kind = name.rpartition(".")
        of_weight, of_bias = factors.get(module.split(".")[-1], (1.0, 1.0))
        product[name] = _times(name, weight, of_bias if kind == "bias" else of_weight)
    return product


_Factor = float | Tensor


def _factors(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, tuple[_Factor, _Factor]]:
    """By module, those of its weight and of its bias: a factor of what comes out is both's, one of what goes in the
    weight's alone."""

    def given(name: str) -> float:
        value = config.get(f"{name}_multiplier")
        return 1.0 if value is None else float(value)

    into, out, states = given("attention_in"), given("attention_out"), given("ssm_out")
    gate, down = config.get("mlp_multipliers") or (1.0, 1.0)
    heads, inner = fields["mamba_n_heads"], fields["mamba_d_ssm"]
    keys = fields["mamba_n_groups"] * fields["mamba_d_state"]
    of_parts = torch.tensor(config.get("ssm_multipliers") or [1.0] * 5, dtype=torch.float64)
    of_rows = of_parts.repeat_interleave(torch.tensor([inner, inner, keys, keys, heads]))
    return {
        "q_proj": (into, 1.0),
        "k_proj": (into * given("key"), given("key")),
        "v_proj": (into, 1.0),
        "o_proj": (out, out),
        "in_proj": (given("ssm_in") * of_rows.unsqueeze(1), of_rows),
        "out_proj": (states, states),
        "gate_proj": (gate, gate),
        "down_proj": (down, down),
        "embed_tokens": (given("embedding"), 1.0),
        "lm_head": (given("lm_head"), 1.0),
    }


def _times(name: str, weight: Tensor | Stored, factor: _Factor) -> Tensor | Stored:
    """In the weight's dtype if that holds the product, else in float32."""
    if bool((torch.as_tensor(factor) == 1).all()):
        return weight
    if isinstance(weight, Stored):
        raise RequestError(
            f"{name}: GGUF has it times a factor of the forward, which scales of {weight.type} do not hold: give a "
            "dtype, for floats"
        )
    product = weight.to(torch.float64) * factor
    rounded = product.to(weight.dtype)
    return rounded if torch.equal(rounded.to(torch.float64), product) else product.to(torch.float32)
