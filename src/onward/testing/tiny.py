"""Tiny real decoders with random weights, in memory or on disk."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from onward.errors import RequestError
from onward.models import FAMILIES, Model, WeightScope, build_model, read_config

# Hybrid families: all layers but the last have this recurrent type.
_HYBRID = dict.fromkeys(("qwen3_5", "qwen3_5moe", "qwen3next"), "linear_attention")
_HYBRID |= dict.fromkeys(("lfm2", "lfm2moe"), "conv") | {"granitemoehybrid": "linear_attention"}
_RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_ROUTED_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "head_dim": 8,  # transformers' name of qk_rope_head_dim
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
    **_ROUTED_EXPERTS,
}
_GEMMA = {"query_pre_attn_scalar": 12, "sliding_window": 24}
_GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.125, "logits_scaling": 8.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}
# The fields of a family's tiny config, added to the common ones.
_FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "gemma2": _GEMMA,
    "gemma3": {"model_type": "gemma3_text", "sliding_window_pattern": 2, "rope_theta": 1e6, **_GEMMA},
    "gemma4": {
        "model_type": "gemma4_text",
        "sliding_window": 24,
        "global_head_dim": 24,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 258,
    },
    "olmo3": {"sliding_window": 24, "rope_theta": 500_000.0},
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": {"residual_multiplier": 0.25, **_GRANITE},
    "granitemoe": _LOCAL_EXPERTS,
    "granitemoeshared": {"shared_intermediate_size": 24, **_LOCAL_EXPERTS},
    "granitemoehybrid": {"num_local_experts": 0, "shared_intermediate_size": 24, "residual_multiplier": 0.25, **_MAMBA},
    "bamba": _MAMBA,
    "falconh1": {"model_type": "falcon_h1", "mamba_d_ssm": 48, "ssm_out_multiplier": 0.5, **_MAMBA},
    "nemotronh": {
        "model_type": "nemotron_h",
        "num_hidden_layers": 4,
        "layer_norm_epsilon": 1e-6,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 12,
        "moe_shared_expert_intermediate_size": 24,
        **_ROUTED_EXPERTS,
    },
    "qwen3_5": {"model_type": "qwen3_5_text", **_RECURRENT},
    "qwen3_5moe": {
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        **_RECURRENT,
        **_EXPERTS,
    },
    "gptoss": {
        "model_type": "gpt_oss",
        "sliding_window": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **_LOCAL_EXPERTS,
    },
    "qwen3next": {"model_type": "qwen3_next", "num_experts": 0, **_RECURRENT},
    "seedoss": {"model_type": "seed_oss"},
    "exaone4": {"sliding_window": 24, "sliding_window_pattern": 2},
    "lfm2": {"block_multiple_of": 16},
    "lfm2moe": {"model_type": "lfm2_moe", "num_dense_layers": 1, "moe_intermediate_size": 20, **_EXPERTS},
    "deepseekv2": {"model_type": "deepseek_v2", "first_k_dense_replace": 1, **_LATENT},
    "deepseekv3": {"model_type": "deepseek_v3", "first_k_dense_replace": 1, **_LATENT},
    "glm4moelite": {"model_type": "glm4_moe_lite", **_LATENT},
    "mistral4": {"rope_parameters": _YARN, **_LATENT},
}


def tiny_config(family: str = "qwen3", **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model, as a dict. Its vocabulary fits `ByteTokenizer`.

    family: "qwen3", "llama", "gemma3", …: the short name of an architecture in `onward.models.FAMILIES`.
    overrides: further fields of config.json.
    """
    names = {name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES if name.endswith("ForCausalLM")}
    if family not in names:
        raise RequestError(f"family must be one of {', '.join(sorted(names))}; got {family!r}")
    config: dict[str, Any] = {
        "architectures": [names[family]],
        "model_type": family,
        "pad_token_id": 0,
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
    config |= _FAMILY_FIELDS.get(family, {}) | overrides
    return _layer_types(family, config["num_hidden_layers"]) | config


def _layer_types(family: str, count: int) -> dict[str, Any]:
    """The field with the types of layers in a hybrid family: the last one has attention."""
    if family == "nemotronh":
        return {"hybrid_override_pattern": ("M-E" * count)[: count - 1] + "*"}
    if family == "bamba":
        return {"attn_layer_indices": [count - 1]}
    if family not in _HYBRID:
        return {}
    return {"layer_types": [_HYBRID[family]] * (count - 1) + ["full_attention"]}


def tiny_model(family: str = "qwen3", *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Model:
    """A model of `tiny_config(family, **overrides)` on the CPU, with random weights from the seed."""
    config = read_config(tiny_config(family, **overrides))
    return build_model(config, config.read(WeightScope(_RandomTensors(seed, dtype))))


def random_checkpoint(
    folder: str | os.PathLike[str],
    family: str = "qwen3",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    **overrides: Any,
) -> Path:
    """Write the model that `tiny_model` makes from the same arguments, in the Hugging Face layout; return the folder.

    folder: created if absent. It gets config.json and the weights, but no tokenizer.
    shards: 1 writes model.safetensors; more write an index and this many files.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **overrides)
    tensors = _RandomTensors(seed, dtype)
    read_config(config).read(WeightScope(tensors))
    (path / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}, indent=2))
    names, files, weight_map = list(tensors.by_name), ["model.safetensors"], dict[str, str]()
    if shards > 1:
        files = [f"model-{index + 1:05}-of-{shards:05}.safetensors" for index in range(shards)]
    for index, file in enumerate(files):
        shard = names[index::shards]
        save_file({name: tensors.by_name[name] for name in shard}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if shards > 1:
        total = sum(tensor.nbytes for tensor in tensors.by_name.values())
        index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2))
    return path


class _RandomTensors:
    """Makes all tensors that a family reads, and keeps them by name."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.by_name: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        noise = torch.randn(shape, generator=self._generator)
        # Keeps activations and logits at a size of about 1 through all layers.
        tensor = 1 + 0.1 * noise if name.endswith(("norm.weight", "norm_f.weight")) else noise * shape[-1] ** -0.5
        self.by_name[name] = tensor.to(dtype or self._dtype)
        return self.by_name[name]
