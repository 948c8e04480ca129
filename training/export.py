"""Writes a trained model as a Hugging Face folder, in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from .model import ModelConfig, Transformer
from .tokenizer import END_OF_TEXT, IM_END, save_tokenizer, token_id


def export_model(model: Transformer, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config.json, generation_config.json, the tokenizer and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    eos_ids = [token_id(tokenizer, IM_END), token_id(tokenizer, END_OF_TEXT)]
    bos_id = token_id(tokenizer, END_OF_TEXT)
    write_json(folder / "config.json", _config(model.config, bos_id, eos_ids[0]))
    write_json(folder / "generation_config.json", _generation_config(bos_id, eos_ids))
    save_tokenizer(tokenizer, folder, model.config.max_position_embeddings)
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    fresh = folder / "model.safetensors.new"
    save_file(weights, fresh, metadata={"format": "pt"})
    fresh.chmod(0o644)  # safetensors makes the file readable only by the owner; a shipped file is for everyone
    fresh.replace(folder / "model.safetensors")


def sizes(config: ModelConfig) -> dict[str, object]:
    """The fields of a config.json that a target, a draft and a head have."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
    }


def _config(config: ModelConfig, bos_id: int, eos_id: int) -> dict[str, object]:
    """Qwen3's config.json. rope_theta is in it twice, because transformers 5 reads rope_parameters."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **sizes(config),
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "pad_token_id": bos_id,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }


def _generation_config(bos_id: int, eos_ids: list[int]) -> dict[str, object]:
    return {
        "bos_token_id": bos_id,
        "eos_token_id": eos_ids,
        "pad_token_id": bos_id,
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 0,  # if absent, transformers uses 50
        "top_p": 0.9,
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
