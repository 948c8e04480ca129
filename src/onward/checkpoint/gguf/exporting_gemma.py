"""The config.json of Gemma on the way to GGUF, with all fields."""

from collections.abc import Mapping
from typing import Any

from onward.checkpoint.gguf.exporting_fields import OF_ROPE, first, mixers
from onward.checkpoint.gguf.exporting_rope import rope_of
from onward.errors import RequestError
from onward.models.blocks import Attention, Decoder, DenseAndExperts, FeedForward
from onward.models.blocks.layer import TokenBlock
from onward.models.rope import Proportional


def gemma2(config: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    """
    Raises:
        RequestError: it lacks a cap: llama.cpp takes 50 and 30 then.
    """
    scores, logits = first(mixers(decoder), Attention).softcap, decoder.logits_softcap
    return {
        **config,
        **_sizes(decoder),
        "attn_logit_softcapping": _cap("attn_logit_softcapping", scores),
        "final_logit_softcapping": _cap("final_logit_softcapping", logits),
    }


def gemma3(config: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    bases = {mixer.window is None: mixer.rope.base for mixer in mixers(decoder)}
    rope = rope_of(config)
    full = rope | {"rope_theta": bases.get(True, rope["rope_theta"])}
    sliding = {"rope_type": "default", "rope_theta": bases.get(False, 10000.0)}
    return {
        **{name: value for name, value in config.items() if name not in (*OF_ROPE, "rope_local_base_freq")},
        **_sizes(decoder),
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
    }


def gemma4(config: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    """
    Raises:
        RequestError: it has no cap of logits (llama.cpp takes 30 then), no windows, or another RoPE than the family's.
    """
    attentions = [mixer for mixer in mixers(decoder) if isinstance(mixer, Attention)]
    sliding, full = (
        [each for each in attentions if (each.window is not None) == windowed] for windowed in (True, False)
    )
    rope = full[0].rope
    if not sliding or sliding[0].rope is None or rope is None or not isinstance(rope.scaling, Proportional):
        raise RequestError("in GGUF Gemma 4 has layers with a window, and full ones of whose pairs the first turn")
    of_full = {"rope_type": "proportional", "rope_theta": rope.base, "partial_rotary_factor": rope.scaling.share}
    share = sliding[0].rope.dims / sliding[0].head_dim
    of_sliding = {"rope_type": "default", "rope_theta": sliding[0].rope.base, "partial_rotary_factor": share}
    given = decoder.layer_embeddings
    return {
        **{name: value for name, value in config.items() if name not in (*OF_ROPE, "per_layer_config")},
        **_sizes(decoder),
        "num_key_value_heads": sliding[0].num_kv_heads,
        "num_global_key_value_heads": full[0].num_kv_heads,
        "head_dim": sliding[0].head_dim,
        "global_head_dim": full[0].head_dim,
        "sliding_window": sliding[0].window,
        "layer_types": ["full_attention" if each.window is None else "sliding_attention" for each in attentions],
        "num_kv_shared_layers": sum(each.reads is not None for each in attentions),
        "attention_k_eq_v": full[0].values_of_keys,
        "final_logit_softcapping": _cap("final_logit_softcapping", decoder.logits_softcap),
        "rope_parameters": {"full_attention": of_full, "sliding_attention": of_sliding},
        "hidden_size_per_layer_input": 0 if given is None else given.width,
        "vocab_size_per_layer_input": decoder.vocab_size if given is None else given.vocab_size,
        **_blocks([layer.feed_forward for layer in decoder.layers]),
    }


def _sizes(decoder: Decoder) -> dict[str, Any]:
    """What files of the hub leave out of these families."""
    attentions = [mixer for mixer in mixers(decoder) if isinstance(mixer, Attention)]
    windows = [each.window for each in attentions if each.window is not None]
    return {
        "vocab_size": decoder.vocab_size,
        "num_attention_heads": attentions[0].num_heads,
        "num_key_value_heads": attentions[0].num_kv_heads,
        "head_dim": attentions[0].head_dim,
        "rms_norm_eps": decoder.norm.eps,
        "max_position_embeddings": decoder.max_position_embeddings,
        "tie_word_embeddings": decoder.tie_word_embeddings,
        "sliding_window": windows[0] if windows else None,
    }


def _blocks(blocks: list[TokenBlock | None]) -> dict[str, Any]:
    """The fields of the feed-forward blocks: those of the last layers may be twice as wide."""
    dense = [block.dense if isinstance(block, DenseAndExperts) else block for block in blocks]
    widths = [block.intermediate_size for block in dense if isinstance(block, FeedForward)]
    fields = {"intermediate_size": widths[0], "use_double_wide_mlp": widths[-1] != widths[0]}
    if not isinstance(blocks[0], DenseAndExperts):
        return fields | {"enable_moe_block": False, "num_experts": None, "top_k_experts": None}
    experts = blocks[0].experts
    return fields | {
        "enable_moe_block": True,
        "num_experts": experts.num_experts,
        "top_k_experts": experts.num_chosen,
        "moe_intermediate_size": experts.intermediate_size,
    }


def _cap(name: str, cap: float | None) -> float:
    if cap is None:
        raise RequestError(
            f"{name} is null, and of a file without it llama.cpp takes a number of its own: keep the model as "
            "safetensors"
        )
    return cap
