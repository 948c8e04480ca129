"""Nothing that is asked for is ignored: what cannot be served raises, and says what was got."""

import pytest
import torch

from onward import SamplingParams, sample
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
    ("top_p", 0.0),
    ("top_p", 0),
    ("top_p", -0.5),
    ("top_p", 1.0001),
    ("top_p", NAN),
    ("top_p", True),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", NAN),
    ("min_p", False),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.0),
    ("seed", True),
]
BAD_OTHERS = [
    ("max_new_tokens", -1),
    ("max_new_tokens", 2.0),
    ("max_new_tokens", True),
    ("max_new_tokens", None),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", 5),
    ("stop", None),
    ("eos", -1),
    ("eos", 1.5),
    ("eos", [1.5]),
    ("eos", True),
    ("eos", "2"),
]


@pytest.mark.parametrize(("name", "value"), BAD_FILTERS + BAD_OTHERS)
def test_a_value_outside_its_range_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=f"^{name}"):
        SamplingParams(**{name: value})


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
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"max_new_tokens": 0},
    ],
    ids=str,
)
def test_the_ends_of_every_range_are_served(options):
    SamplingParams(**options)
    options.pop("max_new_tokens", None)
    assert sample(torch.tensor([[0.0, 9.0, 1.0]]), **({"seed": 1} | options)).shape == (1,)


def test_one_and_several_have_one_form():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(eos=2).eos == (2,)
    assert SamplingParams(eos=[2, 3]).eos == (2, 3)
    assert SamplingParams().eos is None
    assert SamplingParams(eos=[]).eos == ()


def test_replace_changes_what_it_is_given_and_checks_it():
    params = SamplingParams(temperature=0.5, seed=3)
    assert params.replace(top_k=4) == SamplingParams(temperature=0.5, seed=3, top_k=4)
    with pytest.raises(RequestError, match="top_p"):
        params.replace(top_p=0)


def test_an_unknown_option_is_named_and_so_are_those_that_exist():
    with pytest.raises(RequestError, match=r"unknown option 'temprature'; the options are .*temperature"):
        SamplingParams().replace(temprature=1.0)
    with pytest.raises(TypeError, match="temprature"):
        sample(torch.zeros(1, 3), temprature=1.0)


@pytest.mark.parametrize("logits", [torch.zeros(3), torch.zeros(1, 1, 3), torch.zeros(1, 3, dtype=torch.int64)])
def test_sample_refuses_logits_that_are_not_float_rows(logits):
    with pytest.raises(RequestError, match=r"logits must be float \[B, V\]"):
        sample(logits)
