"""A model of random weights as GGUF, from its config alone.

python -m benchmarks.compare.models.drawn_gguf CONFIG DESTINATION BF16|Q8_0|Q4_0

Every matrix takes the format, but routers and what is smaller than one block are float32, as llama.cpp's own converter
has them. Blocks are drawn, with weights of a checkpoint's size, and so is the vocabulary. The tensors are those that
Onward reads, under the names that the `gguf` package gives them.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from benchmarks.compare.models.gguf import drawn_blocks, write_header
from onward.models import parameter_shapes, read_config

ARCHITECTURES = {
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
}


def main() -> None:
    config, destination, kind = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2], sys.argv[3]
    architecture = ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(destination, gguf.MODEL_ARCH_NAMES[architecture], use_temp_file=False)
    write_header(writer, {"rope_parameters": {"rope_theta": config.get("rope_theta")}} | config)
    write_family(writer, config)
    random = np.random.default_rng(0)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, shape in stacked(parameter_shapes(read_config(config))):
        stored = stored_name(names, name)
        own = kind if name_takes_format(stored, shape) else "F32"
        raw = drawn(shape, own, stored, random)
        writer.add_tensor(stored, raw, raw_dtype=GGMLQuantizationType[own])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_family(writer: GGUFWriter, config: dict) -> None:
    """What the header says beyond that of Qwen3."""
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "linear_num_key_heads" in config:
        rotated = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])
        writer.add_rope_dimension_count(rotated)
        # Of a text's positions all sections are the same.
        writer.add_rope_dimension_sections([rotated // 6 + 1, rotated // 6 + 1, rotated // 6, 0])
        writer.add_full_attention_interval(config["full_attention_interval"])
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])


def stacked(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as GGUF has them: all experts of a layer in one tensor, a convolution without its middle."""
    experts: dict[str, int] = {}
    for name in shapes:
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            kind = f"{before}.experts.{after.partition('.')[2]}"
            experts[kind] = experts.get(kind, 0) + 1
    for name, shape in shapes.items():
        before, _, after = name.partition(".experts.")
        if not after:
            yield name, (shape[0], shape[2]) if len(shape) == 3 else shape
        elif after.startswith("0."):
            kind = f"{before}.experts.{after.removeprefix('0.')}"
            yield kind, (experts[kind], *shape)


def stored_name(names: gguf.TensorNameMap, name: str) -> str:
    if name.endswith("dt_bias"):
        return f"{names.get_name(name.removesuffix('dt_bias') + 'dt_proj')}.bias"
    stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if stored is None:
        raise ValueError(f"GGUF has no name for {name}")
    return stored


def name_takes_format(stored: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and "ffn_gate_inp" not in stored and "conv1d" not in stored


def drawn(shape: tuple[int, ...], kind: str, stored: str, random: np.random.Generator) -> np.ndarray:
    """A tensor's blocks; float32 for "F32"."""
    if kind == "F32":
        values = 0.02 * random.standard_normal(shape, np.float32)
        if "norm" in stored:
            values += 1
        return -np.exp(values) if stored.endswith("ssm_a") else values
    rows = int(np.prod(shape[:-1]))
    if kind == "BF16":
        pool = (0.02 * random.standard_normal(1 << 22, np.float32)).view(np.uint32) >> 16
        blocks = np.resize(pool.astype(np.uint16), (rows, shape[-1])).view(np.uint8)
    else:
        blocks = drawn_blocks((rows, shape[-1]), kind, random)
    return blocks.reshape(*shape[:-1], -1)


if __name__ == "__main__":
    main()
