"""Checkpoints with random draft heads in their published layouts."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from onward.testing import random_checkpoint

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24)
LAYERS = 8
# Families whose checkpoints have an MTP layer, with fields of their tiny configs.
MTP = {
    "deepseekv3": {"num_nextn_predict_layers": 1},
    "glm4moe": {"num_nextn_predict_layers": 1, "n_routed_experts": 4, "moe_intermediate_size": 20, "n_group": 1},
    "qwen3next": EXPERTS,
    "qwen3_5": {"mtp_num_hidden_layers": 1},
    "qwen3_5moe": {"mtp_num_hidden_layers": 1},
}


def noise(generator: torch.Generator, name: str, *shape: int) -> Tensor:
    x = torch.randn(shape, generator=generator)
    return 1 + 0.1 * x if name.endswith("norm.weight") else x * shape[-1] ** -0.5


def mtp_names(family: str, layers: int) -> tuple[str, str, str]:
    """The prefixes of the MTP layer's own tensors, and of those of its decoder layer, and of the model's last layer."""
    last = f"model.layers.{layers - 1}."
    if family.startswith("qwen"):
        return "mtp.", "mtp.layers.0.", last
    return f"model.layers.{layers}.", f"model.layers.{layers}.", last


def mtp_checkpoint(folder: Path, family: str, seed: int = 0, change=lambda tensors: None, **fields) -> Path:
    """A random model with an MTP layer. change: changes the tensors in place."""
    folder = random_checkpoint(folder, family, seed=seed, **MTP[family] | fields)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed + 1)
    size, vocab = config["hidden_size"], config["vocab_size"]
    root, layer, last = mtp_names(family, config["num_hidden_layers"])
    for name, tensor in list(tensors.items()):
        if name.startswith(last):
            tensors[layer + name.removeprefix(last)] = noise(generator, name, *tensor.shape)
    if family.startswith("qwen"):
        added = {"fc.weight": (size, 2 * size)}
        added |= {f"{name}.weight": (size,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    else:
        added = {"eh_proj.weight": (size, 2 * size), "embed_tokens.weight": (vocab, size)}
        added |= {"shared_head.head.weight": (vocab, size), "shared_head.norm.weight": (size,)}
        added |= {"enorm.weight": (size,), "hnorm.weight": (size,)}
    tensors |= {root + name: noise(generator, name, *shape) for name, shape in added.items()}
    for name in ("embed_tokens.weight", "shared_head.head.weight"):
        if root + name in tensors:  # copies, as published
            tensors[root + name] = tensors["lm_head.weight" if "head" in name else f"model.{name}"].clone()
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def eagle3_config(target: dict, **fields) -> dict:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "draft_vocab_size": 100,
        "tie_word_embeddings": False,
        **{name: target[name] for name in ("hidden_size", "vocab_size")},
        **fields,
    }


def eagle3_checkpoint(folder: Path, target: Path, seed: int = 0, change=lambda tensors: None, **fields) -> Path:
    """A random EAGLE-3 head for a target's folder, with the tensors that the authors' heads have."""
    config = eagle3_config(json.loads((target / "config.json").read_text()), **fields)
    size, inner, vocab = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    drafts, head_dim = config["draft_vocab_size"], config.get("head_dim", config["hidden_size"] // 4)
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "fc.weight": (size, 3 * size),
        "lm_head.weight": (drafts, size),
        "norm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.post_attention_layernorm.weight": (size,),
        "midlayer.mlp.down_proj.weight": (size, inner),
        "midlayer.mlp.gate_proj.weight": (inner, size),
        "midlayer.mlp.up_proj.weight": (inner, size),
        "midlayer.self_attn.q_proj.weight": (4 * head_dim, 2 * size),
        "midlayer.self_attn.k_proj.weight": (2 * head_dim, 2 * size),
        "midlayer.self_attn.v_proj.weight": (2 * head_dim, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, 4 * head_dim),
    }
    tensors = {name: noise(generator, name, *shape) for name, shape in shapes.items()}
    ids = torch.randperm(vocab, generator=generator)[:drafts].sort().values
    tensors["d2t"] = ids - torch.arange(drafts)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    change(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
