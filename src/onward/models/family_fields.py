"""The config.json fields of experts and Mamba2, checked, and the blocks built from them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from onward.errors import ConfigError
from onward.models.blocks import Experts, Mamba2, RMSNorm
from onward.models.blocks.decoder import MtpNames
from onward.models.config import MAX_LAYERS, CommonFields, check_attends, check_layer_types, ignore
from onward.models.fields import Config, flag, number_or_infinity, positive_int, words
from onward.ops.ssd import WIDEST

FULL, LINEAR = "full_attention", "linear_attention"
# Names in older versions of transformers.
_OLD_NAMES = {"attention": FULL, "mamba": LINEAR, "mamba2": LINEAR}
# Fields without effect: how prompts are chunked, how weights were initialised, and how other libraries keep states.
MAMBA_FIELDS = words("""
    mamba_chunk_size chunk_size use_mamba_kernels mamba_ssm_cache_dtype rescale_prenorm_residual num_logits_to_keep
    time_step_min time_step_max time_step_floor time_step_rank time_step_init_scheme
""")


def mamba_block(config: Config, fields: CommonFields, *, inner: int | None = None, **changes: Any) -> Mamba2:
    """The Mamba2 mixer of a config with fields such as `mamba_n_heads`. inner: the features of all heads; by default
    `mamba_expand` times hidden_size. changes: other fields of `Mamba2`."""
    heads = positive_int(config, "mamba_n_heads", 128)
    expand = positive_int(config, "mamba_expand", 2)
    width = "mamba_expand times hidden_size" if inner is None else "mamba_d_ssm"
    inner = expand * fields.hidden_size if inner is None else inner
    auto = config.get("mamba_d_head") in (None, "auto")
    head_dim = inner // heads if auto else positive_int(config, "mamba_d_head")
    if head_dim * heads != inner:
        raise ConfigError(
            f"config.json: mamba_n_heads ({heads}) times mamba_d_head ({head_dim}) is {heads * head_dim}, "
            f"but {width} is {inner}"
        )
    return mamba2(
        config, fields, heads=heads, head_dim=head_dim,
        groups=positive_int(config, "mamba_n_groups", 1),
        state_dim=positive_int(config, "mamba_d_state", 256),
        kernel_size=positive_int(config, "mamba_d_conv", 4),
        conv_bias=flag(config, "mamba_conv_bias", default=True),
        in_bias=flag(config, "mamba_proj_bias"),
        **{"out_bias": flag(config, "mamba_proj_bias"), "limits": time_step_limit(config)} | changes,
    )  # fmt: skip


def mamba2(
    config: Config, fields: CommonFields, *, heads: int, head_dim: int, groups: int, state_dim: int, **options: Any
) -> Mamba2:
    """The Mamba2 mixer of these sizes, checked; by default with a norm by group after the gate. options: other fields
    of `Mamba2`."""
    ignore(config, *MAMBA_FIELDS)
    if heads % groups:
        raise ConfigError(f"config.json: the heads of Mamba2 ({heads}) must be a multiple of its groups ({groups})")
    if max(head_dim, state_dim) > WIDEST:
        raise ConfigError(
            f"config.json: Mamba2 states are limited to {WIDEST} by {WIDEST} numbers per head; got {head_dim} "
            f"features of a head and {state_dim} of a state"
        )
    options = {"norm": RMSNorm(heads * head_dim, fields.rms_norm_eps, groups=groups)} | options
    return Mamba2(fields.hidden_size, heads, head_dim, groups, state_dim, **options)


def time_step_limit(config: Config) -> tuple[float, float]:
    """The minimum and maximum of dt; unlimited by default."""
    limit = config.get("time_step_limit")
    if limit is None:
        return 0.0, float("inf")
    if not isinstance(limit, list | tuple) or len(limit) != 2:
        raise ConfigError(f"config.json: time_step_limit must be two numbers; got {limit!r}")
    low, high = (number_or_infinity(value, "time_step_limit") for value in limit)
    if not 0 <= low <= high:
        raise ConfigError(f"config.json: time_step_limit must be two numbers from 0 on, in order; got {limit!r}")
    return low, high


def hybrid_types(
    config: Config, name: str, num_layers: int, default: Sequence[str] = (), also: Sequence[str] = ()
) -> list[str]:
    """The type of each layer, from the field `name`: FULL, LINEAR, or one of `also`."""
    types = config.get(name)
    types = list(default) if types is None else types
    types = [_OLD_NAMES.get(kind, kind) for kind in types] if isinstance(types, list) else types
    check_layer_types(types, num_layers, (FULL, LINEAR, *also), name=name)
    check_attends(types, name=name)
    return list(types)


def layers_by_index(config: Config, name: str, num_layers: int, other: str) -> list[str]:
    """The type of each layer, from a field that lists the attention layers. other: the type of the rest."""
    attending = config.get(name)
    attending = [] if attending is None else attending
    if not isinstance(attending, list) or any(type(i) is not int or not 0 <= i < num_layers for i in attending):
        raise ConfigError(f"config.json: {name} must be a list of layers from 0 to {num_layers - 1}; got {attending!r}")
    return [FULL if index in attending else other for index in range(num_layers)]


# ── experts ───────────────────────────────────────────────────────────────────────────────────────────────────


def qwen_expert_count(config: Config, default: int) -> int:
    """The number of experts. Files of transformers 5 may have num_local_experts instead of Qwen's num_experts."""
    count, other = config.get("num_experts"), config.get("num_local_experts")
    if None not in (count, other) and count != other:
        raise ConfigError(f"config.json: num_experts is {count!r} and num_local_experts {other!r}: keep one")
    return positive_int(config, "num_local_experts" if count is None else "num_experts", default)


def layers_with_experts(config: Config, num_layers: int) -> list[bool]:
    """Whether each layer has experts: every `decoder_sparse_step`-th one except `mlp_only_layers`."""
    step, dense = positive_int(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        raise ConfigError(f"config.json: 'mlp_only_layers' must be a list of whole numbers; got {dense!r}")
    return [index not in dense and (index + 1) % step == 0 for index in range(num_layers)]


def routed_experts(config: Config, fields: CommonFields, count: int, chosen: int, **changes: Any) -> Experts:
    """The `count` experts of a layer. chosen: the default number per token. changes: other fields of `Experts`."""
    chosen = positive_int(config, "num_experts_per_tok", min(chosen, count), most=count)
    return replace(Experts(fields.hidden_size, fields.intermediate_size, count, chosen), **changes)


def grouped_experts(config: Config, experts: Experts, default: tuple[int, int] = (1, 1)) -> Experts:
    """Experts in DeepSeek's groups. default: the number of groups, and of groups per token."""
    count, chosen = experts.num_experts, experts.num_chosen
    groups = positive_int(config, "n_group", default[0], most=count)
    best_groups = positive_int(config, "topk_group", default[1], most=groups)
    if count % groups or (groups > 1 and count == groups) or chosen > count // groups * best_groups:
        raise ConfigError(
            f"config.json: n_group ({groups}) must divide {count} experts into equal groups of two or more, of which "
            f"topk_group ({best_groups}) must contain the {chosen} experts of a token (num_experts_per_tok)"
        )
    return replace(experts, groups=groups, kept_groups=best_groups)


def num_dense_layers(config: Config, default: int, name: str = "first_k_dense_replace") -> int:
    """The number of leading layers without experts."""
    value = config.get(name)
    return 0 if value == 0 or (value is None and default == 0) else positive_int(config, name, default)


def layers_ahead(config: Config, num_layers: int) -> dict[str, Any]:
    """Fields of a `Decoder` with multi-token prediction layers (arXiv 2412.19437), which follow the last one."""
    count = 0
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):  # the latter in transformers 5
        if config.get(name):
            count = positive_int(config, name, most=MAX_LAYERS)
    roots = [f"model.layers.{num_layers + i}" for i in range(count)]
    names = [MtpNames(root, "enorm", "hnorm", "eh_proj", "", "shared_head.norm") for root in roots[:1]]
    return {"unread": tuple(f"{root}." for root in roots), "mtp": names[0] if names else None}
