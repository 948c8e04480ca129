"""The GGUF names of weights, by their names in the Hugging Face layout."""

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from onward.checkpoint.gguf.family import FusedTensor, GgufFamily, keys_and_values, with_fused_experts_order


def _each(stock: str, gguf: str, *parts: str) -> dict[str, str]:
    return {stock.format(part): gguf.format(part) for part in parts}


_QKV, _FFN = ("q", "k", "v"), ("gate", "up", "down")
# A weight's stock name without "model." (or "backbone.") and ".weight" -> GGUF's; `model.layers.3.` becomes `blk.3.`.
# All experts share one tensor. An entry with a suffix in the stock name, or none, has the full GGUF name.
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
# Qwen3-Next, whose older files have fewer tensors.
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
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    **_each("{}", "ssm_{}", "conv1d", "norm"),
    **_each("{}_proj", "ssm_{}", "in", "out"),
}
# Granite's shared expert.
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
    "pre_ff_layernorm.weight": "ffn_norm",  # the full GGUF name
    **_each("feed_forward.{}_proj", "ffn_{}", *_FFN),
}
_NEMOTRON_BLOCK = {
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
    **{f"mixer.{part}": tensor for part, tensor in _NEMOTRON_BLOCK.items()},
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
    **_each("{}_feedforward_layernorm_2", "{}_ffw_norm_2", "pre", "post"),
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    **_each("experts.{}_proj", "ffn_{}_exps", *_FFN),
}

_EXPERT = re.compile(r"((?:.+\.)?experts)\.(\d+)\.(.+)")


def with_fused_experts(family: GgufFamily) -> GgufFamily:
    """The family for files that store each expert's gate and up projection in one matrix."""
    halves = ("ffn_gate_exps", "ffn_up_exps")
    fused = {part: "ffn_gate_up_exps" for part, line in {**LAYER, **family.names}.items() if line in halves}
    return family._replace(names={**family.names, **fused}, order=with_fused_experts_order(family.order))


class GgufName(NamedTuple):
    """The tensors of a weight, its expert if they stack several, and `FusedTensor.by`."""

    tensors: tuple[str, ...]
    expert: int | None = None
    by: Callable[[list[Tensor]], Tensor] = torch.cat


def gguf_name(name: str, family: GgufFamily) -> GgufName:
    """Locate the weight of a stock name; without a table entry, it has its stock name."""
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
