"""No option is ignored: unsupported values raise an error that names the value."""

import pytest
import torch

from onward import GenerateOptions, SamplingParams, sample
from onward.errors import RequestError

NAN, INF = float("nan"), float("inf")
BAD_FILTERS = [
    ("temperature", -0.1),
    ("temperature", NAN),
    ("temperature", INF),
    ("temperature", True),
    ("temperature", "1"),
    ("temperature", None),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_k", True),
    ("top_p", -0.5),
    ("top_p", 1.0001),
    ("top_p", NAN),
    ("top_p", True),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", NAN),
    ("min_p", False),
    ("typical_p", 0.0),
    ("typical_p", 1.1),
    ("typical_p", NAN),
    ("xtc_probability", -0.1),
    ("xtc_probability", 1.1),
    ("xtc_probability", True),
    ("xtc_threshold", 0),
    ("xtc_threshold", 0.51),
    ("xtc_threshold", NAN),
    ("logit_bias", {0: NAN}),
    ("logit_bias", {0: INF}),
    ("logit_bias", {0: "1"}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"a": 1.0}),
    ("logit_bias", [1, 2]),
    ("logit_bias", ((1, 2.0), (1, 3.0))),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.0),
    ("seed", True),
]
BAD_OTHERS = [
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", INF),
    ("repetition_penalty", True),
    ("presence_penalty", NAN),
    ("presence_penalty", -INF),
    ("frequency_penalty", "1"),
    ("frequency_penalty", None),
    ("dry_multiplier", -0.1),
    ("dry_multiplier", NAN),
    ("dry_base", 0.9),
    ("dry_allowed_length", 0),
    ("dry_allowed_length", 1.5),
    ("dry_sequence_breakers", "x"),
    ("dry_sequence_breakers", [-1]),
    ("dry_sequence_breakers", [1.0]),
    ("no_repeat_ngram_size", -1),
    ("no_repeat_ngram_size", 2.0),
    ("bad_words", [[]]),
    ("bad_words", [""]),
    ("bad_words", 5),
    ("bad_words", [5]),
    ("bad_words", [[1, -2]]),
    ("bad_words", [[1.0]]),
    ("min_new_tokens", -1),
    ("min_new_tokens", True),
    ("eos", -1),
    ("eos", 1.5),
    ("eos", [1.5]),
    ("eos", True),
    ("eos", "2"),
]
BAD_ENDS = [
    ("max_new_tokens", -1),
    ("max_new_tokens", 2.0),
    ("max_new_tokens", True),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", 5),
    ("stop", None),
]


@pytest.mark.parametrize(("name", "value"), BAD_FILTERS + BAD_OTHERS)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=f"^{name}"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), BAD_FILTERS + BAD_OTHERS + BAD_ENDS)
def test_options_refuse_the_same_values_and_endless_texts(name, value):
    with pytest.raises(RequestError, match=f"^{name}"):
        GenerateOptions(**{name: value})


@pytest.mark.parametrize(("name", "value"), BAD_FILTERS)
def test_sample_refuses_the_same_values(name, value):
    with pytest.raises(RequestError, match=f"^{name}"):
        sample(torch.zeros(1, 3), **{name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1e30},
        {"top_p": 1},
        {"top_p": 1e-300},
        {"min_p": 1},
        {"top_k": 10**9},
        {"typical_p": 1},
        {"typical_p": 1e-300},
        {"xtc_probability": 1, "xtc_threshold": 0.5, "temperature": 1.0},
        {"xtc_probability": 1e-300},
        {"logit_bias": {2: 0, 0: -INF}},
        {"seed": 0},
        {"seed": 2**64 - 1},
    ],
    ids=str,
)
def test_the_ends_of_every_range_are_accepted(options):
    SamplingParams(**{"temperature": 1.0} | options)
    assert sample(torch.tensor([[0.0, 9.0, 1.0]]), **({"seed": 1} | options)).shape == (1,)


def test_single_values_and_lists_are_normalized():
    assert GenerateOptions(stop="end").stop == ("end",)
    assert GenerateOptions(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(eos=2).eos == (2,)
    assert SamplingParams(eos=[2, 3]).eos == (2, 3)
    assert SamplingParams().eos is None
    assert SamplingParams(eos=[]).eos == ()
    assert SamplingParams(logit_bias={7: 1, 2: -INF}).logit_bias == ((2, -INF), (7, 1))
    assert SamplingParams(logit_bias=((7, 1.0), (2, -INF))).logit_bias == ((2, -INF), (7, 1.0))
    assert SamplingParams(bad_words="no").bad_words == ("no",)
    assert SamplingParams(bad_words=["no", [3, 4]]).bad_words == ("no", (3, 4))
    assert SamplingParams(dry_multiplier=1, dry_sequence_breakers=3).dry_sequence_breakers == (3,)
    assert len({SamplingParams(logit_bias={7: 1}, bad_words=[[1]]), SamplingParams(bad_words=[[1]])}) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9, but max_new_tokens is 8"),
        ({"xtc_probability": 0.5}, "xtc_probability needs a temperature"),
        ({"dry_base": 2.0, "dry_allowed_length": 3}, "dry_base, dry_allowed_length would change nothing"),
        ({"dry_sequence_breakers": [1]}, "dry_sequence_breakers would change nothing while dry_multiplier is 0"),
        ({"xtc_threshold": 0.2}, "xtc_threshold would change nothing while xtc_probability is 0"),
    ],
    ids=str,
)
def test_contradictory_options_are_refused(options, says):
    with pytest.raises(RequestError, match=says):
        GenerateOptions(**options)


def test_replace_changes_and_validates_fields():
    params = SamplingParams(temperature=0.5, seed=3)
    assert params.replace(top_k=4) == SamplingParams(temperature=0.5, seed=3, top_k=4)
    with pytest.raises(RequestError, match="top_p"):
        params.replace(top_p=-1)


def test_an_unknown_option_is_named_with_the_known_ones():
    with pytest.raises(RequestError, match=r"unknown option 'temprature': did you mean temperature\?"):
        SamplingParams().replace(temprature=1.0)
    with pytest.raises(RequestError, match=r"unknown option 'frobnicate'; the options are .*temperature"):
        SamplingParams().replace(frobnicate=1.0)
    with pytest.raises(TypeError, match="temprature"):
        sample(torch.zeros(1, 3), temprature=1.0)


@pytest.mark.parametrize("logits", [torch.zeros(3), torch.zeros(1, 1, 3), torch.zeros(1, 3, dtype=torch.int64)])
def test_sample_refuses_logits_that_are_not_float_rows(logits):
    with pytest.raises(RequestError, match=r"logits must be float \[B, V\]"):
        sample(logits)
