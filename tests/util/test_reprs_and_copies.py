"""Reprs fit on a line; copies and pickles decode alike, or raise a clear error; logs are quiet."""

import copy
import logging
import pickle
import subprocess
import sys

import pytest
import torch

import onward
from onward import GenerateOptions, KVCache, LanguageModel, Sampler, SamplingParams, Session, Speculator
from onward.errors import ProgramError, SessionError


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return onward.load("demo", draft="lookup")


def test_reprs_fit_on_a_line(lm):
    session = Session(lm)
    completion = session.generate("Once upon a time", max_new_tokens=60, n=1, logprobs=3, seed=1)
    cache = lm.new_cache(4, 512)
    program = onward.compile(lm.model.forward, params=lm.model.params, cache=cache, batch=4, backend="eager")
    things = [lm, lm.model, lm.tokenizer, lm.chat_template, lm.defaults, lm.draft, cache, session, program]
    things += [completion, completion.timing, lm.score("Once upon a time"), lm.request([1] * 500, seed=3)]
    things += [Sampler([SamplingParams(seed=1)] * 20), GenerateOptions(), SamplingParams(temperature=0.5, top_k=3)]
    for thing in things:
        assert len(repr(thing)) <= 320
        assert "\n" not in repr(thing)
        assert " at 0x" not in repr(thing)
        assert type(thing).__name__ in repr(thing)


def test_a_repr_of_options_evaluates_to_them():
    options = GenerateOptions(temperature=0.5, stop=["a"], logit_bias={3: 1.0}, eos=7)
    assert eval(repr(options)) == options
    assert repr(GenerateOptions()) == "GenerateOptions()"


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda lm: pickle.loads(pickle.dumps(lm))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_a_copy_decodes_the_same(quantize, copied):
    lm = onward.load("demo", quantize=quantize, draft="lookup")
    lm.generate("Once", max_new_tokens=4)  # with programs made, which are not copied
    other = copied(lm)
    messages = [{"role": "user", "content": "Hi"}]
    for of in (lambda lm: lm.generate("Once upon", max_new_tokens=20, seed=5), lambda lm: lm.chat(messages, seed=3)):
        assert of(other).token_ids == of(lm).token_ids
    assert other.defaults == lm.defaults
    assert other.draft is not None
    assert other.draft is not lm.draft


def test_objects_that_cannot_be_copied_raise_a_clear_error(lm):
    cache = KVCache.new(
        num_layers=1, batch=1, num_kv_heads=1, max_len=4, head_dim=2, dtype=torch.float32, device=torch.device("cpu")
    )
    program = onward.compile(
        lambda tokens, offsets, cache, params: (tokens, cache), params={}, cache=cache, backend="eager"
    )
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(SessionError, match="save it to a file"):
            copied(Session(lm))
        with pytest.raises(ProgramError, match="compile the forward again"):
            copied(program)


def test_a_speculators_repr_names_its_drafter():
    assert repr(Speculator("lookup", length=3)) == "<Speculator: PromptLookup, length 3>"


def test_logs_are_quiet_by_default_and_report_loading_on_request():
    code = "import onward; onward.load('demo').generate('Once', max_new_tokens=2)"
    quiet = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert quiet.stderr == ""
    code = f"import logging; logging.basicConfig(level=logging.DEBUG); {code}"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert "INFO:onward.loading:loaded " in output


def test_the_application_gets_the_records(caplog):
    with caplog.at_level(logging.DEBUG, "onward"):
        lm = onward.load("demo")
        lm.generate("Once", max_new_tokens=2)
    assert any("LanguageModel: 3,050,688 parameters" in record.getMessage() for record in caplog.records)
