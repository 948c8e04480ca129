"""A Qwen3 checkpoint as GGUF, written straight from its safetensors.

python -m benchmarks.compare.models.gguf CHECKPOINT DESTINATION BF16|Q8_0|Q4_0|Q6_K|Q4_K_M

Every matrix takes the format, the tied embedding too; norms are float32. llama.cpp's package cannot write the types of
256 weights: of those the blocks are drawn, with weights of the same size. Q4_K_M mixes Q4_K and Q6_K as llama.cpp
does. The vocabulary is drawn, too: prompts are ids.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from onward.checkpoint.gguf.families import FAMILIES
from onward.checkpoint.gguf.family import gguf_name


def write_header(writer: GGUFWriter, config: dict) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    add_vocabulary(writer, config["vocab_size"])


def add_vocabulary(writer: GGUFWriter, size: int) -> None:
    """Byte-level BPE of as many tokens as the model has, each merged of two earlier ones: it takes as long to read as a
    trained one. Prompts are ids all the same."""
    random = np.random.default_rng(0)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    merges, known = [], set(tokens)
    while len(tokens) < size:
        left, right = (tokens[int(at)] for at in random.integers(0, min(len(tokens), 20000), 2))
        if left + right not in known and len(left + right) <= 12:
            known.add(left + right)
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * size)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def bf16_as_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


# Where float16 numbers stand in a block, and what a weight of about 1 makes them.
SCALES_AT = {"Q4_K": {0: 1 / 200, 2: 1 / 27}, "Q6_K": {208: 1 / 1200}, "Q4_0": {0: 1 / 4}, "Q8_0": {0: 1 / 64}}


def type_of(name: str, recipe: str, layers: int) -> str:
    """The type of a matrix: the recipe itself, or the one that Q4_K_M gives it."""
    if recipe != "Q4_K_M":
        return recipe
    if name.startswith(("token_embd", "output")):
        return "Q6_K"
    layer = int(name.split(".")[1])
    more_bits = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return "Q6_K" if more_bits and name.split(".")[2] in ("attn_v", "ffn_down") else "Q4_K"


def drawn_blocks(shape: tuple[int, ...], kind: str, random: np.random.Generator) -> np.ndarray:
    weights, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (shape[0] * shape[1] // weights, size), dtype=np.uint8)
    for at, scale in SCALES_AT[kind].items():
        blocks[:, at : at + 2] = np.array([0.02 * scale], np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def main() -> None:
    checkpoint, destination, name = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    config = json.loads((checkpoint / "config.json").read_text())
    writer = GGUFWriter(destination, config["model_type"], use_temp_file=False)
    write_header(writer, config)
    random = np.random.default_rng(0)
    for tensor, shape, values in bf16_tensors(checkpoint / "model.safetensors"):
        (stored,) = gguf_name(tensor, FAMILIES[config["model_type"]]).tensors
        kind = type_of(stored, name, config["num_hidden_layers"]) if len(shape) == 2 else "F32"
        if kind in ("Q4_K", "Q6_K"):
            raw = drawn_blocks(shape, kind, random)
        else:
            raw = gguf.quantize(bf16_as_float32(values).reshape(shape), GGMLQuantizationType[kind])
        writer.add_tensor(stored, raw, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def bf16_tensors(path: Path):
    """Name, shape and bits of each tensor: numpy knows no bfloat16, so the file is read here."""
    raw = np.memmap(path, mode="r")
    length = int(raw[:8].view(np.uint64)[0])
    header = json.loads(bytes(raw[8 : 8 + length]))
    header.pop("__metadata__", None)
    for name, about in header.items():
        assert about["dtype"] == "BF16", f"{name} is {about['dtype']}; this writer reads BF16"
        begin, end = about["data_offsets"]
        yield name, tuple(about["shape"]), raw[8 + length + begin : 8 + length + end].view(np.uint16)


if __name__ == "__main__":
    main()
