"""The config.json fields that most families share, checked, and the common blocks built from them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onward.errors import ConfigError, warn_once
from onward.models.blocks import Attention, Decoder, DecoderLayer, DecoderNames, FeedForward, RMSNorm
from onward.models.blocks.feed_forward import Activation
from onward.models.blocks.layer import Mixer, TokenBlock
from onward.models.fields import Config, FieldOverlay, TrackedFields, flag, json_object, positive_int, positive_number
from onward.models.rope import RotarySchedule, rotary_schedule

# Far more than any model has, but a tuple of this size still fits in memory.
MAX_LAYERS = 10_000
_LAYER_TYPES = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class CommonFields:
    """The fields of nearly every config.json, and the blocks built from them. intermediate_size: of the feed-forward
    block. head_dim: of queries, keys and values."""

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
    tie_word_embeddings: bool
    activation: Activation

    def norm(self, width: int | None = None, **changes: Any) -> RMSNorm:
        """A norm of the residual stream, or of another width. changes: other fields of `RMSNorm`."""
        return replace(RMSNorm(width or self.hidden_size, self.rms_norm_eps), **changes)

    def attention(self, **changes: Any) -> Attention:
        """The attention of a layer. changes: other fields of `Attention`."""
        attention = Attention(self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim, self.rope)
        return replace(attention, **changes)

    def feed_forward(self, **changes: Any) -> FeedForward:
        """The feed-forward block of a layer. changes: other fields of `FeedForward`."""
        return replace(FeedForward(self.hidden_size, self.intermediate_size, self.activation), **changes)

    def layer(self, mixer: Mixer, feed_forward: TokenBlock, **changes: Any) -> DecoderLayer:
        """A layer with a norm before each of its blocks. changes: other fields of `DecoderLayer`."""
        norm = self.norm()
        return replace(DecoderLayer(mixer, feed_forward, mixer_norm=norm, feed_forward_norm=norm), **changes)

    def windowed(self, attention: Attention, windows: Iterable[int | None]) -> list[DecoderLayer]:
        """A layer for each window, equal otherwise."""
        return [self.layer(replace(attention, window=window), self.feed_forward()) for window in windows]

    def decoder(self, layers: Iterable[DecoderLayer], **changes: Any) -> Decoder:
        """The decoder of these layers. changes: other fields of `Decoder`."""
        decoder = Decoder(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_position_embeddings=self.max_position_embeddings,
            layers=tuple(layers),
            norm=self.norm(),
            tie_word_embeddings=self.tie_word_embeddings,
        )
        return replace(decoder, **changes)


# hidden_act in config.json -> the activation of a feed-forward block.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def common_fields(
    config: Config,
    *,
    default_head_dim: int | None = None,
    activations: Sequence[str] = ("silu",),
    activation_field: str = "hidden_act",
    default_tie: bool = False,
    default_eps: float = 1e-6,
    **rope_options: Any,
) -> CommonFields:
    """The common fields, checked for consistency.

    Args:
        default_head_dim: hidden_size / num_attention_heads by default.
        activations: the supported values of `activation_field`; the first one is the default.
        default_tie, default_eps: of `tie_word_embeddings` and `rms_norm_eps`.
        rope_options: of `rotary_schedule`.
    """
    activation = config.get(activation_field, activations[0])
    if activation not in activations and not (activation == "swish" and "silu" in activations):
        names = " or ".join(map(repr, activations))
        raise ConfigError(f"config.json: {activation_field} {activation!r} is not supported; this family uses {names}")
    hidden_size = positive_int(config, "hidden_size")
    num_heads = positive_int(config, "num_attention_heads")
    num_kv_heads = positive_int(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    if default_head_dim is None and config.get("head_dim") is None and hidden_size % num_heads:
        raise ConfigError(
            f"config.json: hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads}), "
            "or head_dim must be given"
        )
    head_dim = positive_int(config, "head_dim", default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim must be even, since RoPE rotates pairs of features; got {head_dim}")
    max_position = positive_int(config, "max_position_embeddings")
    tied = config.get("tie_word_embeddings") is None and default_tie
    return CommonFields(
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive_int(config, "intermediate_size"),
        num_layers=positive_int(config, "num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=positive_number(config, "rms_norm_eps", default_eps),
        max_position_embeddings=max_position,
        rope=rotary_schedule(config, head_dim, max_position, **rope_options),
        tie_word_embeddings=tied or flag(config, "tie_word_embeddings"),
        activation=_ACTIVATIONS[activation],
    )


def attention_biases(config: Config) -> dict[str, Any]:
    """The fields of an `Attention` with or without all biases: `attention_bias`."""
    bias = flag(config, "attention_bias")
    return {"qkv_bias": bias, "o_bias": bias}


def sliding_window(config: Config, default: int | None = 4096) -> int | None:
    """The window of sliding layers; None: all positions (null in the config). default: of an absent field, as in
    transformers."""
    if config.get("sliding_window", default) is None:
        return None
    return positive_int(config, "sliding_window", default)


def layer_types(config: Config, default: Sequence[str], known: Sequence[str] = _LAYER_TYPES) -> tuple[str, ...]:
    """The type of each layer: `layer_types`, or the family's default."""
    types = config.get("layer_types")
    types = list(default) if types is None else types
    check_layer_types(types, len(default), known)
    return tuple(types)


def every_nth_full(interval: int, num_layers: int) -> list[str]:
    """Layer types: every `interval`-th layer has full attention, the others have a window."""
    return ["sliding_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]


def layer_windows(
    config: Config, default: Sequence[str], window: int | None, *, has_switch: bool = False
) -> tuple[int | None, ...]:
    """The window of each layer, by its type (`layer_types`); None for full attention. has_switch: whether the family
    has `use_sliding_window`."""
    types = layer_types(config, default)
    if window is None and "sliding_attention" in types:
        fields = "use_sliding_window and sliding_window give" if has_switch else "sliding_window gives"
        raise ConfigError(
            f"config.json: layer_types names 'sliding_attention', but {fields} no window: set "
            f"{'both' if has_switch else 'it'}, or make every layer 'full_attention'"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def ropes_by_type(config: Config) -> dict[str, dict[str, Any]]:
    """`rope_parameters` with an object for each layer type (transformers 5); empty for older configs."""
    by_type = json_object(config, "rope_parameters")
    if unknown := [name for name in by_type if name not in _LAYER_TYPES]:
        raise ConfigError(
            f"config.json: rope_parameters of this family has an object for {' and for '.join(map(repr, _LAYER_TYPES))}"
            f"; got a field {unknown[0]!r}"
        )
    if any(json_object(by_type, name).get("truncate") is False for name in by_type):
        raise ConfigError(
            "config.json: rope_parameters has an object for each type of layer, and there 'truncate' must be true: "
            "transformers reads it only outside these objects"
        )
    return {name: json_object(by_type, name) for name in by_type}


def only(config: Config, **fields: Any) -> None:
    """Raise unless each field is absent or has the value (one of a tuple of values) that the family supports."""
    for name, supported in fields.items():
        value, values = config.get(name), supported if isinstance(supported, tuple) else (supported,)
        if value is not None and value not in values:
            has = " or ".join(map(repr, values))
            raise ConfigError(f"config.json: {name} {value!r} is not supported; this family has {has}")


def ignore(config: Config, *names: str) -> None:
    """Mark fields without effect as read."""
    for name in names:
        config.get(name)


def check_layer_types(
    types: Any, num_layers: int, known: Sequence[str] = _LAYER_TYPES, *, name: str = "layer_types"
) -> None:
    """Raise unless `layer_types`, or the field of this name, names a known type for each layer."""
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in known for kind in types):
        got = f"{len(types)}: {sorted(set(map(str, types)))}" if isinstance(types, list) else repr(types)
        raise ConfigError(
            f"config.json: {name} must have {num_layers} entries (num_hidden_layers) of "
            f"{' or '.join(map(repr, known))}; got {got}"
        )


def check_attends(types: Sequence[str], *, name: str = "layer_types") -> None:
    """Raise unless a layer has full attention: a cache needs at least one layer's keys and values. name: the field with
    the types."""
    if "full_attention" not in types:
        raise ConfigError(f"config.json: at least one layer of this family must be 'full_attention'; {name} has none")


# ── multimodal checkpoints ───────────────────────────────────────────────────────────────────────────────────

# Fields of the text part that config.json may have itself; others are in `text_config`.
_SHARED = ("tie_word_embeddings",)


def read_text_part(
    config: Config,
    read: Callable[[Config], Decoder],
    other_fields: Sequence[str],
    unread: Sequence[str] = ("model.vision_tower.", "model.multi_modal_projector."),
) -> Decoder:
    """The decoder that `text_config` describes, with one warning that the rest of the model is skipped.

    Args:
        config: of the whole checkpoint.
        read: reads the config of a text model.
        other_fields: fields of config.json for the other parts.
        unread: prefixes of the names of their weights.

    Raises:
        ConfigError: `text_config` is missing, or has an unknown field.
    """
    (name,) = config["architectures"]
    text = json_object(config, "text_config")
    if not text:
        raise ConfigError(
            f"config.json: {name} needs a 'text_config', which describes the model of its text; it has none"
        )
    ignore(config, *other_fields, *_SHARED)
    fields = TrackedFields(text)
    shared = {field: config[field] for field in _SHARED if config.get(field) is not None}
    decoder = read(FieldOverlay(shared, fields))
    fields.check_unread(f"the text of {name}")
    warn_once(f"{name}: only the text part is loaded: prompts cannot contain images")
    return replace(
        decoder,
        names=DecoderNames(
            embed_tokens="model.language_model.embed_tokens",
            layers="model.language_model.layers",
            norm="model.language_model.norm",
            layer_embeddings="model.language_model",
        ),
        unread=(*unread, *(name.replace("model.", "model.language_model.", 1) for name in decoder.unread)),
    )
