"""The shape of a decoder, read from a checkpoint's config.json and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onward.errors import ConfigError
from onward.models.fields import flag, positive_int, positive_number
from onward.models.rope import RotarySchedule, rotary_schedule

# Far more than any model has, yet a tuple of so many windows still fits in memory.
_MOST_LAYERS = 10_000


@dataclass(frozen=True)
class DecoderConfig:
    """The numbers that the pre-norm decoder of `onward.models.decoder` is built from.

    `windows` holds, for each layer, how many positions its attention sees (None: all).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RotarySchedule
    windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def num_parameters(self) -> int:
        """The number of weights in the model; a tied head counts once."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_out, kv_out = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = hidden * (q_out + 2 * kv_out) + q_out * hidden
        biases = self.qkv_bias * (q_out + 2 * kv_out) + self.o_bias * hidden + self.mlp_bias * (2 * inner + hidden)
        norms = 2 * hidden + self.qk_norm * 2 * self.head_dim
        layer = attention + 3 * hidden * inner + biases + norms
        heads = 1 if self.tie_word_embeddings else 2
        return heads * self.vocab_size * hidden + self.num_layers * layer + hidden


def common_fields(config: Mapping[str, Any], *, default_head_dim: int | None = None) -> dict[str, Any]:
    """The fields that every family reads the same way, checked against each other."""
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"config.json: hidden_act {act!r} is not supported; these families use 'silu'")
    hidden_size = positive_int(config, "hidden_size")
    num_heads = positive_int(config, "num_attention_heads")
    num_kv_heads = positive_int(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    head_dim = positive_int(config, "head_dim", default_head_dim or _default_head_dim(config, hidden_size, num_heads))
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim must be even, since RoPE rotates pairs of features; got {head_dim}")
    max_position = positive_int(config, "max_position_embeddings")
    return {
        "vocab_size": positive_int(config, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": positive_int(config, "intermediate_size"),
        "num_layers": positive_int(config, "num_hidden_layers", most=_MOST_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": positive_number(config, "rms_norm_eps", 1e-6),
        "max_position_embeddings": max_position,
        "rope": rotary_schedule(config, head_dim, max_position),
        "tie_word_embeddings": flag(config, "tie_word_embeddings"),
    }


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """How many positions a windowed layer sees; None for all, which the config writes as null. A config without the
    field means 4096, as in transformers."""
    if "sliding_window" in config and config["sliding_window"] is None:
        return None
    return positive_int(config, "sliding_window", 4096)


def qwen_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer of a Qwen model; none without `use_sliding_window`. The layers that `layer_types` names
    have one, or else the layers from `max_window_layers` on."""
    window = sliding_window(config) if flag(config, "use_sliding_window") else None
    types = config.get("layer_types")
    if types is None:
        first = 0 if config.get("max_window_layers") == 0 else positive_int(config, "max_window_layers", 28)
        types = ["full_attention" if window is None or i < first else "sliding_attention" for i in range(num_layers)]
    _check_layer_types(types, num_layers)
    if window is None and "sliding_attention" in types:
        raise ConfigError(
            "config.json: layer_types names 'sliding_attention', but use_sliding_window and sliding_window give no "
            "window: set both, or make every layer 'full_attention'"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _check_layer_types(types: Any, num_layers: int) -> None:
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in known for kind in types):
        got = f"{len(types)}: {sorted(set(map(str, types)))}" if isinstance(types, list) else repr(types)
        raise ConfigError(
            f"config.json: layer_types must have {num_layers} entries (num_hidden_layers) of 'full_attention' or "
            f"'sliding_attention'; got {got}"
        )


def _default_head_dim(config: Mapping[str, Any], hidden_size: int, num_heads: int) -> int | None:
    """hidden_size / num_heads: the head_dim of a config that names none."""
    if hidden_size % num_heads and config.get("head_dim") is None:
        raise ConfigError(
            f"config.json: hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads}), "
            "or head_dim must be given"
        )
    return hidden_size // num_heads
