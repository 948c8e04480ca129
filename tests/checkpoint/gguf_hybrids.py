"""Models with layers that keep states, as llama.cpp's converter writes them: for `gguf_files`."""

import gguf
import numpy as np
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
}


def write_hybrid_config(writer: gguf.GGUFWriter, architecture: str, config: dict) -> None:
    """The metadata that `gguf_files` does not write of every family."""
    if architecture == "granitehybrid":
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
        writer.add_ssm_time_step_rank(config["mamba_n_heads"])
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")


def of_mamba(name: str, raw: np.ndarray, groups: int) -> np.ndarray:
    """A weight of Mamba2 as the converter writes it."""
    if name.endswith(".A_log"):
        raw = -np.exp(raw)
    if name.endswith((".A_log", ".D")):
        return raw.reshape(-1, 1)
    return raw.reshape(groups, -1) if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")) else raw


def write_gate_and_up(writer: gguf.GGUFWriter, name: str, raw: np.ndarray, kind: str, config: dict) -> None:
    """Granite's block of all tokens: what is one matrix in the checkpoint is two."""
    end = "_shexp" if config["num_local_experts"] else ""
    for part, rows in zip(("gate", "up"), np.split(raw, 2), strict=True):
        place = f"blk.{name.split('.')[2]}.ffn_{part}{end}.weight"
        writer.add_tensor(place, np.ascontiguousarray(rows), raw_dtype=Kind[kind])
