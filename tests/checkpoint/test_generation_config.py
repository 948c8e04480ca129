"""generation_config.json: the ids that end a text, and how its makers want it sampled."""

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoint import change_json, make_checkpoint, refused, write_json

import onward
from onward.checkpoint import CheckpointFolder
from onward.errors import ConfigError, OnwardWarning, RequestError
from onward.requests import GenerateOptions, generation_defaults


def defaults(**config):
    return generation_defaults(config, (), has_text=True)


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
def test_eos_is_the_generation_configs_or_else_the_configs_or_else_the_tokenizers(
    generation, config, tokenizer, eos, folder
):
    change_json(folder / "generation_config.json", eos_token_id=generation)
    change_json(folder / "config.json", eos_token_id=config)
    change_json(folder / "tokenizer_config.json", eos_token=tokenizer)
    assert CheckpointFolder(folder).eos == eos
    assert onward.load(folder).defaults.eos == eos


def test_without_any_of_these_files_there_is_no_eos(tmp_path):
    assert onward.load(make_checkpoint(tmp_path, tokenizer=False)).defaults.eos == ()


def test_each_of_several_eos_ends_a_text(folder):
    write_json(folder / "generation_config.json", {"eos_token_id": [350, 351]})
    lm = onward.load(folder)
    ids = lm.generate([5], max_new_tokens=8).token_ids
    write_json(folder / "generation_config.json", {"eos_token_id": [351, ids[0]]})
    completion = onward.load(folder).generate([5], max_new_tokens=8)
    assert (completion.token_ids, completion.finish_reason) == (ids[:1], "stop")


@pytest.mark.parametrize("value", ["2", -1, 1.0, True, [True], ["</s>"], [1, None], {}, [[1]]], ids=str)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_eos_that_is_no_id_is_refused(file, value, folder):
    change_json(folder / file, eos_token_id=value)
    with refused(ConfigError, file, "eos_token_id", repr(value)):
        onward.load(folder)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_eos_outside_the_vocabulary_is_refused(file, folder):
    change_json(folder / file, eos_token_id=[1, 352])
    with refused(ConfigError, "352", "351"):
        onward.load(folder)


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────────────

GREEDY = GenerateOptions(eos=())


@pytest.mark.parametrize(
    "config", [{}, {"do_sample": False}, {"do_sample": None}, {"temperature": 1.0, "top_k": 50}], ids=str
)
def test_decoding_is_greedy_where_sampling_is_not_asked_for(config):
    assert defaults(**config) == GREEDY


def test_sampling_is_as_asked_and_otherwise_the_models_own_distribution():
    asked = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05}
    assert defaults(do_sample=True, **asked) == GenerateOptions(eos=(), **asked)
    assert defaults(do_sample=True) == GenerateOptions(eos=(), temperature=1.0)
    assert defaults(do_sample=True, temperature=None, top_k=None) == GenerateOptions(eos=(), temperature=1.0)
    assert defaults(do_sample=True, temperature=0.0) == GenerateOptions(eos=(), temperature=0.0)


def test_a_request_may_ask_for_something_else(folder):
    write_json(
        folder / "generation_config.json", {"do_sample": True, "temperature": 0.5, "top_k": 3, "eos_token_id": 7}
    )
    lm = onward.load(folder)
    assert lm.defaults == GenerateOptions(temperature=0.5, top_k=3, eos=(7,))
    one, other = (lm.generate([5], max_new_tokens=6, temperature=0, top_k=k).token_ids for k in (0, 1))
    assert one == other


def test_lengths_are_the_callers():
    assert defaults(max_length=20, max_new_tokens=5) == GREEDY


@pytest.mark.parametrize("stop", ["\n", ["\n", "###"]])
def test_stop_strings_stop(stop, folder):
    write_json(folder / "generation_config.json", {"stop_strings": stop})
    assert onward.load(folder).defaults.stop == ((stop,) if isinstance(stop, str) else tuple(stop))


def test_stop_strings_without_a_tokenizer_are_warned_of(tmp_path):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    write_json(folder / "generation_config.json", {"stop_strings": ["\n"]})
    with pytest.warns(OnwardWarning, match="stop_strings"):
        lm = onward.load(folder)
    lm.generate([1], max_new_tokens=1)


# ── what is not served ────────────────────────────────────────────────────────────────────────────────────

UNSERVED = {
    "bad_words_ids": [[1]],
    "begin_suppress_tokens": [1],
    "diversity_penalty": 0.5,
    "encoder_repetition_penalty": 1.1,
    "exponential_decay_length_penalty": [5, 1.1],
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 1,
    "guidance_scale": 1.5,
    "min_length": 5,
    "min_new_tokens": 5,
    "no_repeat_ngram_size": 3,
    "num_beams": 4,
    "num_return_sequences": 2,
    "penalty_alpha": 0.6,
    "repetition_penalty": 1.05,
    "sequence_bias": [[[1], -1.0]],
    "suppress_tokens": [1],
    "watermarking_config": {"bias": 1.0},
}
UNSERVED_SAMPLING = {"epsilon_cutoff": 1e-4, "eta_cutoff": 1e-4, "top_h": 0.4, "typical_p": 0.9}


@pytest.mark.parametrize("name", UNSERVED)
def test_a_field_that_is_not_served_is_warned_of(name):
    with pytest.warns(OnwardWarning, match=f"asks for {name}, which Onward does not have"):
        defaults(**{name: UNSERVED[name]})


@pytest.mark.parametrize("name", UNSERVED_SAMPLING)
def test_a_filter_that_is_not_served_is_warned_of_where_it_would_filter(name):
    assert defaults(**{name: UNSERVED_SAMPLING[name]}) == GREEDY
    with pytest.warns(OnwardWarning, match=name):
        defaults(do_sample=True, **{name: UNSERVED_SAMPLING[name]})


def test_all_fields_that_are_not_served_are_named_at_once():
    with pytest.warns(OnwardWarning) as caught:
        defaults(**UNSERVED)
    [message] = [str(warning.message) for warning in caught]
    assert all(name in message for name in UNSERVED)
    assert "\n" not in message


def test_what_transformers_writes_by_default_is_nothing_to_warn_of():
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


def test_sampling_options_without_do_sample_are_warned_of():
    with pytest.warns(OnwardWarning, match="sets temperature, top_p but not do_sample"):
        assert defaults(temperature=0.7, top_p=0.9) == GREEDY
    assert defaults(temperature=0.0) == GREEDY


def test_a_warning_points_at_the_line_that_loads(folder):
    write_json(folder / "generation_config.json", {"repetition_penalty": 1.1})
    with pytest.warns(OnwardWarning) as caught:
        onward.load(folder)
    assert [warning.filename for warning in caught] == [__file__]


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
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("stop_strings", 5),
        ("stop_strings", [""]),
        ("stop_strings", [5]),
        ("do_sample", "true"),
        ("do_sample", 1),
    ],
)
def test_a_value_out_of_range_is_refused(field, value, folder):
    write_json(folder / "generation_config.json", {"do_sample": True} | {field: value})
    with refused(ConfigError, "generation_config.json", field.removesuffix("_strings")):
        onward.load(folder)


JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers()) | st.just({})
FIELDS = ["do_sample", "temperature", "top_k", "top_p", "min_p", "stop_strings", *UNSERVED, *UNSERVED_SAMPLING, "other"]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_content_is_served_or_refused(config):
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


def test_an_eos_of_a_request_outside_the_vocabulary_is_refused(folder):
    with refused(RequestError, "999", "351"):
        onward.load(folder).generate([1], eos=999)
