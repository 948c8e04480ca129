"""adapter_config.json as peft writes it: what an adapter is, and the scale of each of its updates."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.errors import CheckpointError, one_line, warn
from onward.text_input import read_json_file

CONFIG = "adapter_config.json"

# Fields that change what an adapter computes in ways that Onward does not have, unless they are empty.
_REFUSED = (
    *("layer_replication", "target_parameters", "megatron_config", "corda_config", "alora_invocation_tokens"),
    *("trainable_token_indices", "lora_bias", "use_qalora", "velora_config", "monteclora_config", "use_bdlora"),
    *("arrow_config", "kasa_config"),
)
# Fields that are read, and fields that change nothing: the file's tensors say which modules have updates, the layers of
# our families hold weights as torch.nn.Linear does, and the rest is about training.
READ = {"peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "init_lora_weights"}
IDLE = {
    *("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "bias"),
    *("fan_in_fan_out", "lora_dropout", "loftq_config", "eva_config", "lora_ga_config", "runtime_config"),
    *("megatron_core", "qalora_group_size", "task_type", "auto_mapping", "peft_version", "inference_mode", "revision"),
    *("base_model_name_or_path", "ensure_weight_tying"),
}
KNOWN_FIELDS = frozenset({*READ, *IDLE, *_REFUSED})

# The values of init_lora_weights with which peft takes from the weights what A and B begin with (as PiSSA does, arXiv
# 2404.02948): the adapter is one of what is left of them.
_WEIGHTS_CHANGED = re.compile(r"(pissa|corda|olora|loftq|lora_ga)(_.*)?", re.IGNORECASE)


@dataclass(frozen=True)
class PeftConfig:
    """rank, alpha: of modules that no pattern names. by_root: whether the scale is alpha / sqrt(rank) (rsLoRA,
    arXiv 2312.03732). dora: whether weights keep magnitudes of their own (arXiv 2402.09353). ties_tables: whether a
    tied head changes with the embedding."""

    rank: int
    alpha: float
    by_root: bool
    dora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    ties_tables: bool

    def rank_of(self, module: str) -> int:
        return int(_of_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What the product B A of a module is multiplied by."""
        rank = self.rank_of(module)
        alpha = float(_of_pattern(self.alpha_pattern, module, self.alpha))
        return alpha / (rank**0.5 if self.by_root else rank)


def read_peft_config(folder: Path) -> PeftConfig:
    """Read and check adapter_config.json.

    Raises:
        CheckpointError: it is absent or malformed, is of no LoRA, or asks for what Onward does not have.
    """
    path = folder / CONFIG
    try:
        fields = read_json_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no adapter: it holds no {CONFIG}") from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({one_line(error)})") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} must be an object; got {type(fields).__name__}")
    if fields.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: Onward reads adapters of peft_type 'LORA'; got {fields.get('peft_type')!r}")
    for name in _REFUSED:
        if fields.get(name):
            raise CheckpointError(
                f"{path}: {name} is {fields[name]!r}, which Onward does not have: merge the adapter with peft "
                "(merge_and_unload) and load the merged model"
            )
    if unknown := sorted(name for name, value in fields.items() if value and name not in KNOWN_FIELDS):
        warn(f"{path} has fields that Onward does not know ({', '.join(unknown)}): it is read as without them")
    begun = fields.get("init_lora_weights")
    if isinstance(begun, str) and _WEIGHTS_CHANGED.fullmatch(begun):
        raise CheckpointError(
            f"{path}: init_lora_weights is {begun!r}, which changes the model's own weights too: save the adapter for "
            "the weights as they were (save_pretrained with path_initial_model_for_weight_conversion), or merge it "
            "with peft (merge_and_unload) and load the merged model"
        )
    return PeftConfig(
        rank=_number(path, fields, "r", whole=True),
        alpha=_number(path, fields, "lora_alpha"),
        by_root=bool(fields.get("use_rslora")),
        dora=bool(fields.get("use_dora")),
        rank_pattern=_pattern(path, fields, "rank_pattern", whole=True),
        alpha_pattern=_pattern(path, fields, "alpha_pattern"),
        ties_tables=bool(fields.get("ensure_weight_tying")),
    )


def _of_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first key that is the module's name, or the end of it from a dot on, as a regular expression."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _number(path: Path, fields: Mapping[str, Any], name: str, whole: bool = False) -> Any:
    value = fields.get(name)
    fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not fits or not 0 < value < 2**31:  # type: ignore[operator]  # a number, then
        kind = "whole number above 0" if whole else "number above 0"
        raise CheckpointError(f"{path}: {name!r} must be a {kind}; got {value!r}")
    return value


def _pattern(path: Path, fields: Mapping[str, Any], name: str, whole: bool = False) -> dict[str, Any]:
    pattern = fields.get(name) or {}
    if not isinstance(pattern, dict):
        raise CheckpointError(f"{path}: {name!r} must map names of modules to numbers; got {pattern!r}")
    for key in pattern:
        _number(path, pattern, key, whole)
        try:
            re.compile(key)
        except re.error as error:
            raise CheckpointError(f"{path}: {name!r} has {key!r}, which is no regular expression ({error})") from error
    return pattern
