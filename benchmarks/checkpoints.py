"""Checkpoints of random weights in the shape of real models, made locally: speed does not depend on the values."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from onward.models import WeightScope, parameter_shapes, read_config
from onward.models.architecture import cache_plan
from onward.ops.heads import BLOCK

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

# From memory of the public model.
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
# From memory of the public model.
QWEN3_5_0_8B = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "full_attention_interval": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
EXPERTS = QWEN3_0_6B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
# Qwen3-30B-A3B has 48 layers.
QWEN3_30B_A3B_CUT = EXPERTS | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "tie_word_embeddings": False,
}
SHAPES = {
    "qwen3-0.6b": QWEN3_0_6B,
    "gemma3-1b": GEMMA3_1B,
    "qwen3.5-0.8b": QWEN3_5_0_8B,
    "experts": EXPERTS,
    "qwen3-30b-a3b-cut": QWEN3_30B_A3B_CUT,
}


class _RandomTensors:
    """Gives an architecture's `read` a random tensor for every name that it requests, and stores the tensors."""

    def __init__(self) -> None:
        self.made: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(0)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        values = torch.randn(shape, generator=self._generator).mul_(0.02)
        self.made[name] = (values + 1 if name.endswith("norm.weight") else values).to(dtype or torch.bfloat16)
        return self.made[name]


def random_checkpoint(name: str = "qwen3-0.6b", config: dict = QWEN3_0_6B) -> Path:
    """The folder of a random checkpoint under .benchmarks/, made on first use."""
    folder = Path(".benchmarks") / name
    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        tensors = _RandomTensors()
        read_config(config).read(WeightScope(tensors))
        save_file(tensors.made, folder / "model.safetensors", metadata={"format": "pt"})
        # Written last: its presence says that the rest is whole.
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def checkpoint_with_tokenizer(name: str = "qwen3-0.6b", config: dict = QWEN3_0_6B) -> Path:
    """The same checkpoint (links to its files) with a byte tokenizer, which some converters require."""
    source = random_checkpoint(name, config)
    folder = source.with_name(f"{name}-with-tokenizer")
    if not (folder / "tokenizer.json").is_file():
        folder.mkdir(exist_ok=True)
        for file in ("config.json", "model.safetensors"):
            (folder / file).unlink(missing_ok=True)
            (folder / file).symlink_to((source / file).resolve())
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        # Written last: its presence says that the rest is whole.
        _byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def trained_tokenizer(size: int = 151_643) -> Tokenizer:
    """Byte-level BPE of the installed packages' sources, trained on first use. Masks of grammars cost what the
    vocabulary is like, so a drawn one would not do."""
    file = Path(".benchmarks") / f"vocabulary-{size}.json"
    if not file.is_file():
        sources = sorted(
            str(path)
            for path in Path(torch.__file__).parents[1].rglob("*")
            if path.suffix in (".py", ".pyi", ".md", ".rst", ".txt", ".html") and path.stat().st_size < 300_000
        )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = ["<|endoftext|>"]
        tokenizer.train(
            sources, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=special)
        )
        file.parent.mkdir(exist_ok=True)
        tokenizer.save(str(file))
    return Tokenizer.from_file(str(file))


def weight_bytes_per_token(config: dict = QWEN3_0_6B, precision: str = "bf16") -> int:
    """Bytes of weights that one token reads in Onward's layouts: all but an untied embedding's other rows and the
    experts that it did not choose."""
    shape = read_config(config)
    chosen = config.get("num_experts_per_tok", 1) / config.get("num_experts", 1)
    total = 0.0
    for name, size in parameter_shapes(shape).items():
        if "embed_tokens" in name and not shape.tie_word_embeddings:
            continue
        count = torch.Size(size).numel()
        routes = name.endswith("mlp.gate.weight")
        if precision == "bf16" or len(size) != 2 or routes:
            stored = 2.0 * count
        elif precision == "int8":
            stored = count + 4 * size[0]  # a float32 scale for each row
        else:
            stored = count * 9 / 16  # 32 of 4 bits and a float16 scale
        total += stored * (chosen if ".experts." in name else 1)
    return round(total)


def cache_bytes_per_position(config: dict = QWEN3_0_6B) -> int:
    """Bytes of a bf16 cache that a token reads for each position before it that all layers see."""
    return cache_plan(read_config(config), torch.bfloat16).block_nbytes // BLOCK


def cache_bytes(position: int, config: dict = QWEN3_0_6B) -> int:
    """Bytes that the token at `position` reads of a bf16 cache: of a sliding layer its window, of a recurrent one the
    float32 state itself."""
    plan = cache_plan(read_config(config), torch.bfloat16)
    seen = sum(plan.position_nbytes(layer) * min(position, layer.window or position) for layer in plan.shapes)
    state = config.get("linear_key_head_dim", 0) * config.get("linear_value_head_dim", 0)
    return seen + 4 * state * sum(layer.heads for layer in plan.states)
