"""Adapters that peft creates and saves, for small random models of transformers."""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
FORMS = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ALL},
    "rsLoRA": {"r": 6, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "DoRA": {"r": 4, "lora_alpha": 16, "target_modules": ALL, "use_dora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ALL,
        "rank_pattern": {"down_proj": 7, r"layers\.1\.self_attn\.q_proj": 2},
        "alpha_pattern": {"mlp.up_proj": 1},
    },
    "one layer": {"r": 3, "lora_alpha": 3, "target_modules": ALL, "layers_to_transform": [1]},
    "head and embedding": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    "saved modules": {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, "modules_to_save": ["lm_head", "norm"]},
    "saved head": {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, "modules_to_save": ["lm_head"]},
    "saved table": {"r": 4, "lora_alpha": 8, "target_modules": ["k_proj"], "modules_to_save": ["embed_tokens"]},
    "biases": {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, "bias": "lora_only"},
    "recurrent layers": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["in_proj_qkv", "in_proj_a", "out_proj", "q_proj"],
        "modules_to_save": ["conv1d"],
    },
    "saved convolutions": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["conv1d"]},
    "Mamba2": {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj", "q_proj", "up_proj"]},
}
MAMBA = {
    "mamba_d_ssm": 48,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 8,
    "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 0.7],
}
RECURRENT = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, RECURRENT),
    "falcon_h1": (FalconH1Config, FalconH1ForCausalLM, MAMBA),
}


def base(family: str = "llama", seed: int = 0, **fields):
    """A model in float32 whose logits are of order 1."""
    torch.manual_seed(seed)
    config, model, of_family = CLASSES[family]
    bias = {"attention_bias": True} if family != "qwen3_5" else {}
    made = model(config(**SMALL | bias | of_family | fields)).eval()
    for name, weight in made.named_parameters():
        noise = torch.randn_like(weight)
        weight.data = 1 + 0.2 * noise if name.endswith("norm.weight") else noise * weight.shape[-1] ** -0.5
    return made


def adapted(model, form: str, seed: int = 1):
    """The model with a random adapter that isn't merged, as peft runs it."""
    torch.manual_seed(seed)
    wrapped = get_peft_model(model, LoraConfig(**FORMS[form], init_lora_weights=False, task_type="CAUSAL_LM")).eval()
    for name, weight in wrapped.named_parameters():
        if "modules_to_save" in name or (FORMS[form].get("bias") and name.endswith("bias")):
            weight.data = weight.data + 0.1 * torch.randn_like(weight)
        elif "lora_magnitude" in name:
            weight.data = weight.data * (1 + 0.3 * torch.rand_like(weight))
    return wrapped


def saved(model, folder: Path) -> Path:
    tables = any("lora_embedding" in name for name, _ in model.named_parameters())
    options = {"save_embedding_layers": tables} if hasattr(model, "peft_config") else {}
    model.save_pretrained(folder, **options)
    return folder
