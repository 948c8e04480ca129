"""LoRA adapters in peft's layout: adapter_config.json and adapter_model.safetensors.

Shapes: R rank, K inputs, N outputs of a linear layer.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from onward.checkpoint.formats.settings import Fields, words
from onward.checkpoint.shards import ADAPTER_CONFIG, open_safetensors, read_object
from onward.checkpoint.stored_names import WRAPPERS
from onward.errors import CheckpointError
from onward.models.adapters import Adapter, TrainedAdapter, Update

FIELDS = Fields(
    read=words("peft_type r lora_alpha use_rslora use_dora rank_pattern alpha_pattern init_lora_weights"),
    # About training, or the tensors show their content.
    ignored=words("""
    target_modules exclude_modules modules_to_save layers_to_transform layers_pattern bias fan_in_fan_out lora_dropout
    loftq_config eva_config lora_ga_config runtime_config megatron_core qalora_group_size task_type auto_mapping
    peft_version inference_mode revision base_model_name_or_path ensure_weight_tying
    """),
    refused=dict.fromkeys(
        words("""
        layer_replication target_parameters megatron_config corda_config alora_invocation_tokens trainable_token_indices
        lora_bias use_qalora velora_config monteclora_config use_bdlora arrow_config kasa_config
        """),
        (),
    ),
)

# Values of init_lora_weights for which peft initializes A and B from the weights (like PiSSA, arXiv 2404.02948) and
# subtracts them: the adapter then applies only to the remaining weights.
_WEIGHTS_CHANGED = re.compile(r"(pissa|corda|olora|loftq|lora_ga)(_.*)?", re.IGNORECASE)


@dataclass(frozen=True)
class PeftConfig:
    """rank, alpha: defaults for modules without a pattern. rslora: the scale is alpha / sqrt(rank) (arXiv 2312.03732).
    dora: weights have learned magnitudes (arXiv 2402.09353). ties_tables: a tied head changes with the embedding."""

    rank: int
    alpha: float
    rslora: bool
    dora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    ties_tables: bool

    def rank_of(self, module: str) -> int:
        return int(_match_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """The factor for a module's product B A."""
        rank = self.rank_of(module)
        alpha = float(_match_pattern(self.alpha_pattern, module, self.alpha))
        return alpha / (rank**0.5 if self.rslora else rank)


def read_peft_config(folder: Path) -> PeftConfig:
    path = folder / ADAPTER_CONFIG
    if not path.exists():
        raise CheckpointError(f"{folder} is not an adapter: it has no {ADAPTER_CONFIG}")
    fields = read_object(path, CheckpointError)
    if fields.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: only peft_type 'LORA' is supported; got {fields.get('peft_type')!r}")
    try:
        FIELDS.check(fields, str(path))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}: {_MERGE}") from error
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and _WEIGHTS_CHANGED.fullmatch(init):
        raise CheckpointError(
            f"{path}: init_lora_weights is {init!r}, which changes the model's own weights too: save the adapter for "
            f"the original weights (save_pretrained with path_initial_model_for_weight_conversion), or {_MERGE}"
        )
    return PeftConfig(
        rank=_number(path, fields, "r", whole=True),
        alpha=_number(path, fields, "lora_alpha"),
        rslora=bool(fields.get("use_rslora")),
        dora=bool(fields.get("use_dora")),
        rank_pattern=_pattern(path, fields, "rank_pattern", whole=True),
        alpha_pattern=_pattern(path, fields, "alpha_pattern"),
        ties_tables=bool(fields.get("ensure_weight_tying")),
    )


def _match_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first key that matches the module's name, or its end after a dot, as a regular expression."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _number(path: Path, fields: Mapping[str, Any], name: str, whole: bool = False) -> Any:
    value = fields.get(name)
    fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not fits or not 0 < value < 2**31:  # type: ignore[operator]  # it is a number here
        kind = "integer" if whole else "number"
        raise CheckpointError(f"{path}: {name!r} must be a positive {kind}; got {value!r}")
    return value


def _pattern(path: Path, fields: Mapping[str, Any], name: str, whole: bool = False) -> dict[str, Any]:
    pattern = fields.get(name) or {}
    if not isinstance(pattern, dict):
        raise CheckpointError(f"{path}: {name!r} must map module names to numbers; got {pattern!r}")
    for key in pattern:
        _number(path, pattern, key, whole)
        try:
            re.compile(key)
        except re.error as error:
            raise CheckpointError(f"{path}: {name!r} has {key!r}, not a valid regular expression ({error})") from error
    return pattern


WEIGHTS = "adapter_model.safetensors"
_MERGE = "merge the adapter with peft (merge_and_unload) and load the merged model"
_PREFIX = "base_model.model."
# Suffixes of tensor names after the module, and their meaning.
_KINDS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_B.bias": "b_bias",
    "lora_embedding_A": "embedding_a",
    "lora_embedding_B": "embedding_b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    "weight": "weight",
    "bias": "bias",
}


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter, without checking whether it matches a model.

    Raises:
        CheckpointError: a file is absent or damaged, half of an update is missing, a shape does not match the rank, a
            number is not finite, or a tensor is not part of a LoRA.
    """
    config = read_peft_config(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        others = sorted(file.name for file in folder.glob("adapter_model*"))
        hint = f"; it holds {others[0]}: save the adapter as safetensors" if others else ""
        raise CheckpointError(f"{folder} has no {WEIGHTS}{hint}")
    file = open_safetensors(path)
    parts: dict[str, dict[str, Tensor]] = {}
    for name in sorted(file.keys()):
        if ".original_module." in name:
            continue  # the base model's, which peft saves along with resized tables
        module, kind = _parsed(path, name)
        tensor = file.get_tensor(name)
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{path}: {name!r} must hold finite floats; it has dtype {tensor.dtype}")
        parts.setdefault(module, {})[kind] = tensor
    return _assembled(path, config, parts)


def _parsed(path: Path, name: str) -> tuple[str, str]:
    inner = name.removeprefix(_PREFIX)
    for end, kind in sorted(_KINDS.items(), key=lambda item: -len(item[0])):
        if inner != name and inner.endswith(f".{end}"):
            # peft wraps adapted layers, and may save the wrapped weight or bias.
            module = ".".join(part for part in inner.split(".") if part not in WRAPPERS)
            module = module.removesuffix(f".{end}").removesuffix(".base_layer")
            return module.removesuffix(".modules_to_save"), kind
    raise CheckpointError(f"{path}: {name!r} is not a LoRA tensor: {_MERGE}")


def _assembled(path: Path, config: PeftConfig, parts: Mapping[str, dict[str, Tensor]]) -> Adapter:
    updates: dict[str, Update] = {}
    embeddings: dict[str, Update] = {}
    replaced: dict[str, Tensor] = {}
    for module, tensors in parts.items():
        if "a" in tensors or "b" in tensors:
            updates[module] = _update(path, config, module, tensors)
        if "embedding_a" in tensors or "embedding_b" in tensors:
            embeddings[module] = Update(*_pair(path, config, module, tensors, "embedding_a", "embedding_b"))
            if config.dora or "magnitude" in tensors:
                raise CheckpointError(f"{path}: {module} is an embedding with DoRA, which Onward does not support")
        replaced |= {f"{module}.{kind}": tensors[kind] for kind in ("weight", "bias") if kind in tensors}
    tables = [name for name in (*embeddings, *replaced) if "embed_tokens" in name]
    if config.ties_tables and tables:
        raise CheckpointError(f"{path}: {tables[0]} changes with ensure_weight_tying, which is not supported: {_MERGE}")
    return Adapter(updates, embeddings, replaced)


def _update(path: Path, config: PeftConfig, module: str, tensors: Mapping[str, Tensor]) -> Update:
    a, b = _pair(path, config, module, tensors, "a", "b")
    if "b_bias" in tensors:
        raise CheckpointError(f"{path}: {module} has a bias in lora_B (lora_bias), which Onward does not support")
    magnitude = tensors.get("magnitude")
    if config.dora and magnitude is None:
        raise CheckpointError(f"{path}: {module} has no lora_magnitude_vector, and adapter_config.json says use_dora")
    if magnitude is not None and magnitude.numel() != b.shape[0]:
        raise CheckpointError(f"{path}: {module} has {b.shape[0]} outputs and {magnitude.numel()} magnitudes")
    return Update(a, b, None if magnitude is None else magnitude.flatten().to(torch.float32))


def _pair(
    path: Path, config: PeftConfig, module: str, tensors: Mapping[str, Tensor], *kinds: str
) -> tuple[Tensor, Tensor]:
    """A [R, K] and B [N, R] times its scale, float32."""
    ends = [next(end for end, each in _KINDS.items() if each == kind) for kind in kinds]
    for kind, end in zip(kinds, ends, strict=True):
        if kind not in tensors:
            raise CheckpointError(f"{path}: {module} has no {end}: save the adapter again")
    (a, b), rank = (tensors[kind] for kind in kinds), config.rank_of(module)
    if a.dim() != 2 or b.dim() != 2 or not a.shape[0] == b.shape[1] == rank:
        inputs, outputs = ("vocabulary", "width") if kinds[0] == "embedding_a" else ("inputs", "outputs")
        raise CheckpointError(
            f"{path}: {module} has {ends[0]} {list(a.shape)} and {ends[1]} {list(b.shape)}, but rank {rank} in "
            f"adapter_config.json: they must be [{rank}, {inputs}] and [{outputs}, {rank}]"
        )
    return a.to(torch.float32), b.to(torch.float32) * config.scale_of(module)


def write_adapter(adapter: TrainedAdapter, folder: Path, base: str | None) -> None:
    """Write a trained adapter's parameters as an existing folder in peft's layout. base: the model that it is for."""
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(adapter.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    tensors = {f"{_PREFIX}{name}": each.detach().contiguous() for name, each in adapter.parameters.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
