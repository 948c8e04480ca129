"""generation_config.json: the ids that end a text, and the recommended sampling."""

import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import onward
from onward.checkpoint import CheckpointFolder
from onward.errors import ConfigError, OnwardWarning, RequestError
from onward.language_model import GenerateOptions, generation_defaults
from tiny_checkpoint import change_json, make_checkpoint, refused, write_json


def defaults(**config):
    return generation_defaults(config, (), has_text=True, folder=Path("folder"))


# ── the ids that end a text ───────────────────────────────────────────────────────────────────────────────

ABSENT = ...


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "eos"),
    [
        (7, 8, "</s>", (7,)),
        ([7, 9], 8, "</s>", (7, 9)),
        ([], 8, "</s>", ()),
        (0, 8, "</s>", (0,)),
        (None, 8, "</s>", (8,)),
        (ABSENT, 8, "</s>", (8,)),
        (ABSENT, [8, 5], "</s>", (8, 5)),
        (ABSENT, None, "</s>", (1,)),
        (ABSENT, ABSENT, "</s>", (1,)),
        (ABSENT, ABSENT, None, ()),
    ],
)
def test_eos_is_read_from_generation_config_then_config_then_tokenizer(generation, config, tokenizer, eos, folder):
    change_json(folder / "generation_config.json", eos_token_id=generation)
    change_json(folder / "config.json", eos_token_id=config)
    change_json(folder / "tokenizer_config.json", eos_token=tokenizer)
    assert CheckpointFolder(folder).eos == eos
    assert onward.load(folder).defaults.eos == eos


def test_there_is_no_eos_without_these_files(tmp_path):
    assert onward.load(make_checkpoint(tmp_path, tokenizer=False)).defaults.eos == ()


def test_each_of_several_eos_ids_ends_a_text(folder):
    write_json(folder / "generation_config.json", {"eos_token_id": [350, 351]})
    lm = onward.load(folder)
    ids = lm.generate([5], max_new_tokens=8).token_ids
    write_json(folder / "generation_config.json", {"eos_token_id": [351, ids[0]]})
    completion = onward.load(folder).generate([5], max_new_tokens=8)
    assert (completion.token_ids, completion.finish_reason) == (ids[:1], "stop")


@pytest.mark.parametrize("value", ["2", -1, 1.0, True, [True], ["</s>"], [1, None], {}, [[1]]], ids=str)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_invalid_eos_is_refused(file, value, folder):
    change_json(folder / file, eos_token_id=value)
    with refused(ConfigError, file, "eos_token_id", repr(value)):
        onward.load(folder)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_eos_outside_the_vocabulary_is_ignored(file, folder):
    change_json(folder / file, eos_token_id=[1, 352])
    assert onward.load(folder).defaults.eos == (1,)


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────────────

GREEDY = GenerateOptions(eos=())


@pytest.mark.parametrize(
    "config", [{}, {"do_sample": False}, {"do_sample": None}, {"temperature": 1.0, "top_k": 50}], ids=str
)
def test_decoding_is_greedy_without_do_sample(config):
    assert defaults(**config) == GREEDY


def test_sampling_uses_the_file_and_the_defaults_of_transformers():
    asked = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.9}
    assert defaults(do_sample=True, **asked) == GenerateOptions(eos=(), **asked)
    # transformers' defaults, whose top_k is 50; test_generation_defaults.py compares with it.
    usual = GenerateOptions(eos=(), temperature=1.0, top_k=50)
    assert defaults(do_sample=True) == usual
    assert defaults(do_sample=True, temperature=None, top_k=None) == usual
    assert defaults(do_sample=True, top_k=0) == GenerateOptions(eos=(), temperature=1.0)
    assert defaults(do_sample=True, temperature=0.0) == GenerateOptions(eos=(), temperature=0.0, top_k=50)


def test_a_request_may_override_the_defaults(folder):
    write_json(
        folder / "generation_config.json", {"do_sample": True, "temperature": 0.5, "top_k": 3, "eos_token_id": 7}
    )
    lm = onward.load(folder)
    assert lm.defaults == GenerateOptions(temperature=0.5, top_k=3, eos=(7,))
    one, other = (lm.generate([5], max_new_tokens=6, temperature=0, top_k=k).token_ids for k in (0, 1))
    assert one == other


def test_max_length_is_ignored():
    assert defaults(max_length=20) == defaults(max_length=4096) == GREEDY


def test_max_new_tokens_is_read_from_the_checkpoint(folder):
    write_json(folder / "generation_config.json", {"max_new_tokens": 5, "eos_token_id": []})
    lm = onward.load(folder)
    assert len(lm.generate([5]).token_ids) == 5
    assert len(lm.generate([5], max_new_tokens=3).token_ids) == 3


def test_min_new_tokens_is_limited_by_max_new_tokens():
    assert defaults(min_new_tokens=200) == GenerateOptions(eos=(), min_new_tokens=200, max_new_tokens=200)
    assert defaults(min_new_tokens=9, max_new_tokens=5) == GenerateOptions(eos=(), min_new_tokens=5, max_new_tokens=5)
    assert defaults(min_new_tokens=9).replace(max_new_tokens=5).min_new_tokens == 5
    with pytest.raises(RequestError, match="min_new_tokens is 9, but max_new_tokens is 5"):
        defaults(min_new_tokens=9).replace(max_new_tokens=5, min_new_tokens=9)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
        ({"min_new_tokens": 5}, {"min_new_tokens": 5}),
        ({"max_time": 2.5}, {"time_limit": 2.5}),
        ({"bad_words_ids": [[1], [2, 3]]}, {"bad_words": [[1], [2, 3]]}),
        ({"bad_words_ids": [[7], [7, 3]]}, {"bad_words": [[7, 3]]}),  # 7 ends texts: banned, none would end
        ({"suppress_tokens": [4, 1]}, {"logit_bias": {1: float("-inf"), 4: float("-inf")}}),
        ({"sequence_bias": [[[1], -1.0], [[2], 3]]}, {"logit_bias": {1: -1.0, 2: 3}}),
        ({"sequence_bias": [[[1], 5.0]], "suppress_tokens": [1]}, {"logit_bias": {1: float("-inf")}}),
        ({"num_beams": 4, "num_return_sequences": 2}, {"beams": 4, "n": 2}),
        ({"num_beams": 4, "length_penalty": 0.5, "early_stopping": "never", "top_k": 5},
         {"beams": 4, "length_penalty": 0.5, "early_stopping": "never"}),
        ({"length_penalty": 0.5, "early_stopping": True}, {}),
        ({"do_sample": True, "num_return_sequences": 3}, {"temperature": 1.0, "top_k": 50, "n": 3}),
    ],
    ids=str,
)  # fmt: skip
def test_fields_supported_as_in_transformers(config, options):
    assert generation_defaults(config, (7,), has_text=True, folder=Path("folder")) == GenerateOptions(eos=7, **options)


def test_request_options_replace_the_checkpoints_beams_and_sampling():
    beams = defaults(num_beams=4, num_return_sequences=4, length_penalty=2.0)
    assert beams.replace(beams=1) == GREEDY
    assert beams.replace(beams=1, temperature=0.5) == GenerateOptions(eos=(), temperature=0.5)
    assert defaults(do_sample=True, num_return_sequences=3, top_k=0).replace(temperature=0) == GREEDY
    with pytest.raises(RequestError, match="leave out temperature, or give beams=1"):
        beams.replace(temperature=0.5)


@pytest.mark.parametrize("stop", ["\n", ["\n", "###"]])
def test_stop_strings_stop(stop, folder):
    write_json(folder / "generation_config.json", {"stop_strings": stop})
    assert onward.load(folder).defaults.stop == ((stop,) if isinstance(stop, str) else tuple(stop))


def test_stop_strings_without_a_tokenizer_are_a_warning(tmp_path):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    write_json(folder / "generation_config.json", {"stop_strings": ["\n"]})
    with pytest.warns(OnwardWarning, match="stop_strings"):
        lm = onward.load(folder)
    lm.generate([1], max_new_tokens=1)


# ── unsupported fields ────────────────────────────────────────────────────────────────────────────────────

UNSERVED = {
    "begin_suppress_tokens": [1],
    "diversity_penalty": 0.5,
    "encoder_no_repeat_ngram_size": 3,
    "encoder_repetition_penalty": 1.1,
    "exponential_decay_length_penalty": [5, 1.1],
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 1,
    "guidance_scale": 1.5,
    "min_length": 5,
    "penalty_alpha": 0.6,
    "sequence_bias": [[[1, 2], -1.0]],
    "watermarking_config": {"bias": 1.0},
}
UNSERVED_SAMPLING = {"epsilon_cutoff": 1e-4, "eta_cutoff": 1e-4, "top_h": 0.4}


@pytest.mark.parametrize("name", UNSERVED)
def test_unsupported_fields_are_a_warning(name):
    with pytest.warns(OnwardWarning, match=rf"asks for {name}[a-z ]*, which Onward does not have"):
        defaults(**{name: UNSERVED[name]})


@pytest.mark.parametrize("name", UNSERVED_SAMPLING)
def test_unsupported_filters_are_a_warning_if_they_would_filter(name):
    assert defaults(**{name: UNSERVED_SAMPLING[name]}) == GREEDY
    with pytest.warns(OnwardWarning, match=name):
        defaults(do_sample=True, **{name: UNSERVED_SAMPLING[name]})


def test_all_unsupported_fields_are_named_at_once():
    with pytest.warns(OnwardWarning) as caught:
        defaults(**UNSERVED)
    [message] = [str(warning.message) for warning in caught]
    assert all(name in message for name in UNSERVED)
    assert "\n" not in message


def test_values_written_by_default_in_transformers_are_no_warning():
    """Its saved files of version 4 could hold every field, at the value that turns it off."""
    off = {
        "bad_words_ids": None,
        "begin_suppress_tokens": None,
        "do_sample": False,
        "diversity_penalty": 0.0,
        "encoder_no_repeat_ngram_size": 0,
        "encoder_repetition_penalty": 1.0,
        "epsilon_cutoff": 0.0,
        "eta_cutoff": 0.0,
        "forced_bos_token_id": None,
        "guidance_scale": None,
        "length_penalty": 1.0,
        "max_length": 20,
        "min_length": 0,
        "min_new_tokens": None,
        "no_repeat_ngram_size": 0,
        "num_beam_groups": 1,
        "num_beams": 1,
        "num_return_sequences": 1,
        "penalty_alpha": None,
        "repetition_penalty": 1.0,
        "suppress_tokens": None,
        "temperature": 1.0,
        "token_healing": False,
        "top_k": 50,
        "top_p": 1.0,
        "transformers_version": "4.51.0",
        "typical_p": 1.0,
        "use_cache": True,
    }
    assert defaults(**off) == GREEDY
    assert defaults(**off | {"do_sample": True}) == GenerateOptions(eos=(), temperature=1.0, top_k=50)


def test_the_second_checkpoint_of_a_process_also_warns(tmp_path):
    """Python shows a text once a line; one message for all checkpoints would be silent for the second."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for name in ("one", "other", "one"):
            folder = make_checkpoint(tmp_path / name)
            write_json(folder / "generation_config.json", {"penalty_alpha": 0.6})
            onward.load(folder)
    assert [str(tmp_path / name) in str(w.message) for name, w in zip(("one", "other"), caught, strict=True)] == [
        True
    ] * 2


def test_several_greedy_texts_are_a_warning():
    with pytest.warns(OnwardWarning, match="num_return_sequences but neither for do_sample nor for beams"):
        assert defaults(num_return_sequences=2) == GREEDY


def test_min_new_tokens_replaces_min_length():
    assert defaults(min_length=5, min_new_tokens=2).min_new_tokens == 2


def test_renormalized_scores_matter_only_for_beams():
    assert defaults(renormalize_logits=True) == GREEDY
    with pytest.warns(OnwardWarning, match="renormalize_logits"):
        defaults(renormalize_logits=True, num_beams=2)


def test_sampling_options_without_do_sample_are_a_warning():
    with pytest.warns(OnwardWarning, match="sets temperature, top_p but not do_sample"):
        assert defaults(temperature=0.7, top_p=0.9) == GREEDY
    assert defaults(temperature=0.0) == GREEDY


def test_a_warning_points_at_the_call_of_load(folder):
    write_json(folder / "generation_config.json", {"penalty_alpha": 0.6})
    with pytest.warns(OnwardWarning) as caught:
        onward.load(folder)
    assert [warning.filename for warning in caught] == [__file__]


# How Onward's messages call them.
NAMES = {
    "bad_words_ids": "bad_words",
    "max_time": "time_limit",
    "num_beams": "beams",
    "num_return_sequences": "n must",
    "sequence_bias": "bias",
    "stop_strings": "stop",
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_k", 0.5),
        ("top_k", 50.0),
        ("top_p", -0.5),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("typical_p", 0),
        ("repetition_penalty", 0),
        ("no_repeat_ngram_size", -1),
        ("bad_words_ids", [1]),
        ("bad_words_ids", [[]]),
        ("bad_words_ids", {"a": 1}),
        ("suppress_tokens", 5),
        ("suppress_tokens", [[1]]),
        ("suppress_tokens", ["a"]),
        ("sequence_bias", [[1, 2.0]]),
        ("sequence_bias", [[[1]]]),
        ("sequence_bias", [[[1], "a"]]),
        ("sequence_bias", [[[-1], 1.0]]),
        ("max_new_tokens", -1),
        ("min_new_tokens", 0.5),
        ("max_time", 0),
        ("num_beams", 0),
        ("num_beams", "many"),
        ("num_return_sequences", 0),
        ("stop_strings", 5),
        ("stop_strings", [""]),
        ("stop_strings", [5]),
        ("do_sample", "true"),
        ("do_sample", 1),
    ],
)
def test_values_out_of_range_are_refused(field, value, folder):
    write_json(folder / "generation_config.json", {"do_sample": True} | {field: value})
    with refused(ConfigError, "generation_config.json", NAMES.get(field, field)):
        onward.load(folder)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
JSON = SCALARS | st.integers(1, 5) | st.just({}) | st.recursive(SCALARS, st.lists, max_leaves=6)
FIELDS = [
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "stop_strings", "max_new_tokens", "max_time",
    "min_new_tokens", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "num_beams",
    "num_return_sequences", "length_penalty", "early_stopping", *UNSERVED, *UNSERVED_SAMPLING, "other",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_content_is_read_or_refused(config):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OnwardWarning)
        try:
            served = defaults(**config)
        except ConfigError:
            return
    assert served.replace(temperature=0.0).temperature == 0


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 5000], ids=range(7))
def test_a_damaged_file_is_refused(content, folder):
    (folder / "generation_config.json").write_bytes(content)
    with refused(ConfigError, "generation_config.json"):
        onward.load(folder)


def test_a_requested_eos_outside_the_vocabulary_is_refused(folder):
    with refused(RequestError, "999", "351"):
        onward.load(folder).generate([1], eos=999)
