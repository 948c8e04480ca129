"""Names of options: suggestions for unknown ones, and replacements of removed ones."""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from onward.errors import RequestError

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Names in other libraries, and Onward's.
_ELSEWHERE = {
    "assistant_model": "draft",
    "bad_words_ids": "bad_words",
    "best_of": "n, or beams",
    "ctx_size": "max_seq_len",
    "device_map": "device",
    "do_sample": "temperature (0 takes the likeliest token, above 0 samples)",
    "eos_token_id": "eos",
    "format": "json_schema",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "load_in_4bit": 'quantize="int4"',
    "load_in_8bit": 'quantize="int8"',
    "lora": "adapter",
    "lora_request": "adapter",
    "logits_processor": "constraint, logit_bias or bad_words",
    "max_completion_tokens": "max_new_tokens",
    "max_gen_len": "max_new_tokens",
    "max_length": "max_new_tokens (it does not count the prompt)",
    "max_model_len": "max_seq_len",
    "max_num_seqs": "max_sequences",
    "max_time": "time_limit",
    "max_tokens": "max_new_tokens",
    "min_length": "min_new_tokens (it does not count the prompt)",
    "min_tokens": "min_new_tokens",
    "n_ctx": "max_seq_len",
    "n_predict": "max_new_tokens",
    "num_beams": "beams",
    "num_predict": "max_new_tokens",
    "num_return_sequences": "n",
    "pipeline_parallel_size": "pipeline",
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
    "tensor": "pipeline (it spreads the layers over processes)",
    "tensor_parallel_size": "pipeline (it spreads the layers over processes)",
    "top_logprobs": "logprobs",
    "torch_dtype": "dtype",
    "typical": "typical_p",
}

# Removed options, and their replacements.
REMOVED = {
    "fused": "replicas always answer through the ingress; for one process without it, use onward serve",
    "jsonl": "for a file of prompts, use onward batch",
}


def check_option_names(names: Iterable[str], known: Collection[str]) -> None:
    """Raise `RequestError` unless all `names` are `known`. The error suggests known names."""
    unknown = sorted(name for name in names if name not in known)
    if not unknown:
        return
    hints = [meant(name, known) for name in unknown]
    if all(hints):
        pairs = zip(unknown, hints, strict=True)
        raise RequestError(" ".join(f"unknown option {name!r}: did you mean {hint}?" for name, hint in pairs))
    raise RequestError(f"unknown option {', '.join(map(repr, unknown))}; the options are {', '.join(known)}")


def checks_option_names(function: _Function) -> _Function:
    """Decorate a function to reject unknown keywords with `check_option_names`."""
    parameters = inspect.signature(function).parameters.values()
    keywords = [each.name for each in parameters if each.name != "self"]
    options = [each.name for each in parameters if each.kind == each.KEYWORD_ONLY] or keywords
    accepted = set(keywords)

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        if not named.keys() <= accepted:
            check_option_names(named.keys() - accepted, options)
        return function(*arguments, **named)

    return cast(_Function, checked)


def meant(name: str, known: Collection[str]) -> str | None:
    """The known option that was probably meant by `name`, or None."""
    hint = _ELSEWHERE.get(name, "")
    if hint and re.split(r"\W", hint)[0] in known:
        return hint
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.75)), None)
