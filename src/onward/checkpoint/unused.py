"""Tensors of a checkpoint that change nothing that Onward computes."""

import re

# What older libraries saved beside the weights: frequencies, angles and masks, which config.json determines.
_BUFFERS = re.compile(
    r".*\brotary_emb\.(?:inv_freq|original_inv_freq|cos_cached|sin_cached)|.*\.(?:attn|self_attn)\.masked_bias"
)
# Scales by which queries, keys and values become FP8, in the names of compressed-tensors, of ModelOpt, of Quark and of
# vLLM. Onward's cache holds them in floats, and transformers leaves these scales out likewise.
_CACHE_SCALES = re.compile(
    r".*\.(?:"
    r"(?:[qkv]|kv|qk|prob)_(?:scale|zero_point)"
    r"|(?:[qkv]_proj|qkv_proj|kv_proj)\.(?:output_scale|output_zero_point|kv_scale|[qkv]_scale|[qkv]_zero_point)"
    r"|(?:prob|[qkv])_output_scale"
    r")"
)


def is_buffer(name: str) -> bool:
    """Whether it is no weight, and follows from config.json."""
    return _BUFFERS.fullmatch(name) is not None


def is_cache_scale(name: str) -> bool:
    """Whether it is a scale of a cache in FP8."""
    return _CACHE_SCALES.fullmatch(name) is not None
