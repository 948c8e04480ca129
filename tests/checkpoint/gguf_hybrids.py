"""Models with layers that keep states, as llama.cpp's converter writes them: for `gguf_files`."""

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


def of_mamba(name: str, raw: np.ndarray, groups: int) -> np.ndarray:
    """A weight of Mamba2 as the converter writes it."""
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
    """Granite's block of all tokens: what is one matrix in the checkpoint is two."""
    end = "_shexp" if config["num_local_experts"] else ""
    for part, rows in zip(("gate", "up"), np.split(raw, 2), strict=True):
        place = f"blk.{name.split('.')[2]}.ffn_{part}{end}.weight"
        writer.add_tensor(place, np.ascontiguousarray(rows), raw_dtype=Kind[kind])
