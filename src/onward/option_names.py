"""Names of options: what a name that Onward does not have was probably meant to be."""

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches

from onward.errors import RequestError

# What other libraries call an option, and what to give here.
_ELSEWHERE = {
    "assistant_model": "draft",
    "bad_words_ids": "bad_words",
    "best_of": "n, or beams",
    "do_sample": "temperature (0 takes the likeliest token, above 0 samples)",
    "eos_token_id": "eos",
    "format": "json_schema",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "lora": "adapter",
    "lora_request": "adapter",
    "logits_processor": "constraint, logit_bias or bad_words",
    "max_completion_tokens": "max_new_tokens",
    "max_gen_len": "max_new_tokens",
    "max_length": "max_new_tokens (it does not count the prompt)",
    "max_time": "time_limit",
    "max_tokens": "max_new_tokens",
    "min_length": "min_new_tokens (it does not count the prompt)",
    "min_tokens": "min_new_tokens",
    "n_predict": "max_new_tokens",
    "num_beams": "beams",
    "num_predict": "max_new_tokens",
    "num_return_sequences": "n",
    "prompt_lookup_num_tokens": 'draft="lookup"',
    "repeat_penalty": "repetition_penalty",
    "response_format": "json_schema",
    "schema": "json_schema",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_token_ids": "eos",
    "stopping_criteria": "stop_when",
    "suppress_tokens": "logit_bias={id: -inf}",
    "temp": "temperature",
    "top_logprobs": "logprobs",
    "typical": "typical_p",
}


def check_option_names(names: Iterable[str], known: Collection[str]) -> None:
    """Raise `RequestError` unless all `names` are `known`. The error names the option that was probably meant."""
    unknown = sorted(name for name in names if name not in known)
    if not unknown:
        return
    meant = [_meant(name, known) for name in unknown]
    if all(meant):
        hints = (f"unknown option {name!r}: did you mean {hint}?" for name, hint in zip(unknown, meant, strict=True))
        raise RequestError(" ".join(hints))
    raise RequestError(f"unknown option {', '.join(map(repr, unknown))}; the options are {', '.join(known)}")


def _meant(name: str, known: Collection[str]) -> str | None:
    """What to give instead of `name`, where that is likely enough to say."""
    hint = _ELSEWHERE.get(name, "")
    if hint and re.split(r"\W", hint)[0] in known:
        return hint
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.75)), None)
