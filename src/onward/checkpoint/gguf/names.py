"""What GGUF calls the weights that have these names in the Hugging Face family."""

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from onward.checkpoint.gguf.family import FusedTensor, GgufFamily, keys_and_values, of_fused_experts


def _each(stock: str, gguf: str, *parts: str) -> dict[str, str]:
    """A line for each part, in place of the {} of both names."""
    return {stock.format(part): gguf.format(part) for part in parts}


_QKV, _FFN = ("q", "k", "v"), ("gate", "up", "down")
# A weight's stock name without "model." (or "backbone.") and ".weight" -> that of GGUF; `model.layers.3.` is `blk.3.`.
# The matrices of all experts are one tensor. A line whose stock name has its end, or none, says all of GGUF's.
WHOLE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    **_each("self_attn.{}_proj", "attn_{}", *_QKV),
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    **_each("self_attn.{}_norm", "attn_{}_norm", "q", "k"),
    "self_attn.sinks": "attn_sinks.weight",
    "post_attention_layernorm": "ffn_norm",
    **_each("mlp.{}_proj", "ffn_{}", *_FFN),
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    **_each("mlp.experts.{}_proj", "ffn_{}_exps", *_FFN),
    **_each("mlp.shared_experts.{}_proj", "ffn_{}_shexp", *_FFN),
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
QWEN35 = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    **_each("mlp.shared_expert.{}_proj", "ffn_{}_shexp", *_FFN),
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
# Of Qwen3-Next, whose older files have fewer tensors.
QWEN3NEXT = {**QWEN35, "linear_attn.in_proj_a": "ssm_ba", "linear_attn.in_proj_b": "ssm_ba"}
FUSED_QWEN3NEXT = {**QWEN3NEXT, "linear_attn.in_proj_qkv": "ssm_in", "linear_attn.in_proj_z": "ssm_in"}
LATENT = {
    **_each("self_attn.{}_proj", "attn_{}", "q_a", "q_b", "kv_b"),
    **_each("self_attn.{}_layernorm", "attn_{}_norm", "q_a", "kv_a"),
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
}
CUT_LATENT: dict[str, str | FusedTensor] = {
    **LATENT,
    "self_attn.kv_b_proj": FusedTensor(("attn_k_b", "attn_v_b"), keys_and_values),
}
LFM2 = {
    "embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    **_each("self_attn.{}_layernorm", "attn_{}_norm", "q", "k"),
    **_each("conv.{}", "shortconv.{}", "conv", "in_proj", "out_proj"),
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
GRANITE_EXPERTS = {
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    **_each("block_sparse_moe.experts.{}_proj", "ffn_{}_exps", *_FFN),
}
_MAMBA = {
    "in_proj": "ssm_in",
    "conv1d": "ssm_conv1d",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
}
# Granite's block of all tokens, beside experts.
SHARED_GRANITE: dict[str, str | FusedTensor] = {
    **GRANITE_EXPERTS,
    "shared_mlp.input_linear": FusedTensor(("ffn_gate_shexp", "ffn_up_shexp")),
    "shared_mlp.output_linear": "ffn_down_shexp",
}
GRANITE_HYBRID: dict[str, str | FusedTensor] = {
    **{f"mamba.{part}": tensor for part, tensor in _MAMBA.items()},
    "shared_mlp.input_linear": FusedTensor(("ffn_gate", "ffn_up")),
    "shared_mlp.output_linear": "ffn_down",
}
FALCON_H1 = {
    **{f"mamba.{part}": tensor for part, tensor in _MAMBA.items()},
    "final_layernorm": "output_norm",
    "pre_ff_layernorm.weight": "ffn_norm",  # that is all of the tensor's name
    **_each("feed_forward.{}_proj", "ffn_{}", *_FFN),
}
_OF_A_BLOCK = {
    **_MAMBA,
    **_each("{}_proj", "attn_{}", *_QKV),
    "o_proj": "attn_output",
    **_each("{}_proj", "ffn_{}", "up", "down"),
    "gate": "ffn_gate_inp",
    "gate.e_score_correction_bias": "exp_probs_b.bias",
    **_each("experts.{}_proj", "ffn_{}_exps", "up", "down"),
    **_each("shared_experts.{}_proj", "ffn_{}_shexp", "up", "down"),
    "fc1_latent_proj": "ffn_latent_down",
    "fc2_latent_proj": "ffn_latent_up",
}
NEMOTRON_H = {
    **{f"mixer.{part}": tensor for part, tensor in _OF_A_BLOCK.items()},
    "embeddings": "token_embd",
    "norm_f": "output_norm",
    "norm": "attn_norm",
}
AFTER_ATTENTION = {"post_attention_layernorm": "post_attention_norm"}
AFTER_BOTH = {**AFTER_ATTENTION, "post_feedforward_layernorm": "post_ffw_norm"}
FOUR_NORMS = {**AFTER_BOTH, "pre_feedforward_layernorm": "ffn_norm"}
GEMMA4 = {
    **FOUR_NORMS,
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale.weight",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    **_each("experts.{}_proj", "ffn_{}_exps", *_FFN),
}

_EXPERT = re.compile(r"((?:.+\.)?experts)\.(\d+)\.(.+)")


def with_fused_experts(family: GgufFamily) -> GgufFamily:
    """A family whose files have the gate and the other half of each expert in one matrix."""
    halves = ("ffn_gate_exps", "ffn_up_exps")
    fused = {part: "ffn_gate_up_exps" for part, line in {**LAYER, **family.names}.items() if line in halves}
    return family._replace(names={**family.names, **fused}, order=of_fused_experts(family.order))


class GgufName(NamedTuple):
    """The tensor of a weight, or the several that it is cut into; which of the matrices that a tensor stacks is meant,
    None: all of it; and `FusedTensor.by`."""

    tensors: tuple[str, ...]
    expert: int | None = None
    by: Callable[[list[Tensor]], Tensor] = torch.cat


def gguf_name(name: str, family: GgufFamily) -> GgufName:
    """Where the weight of a stock name lies; under the stock name itself where the table has none."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        stem, kind = name, ""
    stem = stem.removeprefix("model.").removeprefix("backbone.")
    whole = family.names.get(stem, WHOLE.get(stem))
    if isinstance(whole, str):
        return GgufName((f"{whole}.{kind}",))
    layers, _, rest = stem.partition(".")
    number, _, part = rest.partition(".")
    match = _EXPERT.fullmatch(part)
    part = part if match is None else f"{match[1]}.{match[3]}"
    expert = None if match is None else int(match[2])
    line, end = family.names.get(f"{part}.{kind}"), ""
    if line is None:
        line, end = family.names.get(part, LAYER.get(part)), f".{kind}" if kind else ""
    if layers != "layers" or line is None:
        return GgufName((name,))
    joined = line if isinstance(line, FusedTensor) else FusedTensor((line,))
    return GgufName(tuple(f"blk.{number}.{tensor}{end}" for tensor in joined.tensors), expert, joined.by)
