"""The numbers of an architecture as `onward info` shows them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onward.cli.facts import Fact

if TYPE_CHECKING:
    from onward.models import Architecture


def architecture_facts(config: "Architecture") -> list[Fact]:
    """Facts that a family's layers do not have are left out; one that differs between layers lists its values."""
    from onward.cache import StateShape

    mixers = [getattr(layer.mixer, "attention", layer.mixer) for layer in config.layers]
    attending = [mixer for mixer in mixers if not isinstance(getattr(mixer, "cached", None), StateShape)]
    blocks = [layer.feed_forward for layer in config.layers]
    windows = [getattr(mixer, "window", None) for mixer in mixers]
    return [
        Fact("layers", len(config.layers)),
        Fact("hidden_size", config.hidden_size),
        *_values("intermediate_size", blocks, "intermediate_size"),
        *_values("heads", attending, "num_heads"),
        *_values("kv_heads", attending, "num_kv_heads"),
        *_values("head_dim", attending, "head_dim"),
        Fact("vocabulary", config.vocab_size),
        Fact("tied_head", config.tie_word_embeddings),
        Fact("context", config.max_position_embeddings),
        Fact("sliding_window", windows, _windows(windows)),
        *_ropes(mixers),
    ]


def _values(name: str, parts: Sequence[Any], field: str) -> list[Fact]:
    values = list(dict.fromkeys(getattr(part, field) for part in parts if hasattr(part, field)))
    if not values:
        return []
    return [Fact(name, values[0] if len(values) == 1 else values)]


def _windows(windows: Sequence[int | None]) -> str:
    sizes = {size for size in windows if size is not None}
    if not sizes:
        return "none"
    layers = sum(size is not None for size in windows)
    return f"{', '.join(f'{size:,}' for size in sorted(sizes))} in {layers} of {len(windows)} layers"


def _ropes(mixers: Sequence[Any]) -> list[Fact]:
    """The schedules, each once, in order of layers."""
    ropes = dict.fromkeys(rope for mixer in mixers if (rope := getattr(mixer, "rope", None)) is not None)
    if not ropes:
        return []
    values = [{"kind": rope.scaling.kind, "base": rope.base, "factor": rope.scaling.factor} for rope in ropes]
    texts = []
    for rope in ropes:
        scaling = rope.scaling
        scaled = f", {scaling.kind} x {scaling.factor:g} from {scaling.original_max_position:,}"
        texts.append(f"base {rope.base:,.0f}{'' if scaling.kind == 'default' else scaled}")
    return [Fact("rope", values[0] if len(values) == 1 else values, "; ".join(texts))]
