"""Models with recurrent layers, as llama.cpp's converter writes them: for `gguf_files`."""

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_GRANITE = {
    **_MAMBA,
    "layer_types": ["mamba", "attention"],
    "attention_multiplier": 0.1,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
# Factors that are powers of 2: the products that the converter writes are those of the forward, bit for bit.
_FALCON = {
    **_MAMBA,
    "mamba_d_ssm": 512,
    "embedding_multiplier": 4.0,
    "lm_head_multiplier": 0.5,
    "attention_in_multiplier": 0.5,
    "attention_out_multiplier": 2.0,
    "key_multiplier": 0.25,
    "ssm_in_multiplier": 2.0,
    "ssm_out_multiplier": 0.5,
    "ssm_multipliers": [2.0, 0.5, 0.25, 4.0, 2.0],
    "mlp_multipliers": [2.0, 0.5],
    "rope_theta": 1e11,
}
_NEMOTRON = {
    "head_dim": 32,
    "layer_norm_epsilon": 1e-6,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
}
_NEMOTRON_EXPERTS = {
    "hybrid_override_pattern": "M*E",
    "num_hidden_layers": 3,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 512,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 1,
}
HYBRIDS: dict[str, tuple[str, str, dict]] = {
    "granitehybrid": (
        "granitehybrid",
        "GraniteMoeHybrid",
        _GRANITE
        | {"position_embedding_type": "nope", "mamba_conv_bias": False, "shared_intermediate_size": 384}
        | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "granitehybrid without experts": (
        "granitehybrid",
        "GraniteMoeHybrid",
        _GRANITE
        | {"position_embedding_type": "rope", "num_local_experts": 0}
        | {"layer_types": ["attention", "mamba"], "shared_intermediate_size": 512},
    ),
    "falcon-h1": ("falcon-h1", "FalconH1", _FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "nemotron_h": ("nemotron_h", "NemotronH", _NEMOTRON | {"hybrid_override_pattern": "M-*M", "num_hidden_layers": 4}),
    "nemotron_h_moe": ("nemotron_h_moe", "NemotronH", _NEMOTRON | _NEMOTRON_EXPERTS),
    "nemotron_h_moe in a latent space": (
        "nemotron_h_moe",
        "NemotronH",
        _NEMOTRON | _NEMOTRON_EXPERTS | {"moe_latent_size": 256, "use_conv_bias": False},
    ),
    "falcon-h1 without a norm of states": ("falcon-h1", "FalconH1", _FALCON | {"mamba_rms_norm": False}),
}


def write_hybrid_config(writer: gguf.GGUFWriter, architecture: str, config: dict) -> None:
    """The metadata that `gguf_files` does not write of every family."""
    if architecture in ("granitehybrid", "falcon-h1"):
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
        writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    if architecture == "granitehybrid":
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    if architecture.startswith("nemotron_h"):
        _write_nemotron_config(writer, config)


def _write_nemotron_config(writer: gguf.GGUFWriter, config: dict) -> None:
    pattern, has_experts = config["hybrid_override_pattern"], "n_routed_experts" in config
    width = config["moe_intermediate_size" if has_experts else "intermediate_size"]
    writer.add_feed_forward_length([width if kind in "E-" else 0 for kind in pattern])
    writer.add_head_count_kv([config["num_key_value_heads"] if kind == "*" else 0 for kind in pattern])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    if has_experts:
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_group_count(config["n_group"])
    if "moe_latent_size" in config:
        writer.add_moe_latent_size(config["moe_latent_size"])


def of_mamba(name: str, raw: np.ndarray, config: dict) -> np.ndarray:
    """A weight of Mamba2 as the converter writes it."""
    groups = config.get("mamba_n_groups", config.get("n_groups"))
    if name.endswith(".A_log"):
        raw = -np.exp(raw)
    if name.endswith((".A_log", ".D")):
        return raw.reshape(-1, 1)
    return raw.reshape(groups, -1) if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")) else raw


def factors_of(name: str, config: dict) -> torch.Tensor:
    """By what the converter multiplies a weight of Falcon-H1, [] or [N, 1]: the factors of what goes in or comes out.

    It takes that of the embedding for a tied head, too.
    """
    into, (gate, down) = config["attention_in_multiplier"], config["mlp_multipliers"]
    inner, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    if name.endswith("mamba.in_proj.weight"):
        widths = torch.tensor([inner, inner, keys, keys, config["mamba_n_heads"]])
        of_rows = torch.tensor(config["ssm_multipliers"]).repeat_interleave(widths)
        return config["ssm_in_multiplier"] * of_rows.unsqueeze(1)
    factors = {
        "q_proj": into,
        "k_proj": into * config["key_multiplier"],
        "v_proj": into,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "gate_proj": gate,
        "down_proj": down,
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
    }
    return torch.tensor(factors.get(name.split(".")[-2], 1.0))


def write_gate_and_up(writer: gguf.GGUFWriter, name: str, raw: np.ndarray, kind: str, config: dict) -> None:
    """Granite's block of all tokens: one matrix of the checkpoint is split into two."""
    end = "_shexp" if config["num_local_experts"] else ""
    for part, rows in zip(("gate", "up"), np.split(raw, 2), strict=True):
        place = f"blk.{name.split('.')[2]}.ffn_{part}{end}.weight"
        writer.add_tensor(place, np.ascontiguousarray(rows), raw_dtype=Kind[kind])
