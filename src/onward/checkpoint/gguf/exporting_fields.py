"""What the config.json of a model that goes to GGUF leaves out, and its decoder has."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from onward.checkpoint.gguf.exporting_rope import rope_of
from onward.errors import RequestError
from onward.models.blocks import Attention, Decoder, Experts, SideBySide

_T = TypeVar("_T")
# Where older files have what `rope_parameters` has in newer ones.
OF_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings")


def common(config: Mapping[str, Any], decoder: Decoder) -> dict[str, Any]:
    """With the fields of attention and norms, and one spelling of those of RoPE."""
    attention = first(mixers(decoder), Attention)
    fields = {name: value for name, value in config.items() if name not in OF_ROPE}
    rope = rope_of(config)
    if attention.rope is not None:
        share = attention.rope.dims / attention.head_dim
        rope |= {"rope_theta": attention.rope.base, "partial_rotary_factor": share}
    return {
        **fields,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rms_norm_eps": decoder.norm.eps,
        "tie_word_embeddings": decoder.tie_word_embeddings,
        "rope_parameters": rope,
    }


def mixers(decoder: Decoder) -> list[Any]:
    """Those of all layers, and in layers that have two side by side both."""
    mixers = [layer.mixer for layer in decoder.layers]
    return [
        part
        for mixer in mixers
        for part in ((mixer.attention, mixer.recurrent) if isinstance(mixer, SideBySide) else (mixer,))
    ]


def experts_of(decoder: Decoder, *, dense: int = 0) -> Experts:
    """Those of its layers. dense: how many of the first may have none.

    Raises:
        RequestError: another has none.
    """
    blocks = [layer.feed_forward for layer in decoder.layers]
    for index, block in enumerate(blocks[dense:], dense):
        if not isinstance(block, Experts):
            raise RequestError(f"layer {index} has no experts, and in GGUF layers of this family have them")
    return first(blocks, Experts)


def first(blocks: list[Any], kind: type[_T]) -> _T:
    """The first block of a kind.

    Raises:
        RequestError: there is none.
    """
    found: Iterator[_T] = (block for block in blocks if isinstance(block, kind))
    block = next(found, None)
    if block is None:
        raise RequestError(f"in GGUF models of this family have layers with {kind.__name__}, and this one has none")
    return block
