"""Unknown keywords: an error that names the one that was probably meant, before any work."""

from collections.abc import Callable
from typing import Any

import pytest

import onward
from onward import LanguageModel
from onward.engine import Engine
from onward.errors import RequestError
from onward.testing import ByteTokenizer, tiny_model
from onward.util.option_names import checks_option_names


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
def test_load_suggests_the_intended_option(name: str, meant: str) -> None:
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
def test_every_method_suggests_the_intended_option(
    tiny_lm: LanguageModel, call: Callable[[LanguageModel], Any], message: str
) -> None:
    with pytest.raises(RequestError) as raised:
        call(tiny_lm)
    assert message in str(raised.value)


def test_every_constructor_and_function_suggests_the_intended_option(tiny_lm: LanguageModel) -> None:
    from onward.server import Settings, create_app

    calls: dict[str, Callable[..., Any]] = {
        "tokenizer": lambda **named: LanguageModel(tiny_lm.model, **named),
        "temperature": onward.SamplingParams,
        "logprobs": onward.GenerateOptions,
        "max_seq_len": lambda **named: onward.load("/no/such/folder", **named),
        "max_sequences": lambda **named: Engine(tiny_lm, **named),
        "vocab_size": lambda **named: onward.Model.from_module(None, **named),
        "prefill_chunk": lambda **named: onward.decode(tiny_lm.model, max_new_tokens=1, **named),
        "first_token": lambda **named: onward.stream(tiny_lm.model, max_new_tokens=1, **named),
        "backend": lambda **named: onward.compile(tiny_lm.model, **named),
        "calibrate": lambda **named: onward.quantize(tiny_lm, "int8", **named),
        "max_requests": Settings,
        "settings": lambda **named: create_app({}, **named),
    }
    for option, call in calls.items():
        typo = option[:-2] + option[-1] + option[-2]
        with pytest.raises(RequestError) as raised:
            call(**{typo: 1})
        assert str(raised.value) == f"unknown option {typo!r}: did you mean {option}?"


def test_functions_that_take_any_keyword_cannot_be_checked() -> None:
    def anything(**named: Any) -> None: ...

    with pytest.raises(TypeError, match="accepts any keyword"):
        checks_option_names(anything)


def test_score_refuses_a_request_with_another_adapter(tiny_lm: LanguageModel) -> None:
    request = onward.Request((1, 2, 3), onward.GenerateOptions(adapter="poet"))
    with pytest.raises(RequestError, match="adapter='poet'"):
        tiny_lm.score(request)
    with pytest.raises(RequestError, match="adapter='poet'"):
        tiny_lm.score([[1, 2, 3], request])
