"""The table of GGUF's architectures: what config.json and the names of weights would be in the Hugging Face layout.

A family that Onward reads from folders is read from GGUF by a line here.
"""

from collections.abc import Mapping
from typing import NamedTuple


class GgufFamily(NamedTuple):
    """architecture: the one of config.json. permuted: whether the converter reordered the rows of queries and keys for
    RoPE over pairs of neighbours, as it does for its LlamaModel and all that derive from it. config: fields that files
    leave unsaid. biases: fields that say whether there are biases, and a tensor that is there then."""

    architecture: str
    permuted: bool = False
    config: Mapping[str, object] = {}
    biases: Mapping[str, str] = {}


# "llama" is Mistral's too: the two differ in a sliding window, which the converter leaves out.
FAMILIES = {
    "llama": GgufFamily(
        "LlamaForCausalLM",
        permuted=True,
        biases={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"},
    ),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
}

# A field of config.json -> the key behind "{architecture}.".
NUMBERS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}

# A weight's stock name without "model." and ".weight" -> that of GGUF; `model.layers.3.` is `blk.3.`.
WHOLE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
LAYER = {
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
    """The GGUF name of a weight's stock name; the stock name itself where the table has none."""
    stem, _, kind = name.rpartition(".")
    stem = stem.removeprefix("model.")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.{kind}"
    layers, _, rest = stem.partition(".")
    number, _, part = rest.partition(".")
    return f"blk.{number}.{LAYER[part]}.{kind}" if layers == "layers" and part in LAYER else name
