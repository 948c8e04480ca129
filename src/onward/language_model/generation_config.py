"""The default options of a checkpoint, from its generation_config.json, with the semantics of transformers.

Three fields decide which others apply, as in `transformers.GenerationConfig.get_generation_mode` (5.x): penalties and
bans always; temperature and filters if `do_sample` is true; length_penalty and early_stopping if `num_beams` is above
1. Absent and null fields have transformers' defaults, which is 50 for `top_k`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onward.errors import ConfigError, RequestError, warn
from onward.language_model.options import BEAM_OPTIONS, GenerateOptions

FILE = "generation_config.json"

# Its fields and the corresponding options. The options validate types and ranges.
_COMMON_FIELDS = {"max_new_tokens": "max_new_tokens", "max_time": "time_limit", "min_new_tokens": "min_new_tokens"}
_COMMON_FIELDS |= {name: name for name in ("repetition_penalty", "no_repeat_ngram_size")}
# With transformers' defaults.
_SAMPLING_FIELDS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}

# Unsupported fields that change the text, with the values that change nothing. max_length counts the prompt, so it is
# up to the caller; fields about speed or the form of results are ignored.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("begin_suppress_tokens", "constraints", "force_words_ids", "forced_eos_token_id"), ([],)),
    **dict.fromkeys(("diversity_penalty", "encoder_no_repeat_ngram_size", "min_length", "penalty_alpha"), (0,)),
    **dict.fromkeys(("dola_layers", "exponential_decay_length_penalty", "forced_bos_token_id"), ()),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "num_beam_groups"), (1,)),
    "token_healing": (False,),
    "watermarking_config": (),
}
_UNSUPPORTED_SAMPLING: dict[str, tuple[Any, ...]] = {"epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "top_h": ()}
# It changes the scores of beams after penalties and bans.
_UNSUPPORTED_BEAMS: dict[str, tuple[Any, ...]] = {"renormalize_logits": (False,)}


def generation_defaults(
    config: Mapping[str, Any], eos: tuple[int, ...], *, has_text: bool, folder: Path, file: str = FILE
) -> GenerateOptions:
    """The default options of a checkpoint: beam search if it asks for beams, else sampling if it asks for that, else
    greedy decoding. One warning lists unsupported settings. Raises `ConfigError` for a value outside its range.

    config: the content of generation_config.json; without it, the same fields of config.json. eos: the ids that end a
    text. has_text: whether there is a tokenizer, which stop strings need. folder, file: for messages.
    """
    fields = _Fields(config, folder / file)
    beams = fields.get("num_beams", 1)
    do_sample = fields.get("do_sample", False)
    if not isinstance(do_sample, bool):
        raise fields.error(f"do_sample must be true or false; got {do_sample!r}")
    searches, options = beams != 1, dict[str, Any](eos=eos, beams=beams)
    options |= {option: fields[name] for name, option in _COMMON_FIELDS.items() if name in fields}
    if searches:
        options |= {name: fields[name] for name in BEAM_OPTIONS if name in fields}
    elif do_sample:
        options |= {name: fields.get(name, default) for name, default in _SAMPLING_FIELDS.items()}
    if searches or do_sample:
        options["n"] = fields.get("num_return_sequences", 1)
    if "stop_strings" in fields and has_text:
        options["stop"] = fields.list_of("stop_strings", str)
    bad_words = fields.sequences("bad_words_ids")
    options["bad_words"] = [word for word in bad_words if not (len(word) == 1 and word[0] in eos)]  # as in transformers
    biases = {ids[0]: bias for ids, bias in _sequence_biases(fields) if len(ids) == 1}
    for token in fields.list_of("suppress_tokens"):
        if not isinstance(token, int):
            raise fields.error(f"suppress_tokens must be ids; got {token!r} in it")
        biases[token] = float("-inf")
    options["logit_bias"] = biases
    try:
        served = GenerateOptions(**_with_room(options))
    except RequestError as error:
        raise fields.error(str(error)) from error
    if notes := [*_notes(fields, searches=searches, do_sample=do_sample, has_text=has_text)]:
        warn(f"{folder / file} {'; it '.join(notes)}")
    return served


def within_vocabulary(defaults: GenerateOptions, vocab_size: int, folder: Path) -> GenerateOptions:
    """The defaults without ids past the vocabulary. Warns if no eos id is left."""
    eos = tuple(token for token in defaults.eos or () if token < vocab_size)
    if defaults.eos and not eos:
        warn(
            f"{folder}: eos_token_id names id {defaults.eos[0]}, but the model's vocabulary ends at {vocab_size - 1}: "
            "no id ends a text"
        )
    bias = dict(defaults.logit_bias).items()
    remaining_bias = {id: value for id, value in bias if id < vocab_size or value != float("-inf")}
    return defaults.replace(eos=eos, logit_bias=remaining_bias)


class _Fields(dict[str, Any]):
    """The fields that are not null."""

    def __init__(self, config: Mapping[str, Any], file: Path) -> None:
        super().__init__({name: value for name, value in config.items() if value is not None})
        self._file = file

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self._file}: {message}")

    def list_of(self, name: str, single: type = list) -> Sequence[Any]:
        """A list, or one `single` as a list with it."""
        value = self.get(name, [])
        if not isinstance(value, list | single):
            raise self.error(f"{name} must be a list; got {value!r}")
        return value if isinstance(value, list) else [value]

    def sequences(self, name: str) -> list[tuple[Any, ...]]:
        """A non-empty list of lists, such as bad_words_ids and sequence_bias."""
        items = [] if self.get(name) == {} else self.list_of(name)
        if wrong := [item for item in items if not isinstance(item, list) or not item]:
            raise self.error(f"{name} must be a list of lists that are not empty; got {wrong[0]!r} in it")
        return [tuple(item) for item in items]


def _sequence_biases(fields: _Fields) -> Iterator[tuple[list[int], float]]:
    for pair in fields.sequences("sequence_bias"):
        ids = pair[0]
        if len(pair) != 2 or not isinstance(ids, list) or not ids or not all(isinstance(one, int) for one in ids):
            raise fields.error(f"sequence_bias must be a list of [[id, …], number]; got {list(pair)!r} in it")
        yield ids, pair[1]


def _with_room(options: dict[str, Any]) -> dict[str, Any]:
    """Make the minimum and maximum of new tokens consistent. As in transformers, an explicit maximum wins."""
    minimum, maximum = options.get("min_new_tokens"), options.get("max_new_tokens")
    if not isinstance(minimum, int) or not isinstance(maximum, int | None):
        return options
    if maximum is None:
        assert GenerateOptions.max_new_tokens is not None
        return options | {"max_new_tokens": max(minimum, GenerateOptions.max_new_tokens)}
    return options | {"min_new_tokens": min(minimum, maximum)} if maximum >= 0 else options


def _notes(fields: _Fields, *, searches: bool, do_sample: bool, has_text: bool) -> Iterator[str]:
    unsupported = _UNSUPPORTED | (_UNSUPPORTED_BEAMS if searches else _UNSUPPORTED_SAMPLING if do_sample else {})
    if "min_new_tokens" in fields:  # which wins over min_length
        unsupported = {name: off for name, off in unsupported.items() if name != "min_length"}
    names = [name for name, off in unsupported.items() if name in fields and fields[name] not in off]
    if any(len(ids) > 1 for ids, _ in _sequence_biases(fields)):
        names.append("sequence_bias of several ids in a row")
    if names:
        yield (
            f"asks for {', '.join(names)}, which Onward does not have: "
            "texts will differ from those of libraries that do"
        )
    if searches and do_sample:
        yield "samples with beams, which is not supported: the most likely texts are searched; beams=1 samples"
    if fields.get("num_return_sequences", 1) != 1 and not (searches or do_sample):
        yield "asks for num_return_sequences but neither for do_sample nor for beams: there is one greedy text"
    if fields.get("stop_strings") and not has_text:
        yield "names stop_strings, which need a tokenizer, but there is none: they are ignored"
    idle = [
        name
        for name in ("temperature", "top_p", "min_p", "typical_p")
        if fields.get(name, _SAMPLING_FIELDS[name]) not in (_SAMPLING_FIELDS[name], 0)
    ]
    if idle and not do_sample:
        instead = "texts are searched for" if searches else "decoding is greedy"
        yield f"sets {', '.join(idle)} but not do_sample, so {instead}: give the options to sample"
