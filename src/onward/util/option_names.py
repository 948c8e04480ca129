"""Names of options: suggestions for unknown ones, and replacements of removed ones."""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from onward.errors import RequestError

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Names in other libraries, by Onward's name of the option.
_ALIASES = {
    "adapter": "lora lora_request",
    "bad_words": "bad_words_ids",
    "beams": "num_beams",
    "choice": "guided_choice",
    "constraint, logit_bias or bad_words": "logits_processor",
    "device": "device_map",
    "draft": "assistant_model",
    'draft="lookup"': "prompt_lookup_num_tokens",
    "dtype": "torch_dtype",
    "eos": "eos_token_id stop_token_ids",
    "grammar": "guided_grammar",
    "json_schema": "format guided_json response_format schema",
    "logit_bias={id: -inf}": "suppress_tokens",
    "logprobs": "top_logprobs",
    "max_new_tokens": "max_completion_tokens max_gen_len max_tokens n_predict num_predict",
    "max_new_tokens (it does not count the prompt)": "max_length",
    "max_seq_len": "ctx_size max_model_len n_ctx",
    "max_sequences": "max_num_seqs",
    "min_new_tokens": "min_tokens",
    "min_new_tokens (it does not count the prompt)": "min_length",
    "n": "num_return_sequences",
    "n, or beams": "best_of",
    "pipeline": "pipeline_parallel_size",
    "pipeline (it spreads the layers over processes)": "tensor tensor_parallel_size",
    'quantize="int4"': "load_in_4bit",
    'quantize="int8"': "load_in_8bit",
    "regex": "guided_regex",
    "repetition_penalty": "repeat_penalty",
    "stop": "stop_sequences stop_strings",
    "stop_when": "stopping_criteria",
    "temperature": "temp",
    "temperature (0 takes the likeliest token, above 0 samples)": "do_sample",
    "time_limit": "max_time",
    "typical_p": "typical",
}
_ELSEWHERE = {alias: hint for hint, aliases in _ALIASES.items() for alias in aliases.split()}

# Removed options, and their replacements.
REMOVED = {
    "fused": "replicas always answer through the ingress; for one process without it, use onward serve",
    "jsonl": "for a file of prompts, use onward batch",
}


def check_option_names(
    names: Iterable[str], known: Collection[str], unlisted: Collection[str] = (), noun: str = "option"
) -> None:
    """Raise `RequestError` unless all `names` are `known`. The error suggests a known or an unlisted name."""
    unknown = sorted(name for name in names if name not in known)
    if not unknown:
        return
    hints = [meant(name, [*known, *unlisted]) for name in unknown]
    if all(hints):
        pairs = zip(unknown, hints, strict=True)
        message = " ".join(f"unknown {noun} {name!r}: did you mean {hint}?" for name, hint in pairs)
        raise RequestError(message, unknown[0])
    message = f"unknown {noun} {', '.join(map(repr, unknown))}; the {noun}s are {', '.join(known)}"
    raise RequestError(message, unknown[0])


def checks_option_names(function: _Function) -> _Function:
    """Decorate a function, or a class with its own `__init__`, to reject unknown keywords with `check_option_names`."""
    if isinstance(function, type):
        function.__init__ = checks_option_names(function.__init__)  # type: ignore[misc]
        return function
    parameters = inspect.signature(function).parameters.values()
    keywords = [each.name for each in parameters if each.name != "self"]
    options = [each.name for each in parameters if each.kind == each.KEYWORD_ONLY] or keywords
    accepted = set(keywords)
    if any(each.kind == each.VAR_KEYWORD for each in parameters):
        raise TypeError(f"{function.__qualname__} accepts any keyword")

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        if not named.keys() <= accepted:
            check_option_names(named.keys() - accepted, options, keywords)
        return function(*arguments, **named)

    return cast(_Function, checked)


def meant(name: str, known: Collection[str]) -> str | None:
    """The known option that was probably meant by `name`, or None."""
    return equivalent(name, known) or near(name, known)


def equivalent(name: str, known: Collection[str]) -> str | None:
    """The known option that does what `name` does in another library, perhaps with a value or a note; or None."""
    hint = _ELSEWHERE.get(name, "")
    return hint if hint and re.split(r"\W", hint)[0] in known else None


def near(name: str, known: Collection[str]) -> str | None:
    """The known option with the most similar name, or None if no name is similar."""
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.75)), None)
