"""What families with experts read from config.json, checked."""

from collections.abc import Mapping
from typing import Any

from onward.errors import ConfigError
from onward.models.config import MOST_LAYERS
from onward.models.fields import positive_int


def qwen_expert_count(config: Mapping[str, Any], default: int) -> int:
    """How many experts a layer has. Files of transformers 5 may say num_local_experts for Qwen's num_experts."""
    count, other = config.get("num_experts"), config.get("num_local_experts")
    if None not in (count, other) and count != other:
        raise ConfigError(f"config.json: num_experts is {count!r} and num_local_experts {other!r}: keep one")
    return positive_int(config, "num_local_experts" if count is None else "num_experts", default)


def layers_with_experts(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Whether each layer of a Qwen model has experts: every `decoder_sparse_step`-th but `mlp_only_layers`."""
    step, dense = positive_int(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        raise ConfigError(f"config.json: 'mlp_only_layers' must be a list of whole numbers; got {dense!r}")
    return [index not in dense and (index + 1) % step == 0 for index in range(num_layers)]


def experts_per_token(config: Mapping[str, Any], count: int, *, default: int) -> int:
    """How many of `count` experts a token goes through."""
    return positive_int(config, "num_experts_per_tok", min(default, count), most=count)


def expert_groups(
    config: Mapping[str, Any], count: int, chosen: int, default: tuple[int, int] = (1, 1)
) -> tuple[int, int]:
    """DeepSeek's groups: in how many the experts lie, and of how many of them a token's experts may come."""
    groups = positive_int(config, "n_group", default[0], most=count)
    kept = positive_int(config, "topk_group", default[1], most=groups)
    if count % groups or (groups > 1 and count == groups) or chosen > count // groups * kept:
        raise ConfigError(
            f"config.json: n_group ({groups}) must cut {count} experts into equal groups of two or more, of which "
            f"topk_group ({kept}) hold the {chosen} that a token goes through (num_experts_per_tok)"
        )
    return groups, kept


def num_dense_layers(config: Mapping[str, Any], default: int, name: str = "first_k_dense_replace") -> int:
    """How many of the first layers have no experts."""
    value = config.get(name)
    return 0 if value == 0 or (value is None and default == 0) else positive_int(config, name, default)


def layers_ahead(config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """How the names of the weights begin that predict tokens further ahead (multi-token prediction, arXiv 2412.19437).
    They stand as layers past the last, and are no part of the forward."""
    count = 0
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):  # transformers 5 calls them so
        if config.get(name):
            count = positive_int(config, name, most=MOST_LAYERS)
    return tuple(f"model.layers.{num_layers + i}." for i in range(count))
