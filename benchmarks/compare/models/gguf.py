"""A Qwen3 checkpoint as GGUF, written straight from its safetensors.

python -m benchmarks.compare.models.gguf CHECKPOINT DESTINATION BF16|Q8_0|Q4_0

Every matrix takes the format, the tied embedding too; norms are float32. There is no vocabulary in the file: prompts
are ids.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[part]}.weight"


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
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])


def bf16_as_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def main() -> None:
    checkpoint, destination, name = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    config = json.loads((checkpoint / "config.json").read_text())
    writer = GGUFWriter(destination, config["model_type"], use_temp_file=False)
    write_header(writer, config)
    matrices, vectors = GGMLQuantizationType[name], GGMLQuantizationType.F32
    for tensor, shape, values in bf16_tensors(checkpoint / "model.safetensors"):
        kind = matrices if len(shape) == 2 else vectors
        writer.add_tensor(
            gguf_name(tensor), gguf.quantize(bf16_as_float32(values).reshape(shape), kind), raw_dtype=kind
        )
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
