"""Fields by which a config.json says how texts are chosen, as files did before generation_config.json."""

from collections.abc import Mapping
from typing import Any

# The attributes of `transformers.GenerationConfig`, without those of its own bookkeeping.
GENERATION_FIELDS = frozenset(
    {
        *(
            "assistant_confidence_threshold",
            "assistant_early_exit",
            "assistant_ensemble_weight",
            "assistant_lookbehind",
        ),
        *("bad_words_ids", "begin_suppress_tokens", "bos_token_id", "cache_config", "cache_implementation"),
        *("compile_config", "constraints", "continuous_batching_config", "decoder_start_token_id", "disable_compile"),
        *("diversity_penalty", "do_sample", "dola_layers", "early_stopping", "encoder_no_repeat_ngram_size"),
        *("encoder_repetition_penalty", "eos_token_id", "epsilon_cutoff", "eta_cutoff"),
        *("exponential_decay_length_penalty", "force_words_ids", "forced_bos_token_id", "forced_eos_token_id"),
        *("guidance_scale", "is_assistant", "length_penalty", "low_memory", "max_cache_len", "max_length"),
        *("max_matching_ngram_size", "max_new_tokens", "max_time", "min_length", "min_new_tokens", "min_p"),
        *("no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups"),
        *("num_beams", "num_return_sequences", "output_attentions", "output_hidden_states", "output_logits"),
        *("output_scores", "pad_token_id", "penalty_alpha", "prefill_chunk_size", "prompt_lookup_num_tokens"),
        *("remove_invalid_values", "renormalize_logits", "repetition_penalty", "return_dict_in_generate"),
        *("sequence_bias", "speculation_type", "stop_strings", "suppress_tokens", "target_lookbehind", "temperature"),
        *("token_healing", "top_h", "top_k", "top_p", "typical_p", "use_cache", "use_mtp", "watermarking_config"),
    }
)
# Where a config.json may describe its decoder, by transformers' order.
_NESTED = ("decoder", "generator", "text_config")


def generation_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says of generating: its own fields, then those of its decoder (`text_config`) that it leaves
    out or null, as `transformers.GenerationConfig.from_model_config` takes them."""
    nested: Any = next((part for name in _NESTED if (part := config.get(name))), {})
    parts = (config, nested) if isinstance(nested, Mapping) else (config,)
    given = {name: [part[name] for part in parts if part.get(name) is not None] for name in GENERATION_FIELDS}
    return {name: values[0] for name, values in sorted(given.items()) if values}
