"""generation_config.json: how the makers of a checkpoint want it sampled."""

from collections.abc import Mapping
from typing import Any

from onward.errors import ConfigError, RequestError, warn
from onward.requests.options import GenerateOptions

FILE = "generation_config.json"

# What is served where `do_sample` is true, and the value at which it changes nothing.
_SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

# Fields that change the text and that Onward would have to ignore, and the values at which they change nothing.
# Lengths (max_length, max_new_tokens) are the caller's; what is only about speed or the shape of a result is left.
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0.0,),
    "dola_layers": (),
    "encoder_repetition_penalty": (1.0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": ([],),
    "guidance_scale": (1.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0.0,),
    "repetition_penalty": (1.0,),
    "sequence_bias": ([], {}),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "watermarking_config": (),
}
_UNSERVED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (1.0,),
    "typical_p": (1.0,),
}


def generation_defaults(config: Mapping[str, Any], eos: tuple[int, ...], *, has_text: bool) -> GenerateOptions:
    """A checkpoint's options, greedy where it does not ask for sampling.

    Args:
        config: the content of generation_config.json, empty where there is none.
        eos: the ids that end a text.
        has_text: whether there is a tokenizer, which stop strings need.

    Raises:
        ConfigError: a value outside its range.
    """
    do_sample = config.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ConfigError(f"{FILE}: do_sample must be true or false; got {do_sample!r}")
    options: dict[str, Any] = {"eos": eos}
    if do_sample:
        options |= {name: off if config.get(name) is None else config[name] for name, off in _SAMPLING.items()}
    stop = config.get("stop_strings")
    if stop is not None and not isinstance(stop, str | list):
        raise ConfigError(f"{FILE}: stop_strings must be a string or a list of them; got {stop!r}")
    if stop is not None and has_text:
        options["stop"] = stop
    try:
        params = GenerateOptions(**options)
    except RequestError as error:
        raise ConfigError(f"{FILE}: {error}") from error
    _warn_of_the_unserved(config, do_sample=bool(do_sample), has_text=has_text)
    return params


def _warn_of_the_unserved(config: Mapping[str, Any], *, do_sample: bool, has_text: bool) -> None:
    unserved = _UNSERVED | (_UNSERVED_SAMPLING if do_sample else {})
    found = [name for name, off in unserved.items() if config.get(name) is not None and config[name] not in off]
    if found:
        warn(
            f"{FILE} asks for {', '.join(found)}, which Onward does not have yet: "
            "texts will differ from those of a library that has"
        )
    if config.get("stop_strings") and not has_text:
        warn(f"{FILE} names stop_strings, which need a tokenizer, and there is none: they stop nothing")
    idle = [name for name in ("temperature", "top_p", "min_p") if config.get(name) not in (None, _SAMPLING[name], 0)]
    if idle and not do_sample:
        warn(f"{FILE} sets {', '.join(idle)} but not do_sample, so decoding is greedy: give the options to sample")
