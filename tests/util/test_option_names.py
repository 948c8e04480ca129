"""Keywords that a function does not have: an error that names the one that was meant, before any work."""

from collections.abc import Callable
from typing import Any

import pytest

import onward
from onward import LanguageModel
from onward.engine import Engine
from onward.errors import RequestError
from onward.testing import ByteTokenizer, tiny_model


@pytest.fixture(scope="module")
def tiny_lm() -> LanguageModel:
    return LanguageModel(tiny_model(), ByteTokenizer())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("load_in_8bit", 'quantize="int8"'),
        ("load_in_4bit", 'quantize="int4"'),
        ("torch_dtype", "dtype"),
        ("device_map", "device"),
        ("adapter", "adapters"),
        ("quantise", "quantize"),
        ("n_ctx", "max_seq_len"),
        ("max_model_len", "max_seq_len"),
        ("tensor", "pipeline (it spreads the layers over processes)"),
        ("tensor_parallel_size", "pipeline (it spreads the layers over processes)"),
        ("pipeline_parallel_size", "pipeline"),
    ],
)
def test_load_names_the_option_that_was_meant(name: str, meant: str) -> None:
    with pytest.raises(RequestError) as raised:
        onward.load("/no/such/folder", **{name: True})
    assert str(raised.value) == f"unknown option {name!r}: did you mean {meant}?"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: lm.score("ab", adaptor="x"), "unknown option 'adaptor': did you mean adapter?"),
        (lambda lm: lm.score("ab", per_prompt=[{}]), "unknown option 'per_prompt'; the options are logprobs, stride,"),
        (lambda lm: lm.score_continuations("a", ["b"], top_logprobs=1), "did you mean logprobs?"),
        (lambda lm: lm.logits([1], lora="x"), "unknown option 'lora': did you mean adapter?"),
        (lambda lm: lm.new_cache(btach=2), "did you mean batch?"),
        (lambda lm: lm.generate("a", temp=1), "unknown option 'temp': did you mean temperature?"),
        (lambda lm: Engine(lm, max_num_seqs=2), "unknown option 'max_num_seqs': did you mean max_sequences?"),
    ],
)
def test_every_verb_names_the_option_that_was_meant(
    tiny_lm: LanguageModel, call: Callable[[LanguageModel], Any], message: str
) -> None:
    with pytest.raises(RequestError) as raised:
        call(tiny_lm)
    assert message in str(raised.value)


def test_score_refuses_a_request_with_another_adapter(tiny_lm: LanguageModel) -> None:
    request = onward.Request((1, 2, 3), onward.GenerateOptions(adapter="poet"))
    with pytest.raises(RequestError, match="adapter='poet'"):
        tiny_lm.score(request)
    with pytest.raises(RequestError, match="adapter='poet'"):
        tiny_lm.score([[1, 2, 3], request])
