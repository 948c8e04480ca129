"""Typed fields of a config.json; a value of another type raises an error that names the field."""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from onward.errors import ConfigError
from onward.util.checks import is_finite

Config = Mapping[str, Any]


def words(text: str) -> tuple[str, ...]:
    """The names in a text, split at whitespace."""
    return tuple(text.split())


# Generation settings that older files have in config.json: the attributes of `transformers.GenerationConfig`, without
# its internal ones.
GENERATION_FIELDS = frozenset(
    words("""
    assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind bad_words_ids
    begin_suppress_tokens bos_token_id cache_config cache_implementation compile_config constraints
    continuous_batching_config decoder_start_token_id disable_compile diversity_penalty do_sample dola_layers
    early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty force_words_ids forced_bos_token_id forced_eos_token_id guidance_scale is_assistant
    length_penalty low_memory max_cache_len max_length max_matching_ngram_size max_new_tokens max_time min_length
    min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups
    num_beams num_return_sequences output_attentions output_hidden_states output_logits output_scores pad_token_id
    penalty_alpha prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values renormalize_logits
    repetition_penalty return_dict_in_generate sequence_bias speculation_type stop_strings suppress_tokens
    target_lookbehind temperature token_healing top_h top_k top_p typical_p use_cache use_mtp watermarking_config
    """)
)
# The nested configs of a decoder, in transformers' order.
_NESTED = ("decoder", "generator", "text_config")


def generation_fields(config: Config) -> dict[str, Any]:
    """The generation settings of a config.json: its own fields, then those of its nested decoder config
    (`text_config`) for fields that are absent or null, like `transformers.GenerationConfig.from_model_config`."""
    nested: Any = next((part for name in _NESTED if (part := config.get(name))), {})
    parts = (config, nested) if isinstance(nested, Mapping) else (config,)
    fields = FieldOverlay(*parts)
    return {name: fields[name] for name in sorted(GENERATION_FIELDS) if fields.get(name) is not None}


REQUIRED = object()
# Positions and token ids are int32.
LARGEST = 2**31 - 1
_FLOAT = torch.finfo(torch.float32)


def positive_int(
    fields: Config, name: str, default: Any = REQUIRED, *, where: str = "config.json", most: int = LARGEST
) -> int:
    """A whole number from 1 to `most`, required without a default. null counts as absent."""
    kind = f"a whole number from 1 to {most}"
    return int(_checked(fields, name, default, where, int, lambda value: 0 < value <= most, kind))


def positive_number(fields: Config, name: str, default: Any = REQUIRED, *, where: str = "config.json") -> float:
    """A positive number within the range of float32, required without a default. null counts as absent."""
    kind = f"a positive number within the range of float32 ({_FLOAT.tiny:.3g} to {_FLOAT.max:.3g})"
    return float(_checked(fields, name, default, where, int | float, lambda x: _FLOAT.tiny <= x <= _FLOAT.max, kind))


def number(fields: Config, name: str, default: Any = REQUIRED, *, where: str = "config.json") -> float:
    """A number within the range of float32, required without a default. null counts as absent."""
    kind = "a number within the range of float32"
    return float(_checked(fields, name, default, where, int | float, lambda value: abs(value) <= _FLOAT.max, kind))


def number_or_infinity(value: Any, name: str) -> float:
    """A number, or infinity, which files write as a word or as {"__float__": word}."""
    word: Any = value.get("__float__") if isinstance(value, Mapping) else value
    if isinstance(word, str) and word.lower() in ("infinity", "inf"):
        return math.inf
    if not (is_finite(word) or word in (math.inf, -math.inf)):
        raise ConfigError(f"config.json: {name!r} must hold numbers; got {value!r}")
    return float(word)


def flag(fields: Config, name: str, default: bool = False) -> bool:
    """true or false; an absent field means the default. null means false, and is an error if the default is true."""
    value = fields.get(name, default)
    if not isinstance(value, bool) and (value is not None or default):
        raise ConfigError(f"config.json: {name!r} must be true or false; got {value!r}")
    return bool(value)


def json_object(fields: Config, name: str) -> dict[str, Any]:
    """An object; null and absent mean an empty one."""
    value = fields.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"config.json: {name!r} must be an object; got {value!r}")
    return dict(value or {})


def softcap(fields: Config, name: str, default: float | None = None) -> float | None:
    """A positive number; null means none, and only an absent field means the default."""
    if name in fields:
        return None if fields[name] is None else positive_number(fields, name)
    return default


def _checked(
    fields: Config, name: str, default: Any, where: str, types: Any, fits: Callable[[Any], bool], kind: str
) -> Any:
    value = fields.get(name)
    if value is None:
        if default is REQUIRED:
            raise ConfigError(f"{where}: {name!r} is missing")
        value = default
    if not isinstance(value, types) or isinstance(value, bool) or not fits(value):
        raise ConfigError(f"{where}: {name!r} must be {kind}; got {value!r}")
    return value


# Fields without effect on the model: training, files, defaults of other libraries, token ids, generation settings, and
# Onward's own.
_NO_EFFECT = {
    *GENERATION_FIELDS,  # which `onward.checkpoint.checkpoint` reads
    *words("""
    architectures model_type transformers_version torch_dtype dtype auto_map name_or_path sep_token_id unk_token_id
    bos_token eos_token pad_token tokenizer_class language license tags initializer_range initializer_factor
    initializer_cutoff_factor attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop dropout
    classifier_dropout residual_dropout return_dict attn_implementation use_flash_attn use_bfloat16 torchscript
    pretraining_tp gradient_checkpointing chunk_size_feed_forward is_encoder_decoder is_decoder add_cross_attention
    pruned_heads prefix cross_attention_hidden_size tie_encoder_decoder finetuning_task task_specific_params
    problem_type id2label label2id num_labels tf_legacy_loss router_aux_loss_coef output_router_logits
    router_jitter_noise base_model_tp_plan unsloth_version unsloth_fixed onward_quantization quantization_config
    compression_config
    """),
    # Config files of the four oldest families have fields that only another one of them reads.
    *words("""
    head_dim hidden_act attention_bias mlp_bias sliding_window use_sliding_window max_window_layers layer_types
    use_mrope rope_theta rope_scaling rope_parameters partial_rotary_factor original_max_position_embeddings
    """),
}


class FieldOverlay(Mapping[str, Any]):
    """A view of several mappings: each name has its first value that is not null."""

    def __init__(self, *layers: Mapping[str, Any]) -> None:
        self._layers = layers

    def __getitem__(self, name: str) -> Any:
        values = [layer[name] for layer in self._layers if name in layer]
        if not values:
            raise KeyError(name)
        return next((value for value in values if value is not None), None)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(chain(*self._layers)))

    def __len__(self) -> int:
        return len(set(chain(*self._layers)))


class TrackedFields(Mapping[str, Any]):
    """A mapping, such as a config.json, that records which of its fields are `read`. `in` reads nothing."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self._fields[name]

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    @property
    def unread(self) -> dict[str, Any]:
        return {name: value for name, value in self._fields.items() if name not in self.read}

    def check_unread(self, architecture: str) -> None:
        """Raise `ConfigError` for an unread field that may change the result. null, false, 0 and empty values change
        nothing; names with a leading underscore are metadata."""
        for name, value in self.unread.items():
            if value and name not in _NO_EFFECT and not name.startswith("_"):
                raise ConfigError(
                    f"config.json: {name!r} is {value!r}, and Onward does not know what it means for {architecture}: "
                    "remove it if the model computes the same without it"
                )
