"""What families with Mamba2 read from config.json, checked, and the block that follows from it."""

from collections.abc import Mapping, Sequence
from typing import Any

from onward.errors import ConfigError
from onward.models.blocks import Mamba2, RMSNorm
from onward.models.config import CommonFields, check_attends, check_layer_types
from onward.models.fields import flag, number_or_infinity, positive_int
from onward.ops.ssd import WIDEST

FULL, LINEAR = "full_attention", "linear_attention"
# What files of older versions of transformers call them.
_OLD_NAMES = {"attention": FULL, "mamba": LINEAR, "mamba2": LINEAR}
# How a prompt is cut, which changes nothing here; how weights were drawn; and how others keep states.
NO_SAY = (
    *("mamba_chunk_size", "chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "rescale_prenorm_residual"),
    *(
        "num_logits_to_keep",
        "time_step_min",
        "time_step_max",
        "time_step_floor",
        "time_step_rank",
        "time_step_init_scheme",
    ),
)


def mamba_block(config: Mapping[str, Any], fields: CommonFields, *, inner: int | None = None, **changes: Any) -> Mamba2:
    """The mixer of a config with fields such as `mamba_n_heads`.

    Args:
        inner: how many features all heads have; by default `mamba_expand` times the width of the stream.
        changes: fields of `Mamba2` that differ.
    """
    heads = positive_int(config, "mamba_n_heads", 128)
    expand = positive_int(config, "mamba_expand", 2)
    width = "mamba_expand times hidden_size" if inner is None else "mamba_d_ssm"
    inner = expand * fields.hidden_size if inner is None else inner
    auto = config.get("mamba_d_head") in (None, "auto")
    head_dim = inner // heads if auto else positive_int(config, "mamba_d_head")
    if head_dim * heads != inner:
        raise ConfigError(
            f"config.json: mamba_n_heads ({heads}) heads of mamba_d_head ({head_dim}) make {heads * head_dim}, "
            f"and {width} is {inner}"
        )
    return mamba2(
        config, fields, heads=heads, head_dim=head_dim,
        groups=positive_int(config, "mamba_n_groups", 1),
        state_dim=positive_int(config, "mamba_d_state", 256),
        taps=positive_int(config, "mamba_d_conv", 4),
        conv_bias=flag(config, "mamba_conv_bias", default=True),
        in_bias=flag(config, "mamba_proj_bias"),
        **{"out_bias": flag(config, "mamba_proj_bias"), "limits": time_step_limit(config)} | changes,
    )  # fmt: skip


def mamba2(
    config: Mapping[str, Any],
    fields: CommonFields,
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state_dim: int,
    taps: int,
    **options: Any,
) -> Mamba2:
    """The mixer of these sizes, checked; by default with a norm of each group behind the gate.

    options: other fields of `Mamba2`.
    """
    for name in NO_SAY:
        config.get(name)
    if heads % groups:
        raise ConfigError(f"config.json: the heads of Mamba2 ({heads}) must be a multiple of its groups ({groups})")
    if max(head_dim, state_dim) > WIDEST:
        raise ConfigError(
            f"config.json: states of Mamba2 have at most {WIDEST} by {WIDEST} numbers a head here; got {head_dim} "
            f"features of a head and {state_dim} of a state"
        )
    norm = RMSNorm(heads * head_dim, fields.rms_norm_eps, groups=groups)
    options = {"norm": norm} | options
    return Mamba2(fields.hidden_size, heads, head_dim, groups, state_dim, taps, **options)


def time_step_limit(config: Mapping[str, Any]) -> tuple[float, float]:
    """The least and the greatest dt: any by default."""
    limit = config.get("time_step_limit")
    if limit is None:
        return 0.0, float("inf")
    if not isinstance(limit, list | tuple) or len(limit) != 2:
        raise ConfigError(f"config.json: time_step_limit must be two numbers; got {limit!r}")
    least, most = (number_or_infinity(value, "time_step_limit") for value in limit)
    if not 0 <= least <= most:
        raise ConfigError(f"config.json: time_step_limit must be two numbers from 0 on, in order; got {limit!r}")
    return least, most


def hybrid_types(
    config: Mapping[str, Any], name: str, num_layers: int, default: Sequence[str] = (), also: Sequence[str] = ()
) -> list[str]:
    """The type of each layer, by a field of this name: FULL, LINEAR, or another that the family has also."""
    types = config.get(name)
    types = list(default) if types is None else types
    types = [_OLD_NAMES.get(kind, kind) for kind in types] if isinstance(types, list) else types
    check_layer_types(types, num_layers, (FULL, LINEAR, *also), name=name)
    check_attends(types, name=name)
    return list(types)


def layers_by_index(config: Mapping[str, Any], name: str, num_layers: int) -> list[str]:
    """The type of each layer, by a field that lists those that attend."""
    attending = config.get(name) or []
    if not isinstance(attending, list) or any(type(i) is not int or not 0 <= i < num_layers for i in attending):
        raise ConfigError(f"config.json: {name} must be a list of layers from 0 to {num_layers - 1}; got {attending!r}")
    return [FULL if index in attending else LINEAR for index in range(num_layers)]
