"""Random adapters of the demo model, in folders as peft writes them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

# (outputs, inputs) of the projections that they change, in the first two layers.
_SHAPES = {"q_proj": (256, 192), "v_proj": (128, 192)}


def demo_adapter(folder: Path, seed: int, rank: int = 4) -> Path:
    """An adapter that changes the demo model's texts."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4 * rank, "target_modules": list(_SHAPES)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    draws = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for name, (outputs, inputs) in _SHAPES.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=draws) * inputs**-0.5
            tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=draws)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
