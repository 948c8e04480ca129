"""Checkpoints of random weights in the shape of real models, made locally: speed does not depend on the values."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from onward.models import read_config
from onward.models.families import read_params

QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


class _RandomTensors:
    """Hands `read_params` a random tensor for every name it asks for, and keeps them."""

    def __init__(self) -> None:
        self.made: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(0)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, generator=self._generator).mul_(0.02)
        self.made[name] = (values + 1 if name.endswith("norm.weight") else values).to(torch.bfloat16)
        return self.made[name]


def random_checkpoint(name: str = "qwen3-0.6b", config: dict = QWEN3_0_6B) -> Path:
    """The folder of a random checkpoint under .benchmarks/, made on first use."""
    folder = Path(".benchmarks") / name
    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        tensors = _RandomTensors()
        read_params(read_config(config), tensors)
        save_file(tensors.made, folder / "model.safetensors", metadata={"format": "pt"})
        # Written last: its presence says that the rest is whole.
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def weight_bytes_per_token(config: dict = QWEN3_0_6B) -> int:
    """Bytes of bf16 weights that one token reads: all but the embedding's other rows."""
    shape = read_config(config)
    looked_up = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size
    return 2 * (shape.num_parameters - looked_up)
