"""Small GGUF models, written by llama.cpp's own package, and the checkpoints that they were made from."""

import re
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_hybrids import HYBRIDS, factors_of, of_mamba, write_gate_and_up, write_hybrid_config

from onward.models import WeightScope, read_config

_WINDOW = {"sliding_window": 9}
_EXPERTS = {"num_experts_per_tok": 2, "num_hidden_layers": 1}
_GEMMA = {"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 64, **_WINDOW}
_GEMMA4 = {
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 32,
    "global_head_dim": 64,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
    },
    **_WINDOW,
}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
_LONGROPE |= {"short_factor": [1.0 + at / 24 for at in range(24)], "long_factor": [2.0 + at for at in range(24)]}
_SHARED_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 64,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 96,
    **_SHARED_EXPERTS,
}
_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "full_attention_interval": 2,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
_DELTA_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
_YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LOCAL = {"rope_type": "default", "rope_theta": 150000.0}
# The test cases: a name -> GGUF's architecture, that of config.json, and fields that differ from `CONFIG`.
MODELS: dict[str, tuple[str, str, dict]] = {
    "llama": ("llama", "Llama", {}),
    "mixtral": ("llama", "Mixtral", {"num_local_experts": 4, **_EXPERTS}),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen3": ("qwen3", "Qwen3", {}),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3Moe",
        {"num_experts": 4, "moe_intermediate_size": 256, "norm_topk_prob": True, **_EXPERTS},
    ),
    "qwen3moe with fused experts": (
        "qwen3moe",
        "Qwen3Moe",
        {"num_experts": 4, "moe_intermediate_size": 256, "norm_topk_prob": True, **_EXPERTS},
    ),
    "mixtral with fused experts": ("llama", "Mixtral", {"num_local_experts": 4, **_EXPERTS}),
    "qwen3next with fused experts": ("qwen3next", "Qwen3Next", _DELTA | _DELTA_EXPERTS),
    "qwen35": ("qwen35", "Qwen3_5", _DELTA),
    "qwen35 with as many keys": ("qwen35", "Qwen3_5", _DELTA | {"linear_num_key_heads": 4}),
    "qwen35moe": (
        "qwen35moe",
        "Qwen3_5Moe",
        _DELTA | _DELTA_EXPERTS,
    ),
    "qwen3next": ("qwen3next", "Qwen3Next", _DELTA | _DELTA_EXPERTS),
    "qwen3next with fewer tensors": ("qwen3next", "Qwen3Next", _DELTA | _DELTA_EXPERTS),
    "deepseek2": (
        "deepseek2",
        "DeepseekV3",
        _LATENT
        | {"norm_topk_prob": True, "n_group": 2, "topk_group": 2}
        | {"rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "deepseek2 with one matrix for keys and values": (
        "deepseek2",
        "DeepseekV2",
        _LATENT
        | {"q_lora_rank": None, "norm_topk_prob": False, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    ),
    "gemma2": ("gemma2", "Gemma2", {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 5.0, **_GEMMA}),
    "gemma3": ("gemma3", "Gemma3", {"rope_theta": 1e6, "num_hidden_layers": 6, **_GEMMA}),
    "gemma4": (
        "gemma4",
        "Gemma4",
        _GEMMA4
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
        | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 5.0}
        | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 352},
    ),
    "gemma4 with experts": (
        "gemma4",
        "Gemma4",
        _GEMMA4
        | {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 256},
    ),
    "phi3": ("phi3", "Phi3", {"sliding_window": None}),
    "phi3 for long texts": (
        "phi3",
        "Phi3",
        {"rope_parameters": _LONGROPE | {"original_max_position_embeddings": 16}, **_WINDOW},
    ),
    "olmo2": ("olmo2", "Olmo2", {}),
    "olmo3": (
        "olmo2",
        "Olmo3",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": _YARN | {"attention_factor": 1.2}, "sliding_attention": _LOCAL},
            **_WINDOW,
        },
    ),
    "exaone4": ("exaone4", "Exaone4", {"layer_types": ["sliding_attention", "full_attention"], **_WINDOW}),
    "glm4": ("glm4", "Glm4", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "glm4 of a model that sees images": (
        "glm4",
        "Glm4",
        {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "granite": (
        "granite",
        "Granite",
        {
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "granitemoe": (
        "granitemoe",
        "GraniteMoe",
        {"num_local_experts": 4, "logits_scaling": 2.0, "attention_multiplier": 0.1, **_EXPERTS},
    ),
    "granitemoe with a shared block": (
        "granitemoe",
        "GraniteMoeShared",
        {"attention_multiplier": 0.1, "num_local_experts": 4, "shared_intermediate_size": 384, **_EXPERTS},
    ),
    "lfm2": (
        "lfm2",
        "Lfm2",
        {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}
        | {"norm_eps": 1e-6, "rope_theta": 1e6},
    ),
    "glm4moe": (
        "glm4moe",
        "Glm4Moe",
        {
            **_SHARED_EXPERTS,
            "norm_topk_prob": True,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "smollm3": ("smollm3", "SmolLM3", {"num_hidden_layers": 4, "rope_theta": 2e6}),
    "seed_oss": ("seed_oss", "SeedOss", {"attention_bias": True, "attention_out_bias": False}),
    "gpt-oss": (
        "gpt-oss",
        "GptOss",
        {"num_local_experts": 4, "rope_parameters": _YARN | {"truncate": False}, **_WINDOW, **_EXPERTS},
    ),
    **HYBRIDS,
}
# Types that the package can write; of the others (K-quants) the tests draw the bytes of blocks.
WRITABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
TYPES = (*WRITABLE, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
CONFIG = {
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 352,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


_SOME_ATTEND = ("lfm2", "granitehybrid")
# Whose queries and keys the converter reorders for RoPE.
_BY_PAIRS = ("llama", "granite", "granitemoe", "granitehybrid", "smollm3", "nemotron_h", "nemotron_h_moe")


class _Drawn:
    def __init__(self, seed: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._random = torch.Generator().manual_seed(seed)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        self.tensors[name] = torch.randn(shape, generator=self._random) * 0.05 + (len(shape) == 1)
        return self.tensors[name]


def blocks_of(type: str, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """uint8 [N, bytes]: random blocks of a type, with finite scales of the size that weights have."""
    weights, size = gguf.GGML_QUANT_SIZES[Kind[type]]
    random = np.random.default_rng(seed)
    count = shape[0] * shape[1] // weights
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    largest = {"Q2_K": 3 * 15, "Q3_K": 4 * 32, "Q4_K": 15 * 63, "Q5_K": 31 * 63, "Q6_K": 32 * 127, "IQ4_XS": 127 * 32}
    for at in scales_at(type):
        levels = (random.standard_normal(count) * 0.1 / largest.get(type, 127)).astype(np.float16)
        blocks[:, at : at + 2] = levels.view(np.uint8).reshape(count, 2)
    if type == "MXFP4":
        blocks[:, 0] = random.integers(118, 124, count)
    return blocks.reshape(shape[0], -1)


def scales_at(type: str) -> tuple[int, ...]:
    """Where a block has its float16 numbers."""
    at = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}
    return at.get(type, (0, 2) if type in ("Q4_1", "Q5_1") else (0,))


def dequantized(raw: np.ndarray, type: str) -> torch.Tensor:
    """float32, by the package."""
    return torch.from_numpy(gguf.quants.dequantize(raw, Kind[type]).astype(np.float32))


def write_model(
    file: Path,
    architecture: str = "qwen3",
    type: str = "Q8_0",
    *,
    types: dict[str, str] | None = None,
    metadata=lambda writer: None,
    split_after: int = 0,
    seed: int = 0,
    **changes: object,
) -> tuple[dict, dict[str, torch.Tensor]]:
    """Write a model; returns the config.json and the float32 weights of its twin in the Hugging Face layout.

    type: of all matrices; `types` of single ones, by their stock names. metadata: adds to the file's.
    split_after: the most tensors of a part (0: one file).
    """
    stored, ours, own = MODELS[architecture]
    config = CONFIG | {"architectures": [f"{ours}ForCausalLM"]} | own | changes
    if stored == "falcon-h1" and config["tie_word_embeddings"]:
        config["lm_head_multiplier"] = config["embedding_multiplier"]
    drawn = _Drawn(seed)
    read_config(config).read(WeightScope(drawn))
    options = {"split_max_tensors": split_after} if split_after else {}
    writer = gguf.GGUFWriter(file, stored, use_temp_file=False, **options)
    _write_config(writer, stored, config)
    if "sees images" in architecture:
        writer.add_rope_dimension_sections([8, 4, 4, 0])
    metadata(writer)
    twin, stacks = {}, {}
    for at, (name, tensor) in enumerate(drawn.tensors.items()):
        kind = (types or {}).get(name, type) if tensor.dim() == 2 and not name.endswith(".bias") else "F32"
        factors = factors_of(name, config) if stored == "falcon-h1" else 1.0
        raw = _raw(tensor * factors, kind, seed + at)
        twin[name] = dequantized(raw, kind) / factors
        if stored in _BY_PAIRS and name.split(".")[-2] in ("q_proj", "k_proj"):
            raw = permuted(raw, config["head_dim"])
        if "sees images" in architecture and name.split(".")[-2] in ("q_proj", "k_proj"):
            raw = _halved(raw, config["head_dim"], 2)
        if stored.startswith("qwen35") and ".linear_attn." in name:
            raw = of_delta(name, raw, kind, config)
            if raw is None:  # blocks that the order would cut: the drawn values are those of the file
                raw = _raw(tensor, kind, seed + at)
                keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
                parts = twin[name].view(len(tensor), heads // keys, keys, -1)
                twin[name] = parts.transpose(1, 2).reshape(tensor.shape)
        elif ".mamba." in name or ".mixer." in name:
            raw = of_mamba(name, raw, config)
        elif stored == "qwen3next" and name.endswith(".A_log"):
            raw = -np.exp(raw)
        elif _adds_one(stored, name):
            raw = raw + np.float32(1)
        if len(raw.shape) == 3 and raw.shape[1] == 1:
            raw = raw[:, 0]  # a convolution's
        if name.endswith("shared_mlp.input_linear.weight"):
            write_gate_and_up(writer, name, raw, kind, config)
            continue
        place, expert = gguf_name(name, stored, config["num_hidden_layers"])
        if stored == "granitehybrid" and not config["num_local_experts"]:
            place = place.replace("_shexp", "")
        if name.endswith("in_proj_qkvz.weight") and "fewer" not in architecture:
            _write_qkvz(writer, name, raw, kind, config)
        elif name.endswith("kv_b_proj.weight") and config["q_lora_rank"]:
            _write_latent(writer, place, twin, name, config)
        elif expert is None:
            writer.add_tensor(place, raw, raw_dtype=Kind[kind])
        else:
            stacks.setdefault((place, kind), []).append(raw)
    if "fused" in architecture:
        stacks = _fused_experts(stacks)
    for (place, kind), parts in stacks.items():
        whole = np.stack(parts)
        if "gate_up" in place:  # all gates come first
            whole = np.concatenate(np.split(whole, 2), axis=1)
        writer.add_tensor(place, whole, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, twin


def _fused_experts(stacks: dict) -> dict:
    """The matrices of gates and of the other half under the name that the converter gives to both."""
    fused: dict = {}
    for half in ("gate", "up", "down"):
        for (place, kind), parts in stacks.items():
            if f"ffn_{half}_exps" in place:
                place = place if half == "down" else place.replace(f"ffn_{half}_exps", "ffn_gate_up_exps")
                fused.setdefault((place, kind), []).extend(parts)
    return fused


def gguf_name(name: str, architecture: str, layers: int) -> tuple[str, int | None]:
    """The name of a tensor as the package has it; of an expert's matrix that of all of them, and which it is."""
    expert = re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", name)
    if expert is not None:
        name = f"{expert[1]}.{expert[3]}"
    # The converter calls Mixtral's experts by the names that Mistral's own files have.
    name = re.sub(r"^model\.(layers\.\d+)\.block_sparse_moe\.experts\.w", r"\1.feed_forward.experts.w", name)
    name = re.sub(r"^backbone\.(layers\.\d+)\.mixer\.experts\.", r"model.\1.mlp.experts.", name)
    name = name.replace(".dt_bias", ".dt_proj.bias")
    name = name.replace("block_sparse_moe.experts", "mlp.experts")
    if architecture == "gemma4":
        name = re.sub(r"\.experts\.(gate|up)_proj\.", ".experts.gate_up_proj.", name)
        for ours, theirs in (
            ("router.scale", "ffn_gate_inp.scale"),
            ("router.per_expert_scale", "ffn_down_exps.scale"),
        ):
            if name.endswith(ours):
                return f"blk.{name.split('.')[2]}.{theirs}", None
    name = name.replace("_correction_bias", "_correction.bias")
    name = name if name.endswith((".weight", ".bias", ".A_log", ".D")) else f"{name}.weight"
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    place = gguf.get_tensor_name_map(kinds[architecture], layers).get_name(name, try_suffixes=(".weight", ".bias"))
    assert place is not None, f"the package has no name for {name}"
    return place, None if expert is None else int(expert[2])


def _adds_one(architecture: str, name: str) -> bool:
    """Whether the converter adds 1 to a weight of a norm."""
    added = architecture in ("gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")
    return added and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")


def _write_qkvz(writer: gguf.GGUFWriter, name: str, raw: np.ndarray, kind: str, config: dict) -> None:
    """The fused projections of Qwen3-Next as newer converters write them: all queries, keys and values, and z apart."""
    groups, keys = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
    at = np.cumsum([keys, keys, values])
    *qkv, z = (part.reshape(-1, raw.shape[1]) for part in np.split(raw.reshape(groups, -1, raw.shape[1]), at, axis=1))
    layer = name.split(".")[2]
    writer.add_tensor(f"blk.{layer}.attn_qkv.weight", np.concatenate(qkv), raw_dtype=Kind[kind])
    writer.add_tensor(f"blk.{layer}.attn_gate.weight", np.ascontiguousarray(z), raw_dtype=Kind[kind])


def _write_latent(writer: gguf.GGUFWriter, place: str, twin: dict, name: str, config: dict) -> None:
    """What makes keys and values of latents as newer converters write it: apart, and that of keys transposed."""
    whole = twin[name].view(config["num_attention_heads"], -1, config["kv_lora_rank"]).numpy()
    content = config["qk_nope_head_dim"]
    writer.add_tensor(place.replace("kv_b", "k_b"), np.ascontiguousarray(whole[:, :content].swapaxes(1, 2)))
    writer.add_tensor(place.replace("kv_b", "v_b"), np.ascontiguousarray(whole[:, content:]))


def of_delta(name: str, raw: np.ndarray, kind: str, config: dict) -> np.ndarray | None:
    """A weight of Gated DeltaNet as the converter writes it: value heads in turns, and the rate itself. None: that
    would move parts of blocks."""
    keys, heads, width = (config[f"linear_{field}"] for field in ("num_key_heads", "num_value_heads", "value_head_dim"))

    def in_turns(values: np.ndarray, features: int) -> np.ndarray:
        parts = values.reshape(keys, heads // keys, features, *values.shape[1:])
        return np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(values.shape)

    part = name.partition(".linear_attn.")[2].removesuffix(".weight")
    if part == "A_log":
        raw = -np.exp(raw)
    if part in ("A_log", "dt_bias", "in_proj_a", "in_proj_b"):
        return in_turns(raw, 1)
    if part == "in_proj_z":
        return in_turns(raw, width)
    if part in ("in_proj_qkv", "conv1d"):
        first = 2 * keys * config["linear_key_head_dim"]
        return np.concatenate((raw[:first], in_turns(raw[first:], width)))
    if part == "out_proj":
        weights, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
        if width % weights:
            return None
        blocks = raw.view(np.uint8).reshape(len(raw), -1, size).swapaxes(0, 1)
        return (
            np.ascontiguousarray(in_turns(blocks, width // weights).swapaxes(0, 1))
            .reshape(len(raw), -1)
            .view(raw.dtype)
        )
    return raw


def permuted(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """The rows as the converter's LlamaModel writes them."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _halved(rows: np.ndarray, head_dim: int, share: int) -> np.ndarray:
    """Of the first part of each head, which turns, the even rows come before the odd ones."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:]).copy()
    turned = heads[:, : head_dim // share]
    heads[:, : head_dim // share] = np.concatenate((turned[:, 0::2], turned[:, 1::2]), axis=1)
    return heads.reshape(rows.shape)


def _raw(tensor: torch.Tensor, type: str, seed: int) -> np.ndarray:
    if type in WRITABLE:
        return gguf.quantize(tensor.numpy(), Kind[type])
    return blocks_of(type, tuple(tensor.shape), seed)


def _write_config(writer: gguf.GGUFWriter, architecture: str, config: dict) -> None:
    """The metadata that the converter makes of a config.json."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    heads = 1 if config.get("q_lora_rank") else config["num_key_value_heads"]  # of the latent, which all heads share
    if architecture in _SOME_ATTEND:
        heads = [heads if kind.endswith("attention") else 0 for kind in config["layer_types"]]
    writer.add_head_count_kv(heads)
    if architecture == "deepseek2":
        _write_latent_config(writer, config)
    elif architecture == "gemma4":
        _write_gemma4_config(writer, config)
    else:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for field, add in {
        "num_experts": writer.add_expert_count,
        "num_local_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "top_k_experts": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "n_routed_experts": writer.add_expert_count,
        "n_shared_experts": writer.add_expert_shared_count,
        "first_k_dense_replace": writer.add_leading_dense_block_count,
        "routed_scaling_factor": writer.add_expert_weights_scale,
        "norm_topk_prob": writer.add_expert_weights_norm,
        "conv_L_cache": writer.add_shortconv_l_cache,
        "shared_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "linear_conv_kernel_dim": writer.add_ssm_conv_kernel,
        "linear_key_head_dim": writer.add_ssm_state_size,
        "linear_num_key_heads": writer.add_ssm_group_count,
        "linear_num_value_heads": writer.add_ssm_time_step_rank,
        "full_attention_interval": writer.add_full_attention_interval,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
    }.items():
        if field in config:
            add(config[field])
    if "linear_value_head_dim" in config:
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    if architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"] or 0)
    write_hybrid_config(writer, architecture, config)
    if "layer_types" in config and architecture not in _SOME_ATTEND:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if architecture in ("qwen35", "qwen35moe"):  # of images' positions
        writer.add_rope_dimension_sections([3, 3, 2, 0])
    rope = config.get("rope_parameters", {})
    _write_rope(writer, config, rope.get("full_attention", rope))


def _write_gemma4_config(writer: gguf.GGUFWriter, config: dict) -> None:
    full, sliding, rope = config["global_head_dim"], config["head_dim"], config["rope_parameters"]
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(sliding)
    writer.add_value_length_swa(sliding)
    writer.add_rope_dimension_count_swa(sliding)
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    layers, width = config["num_hidden_layers"], config["intermediate_size"]
    if config.get("use_double_wide_mlp"):
        first = layers - config["num_kv_shared_layers"]
        writer.add_feed_forward_length([width if layer < first else 2 * width for layer in range(layers)])
    if "num_global_key_value_heads" in config:
        heads = {"sliding_attention": config["num_key_value_heads"]}
        heads["full_attention"] = config["num_global_key_value_heads"]
        writer.add_head_count_kv([heads[kind] for kind in config["layer_types"]])
    turning = int(full * rope["full_attention"]["partial_rotary_factor"] / 2)
    divisors = np.array([1.0] * turning + [1e30] * (full // 2 - turning), np.float32)
    writer.add_tensor("rope_freqs.weight", divisors)


def _write_latent_config(writer: gguf.GGUFWriter, config: dict) -> None:
    """Widths as newer converters write them: of the latent, and separately of the values computed from it."""
    keys, values = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
        writer.add_value_length(config["kv_lora_rank"])
        writer.add_key_length_mla(keys)
        writer.add_value_length_mla(values)
    else:
        writer.add_key_length(keys)
        writer.add_value_length(values)
    sigmoid = config["architectures"] == ["DeepseekV3ForCausalLM"]
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])


def _write_rope(writer: gguf.GGUFWriter, config: dict, rope: dict) -> None:
    head_dim = config["head_dim"]
    if "NemotronHForCausalLM" in config["architectures"]:  # the converter takes a width that heads do not have
        head_dim = config["hidden_size"] // config["num_attention_heads"]
    turned = config.get("global_head_dim") or int(head_dim * rope.get("partial_rotary_factor", 1))
    writer.add_rope_dimension_count(turned)
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    original = rope.get("original_max_position_embeddings")
    if original is not None:
        writer.add_rope_scaling_orig_ctx_len(original)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            values = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", values)
