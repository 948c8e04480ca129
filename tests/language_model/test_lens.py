"""The logit lens: the predictions of the final norm and the head from each layer's values."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import onward
from onward import LanguageModel
from onward.errors import ContextOverflowError, RequestError
from onward.models import pack_params
from onward.sampling.logprobs import logprobs
from onward.testing import random_checkpoint, tiny_model

TEXT = "Once upon a time there was a little dog who"


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return onward.load("demo")


def test_the_last_layer_predicts_the_models_output(lm):
    ids = lm.encode(TEXT)
    lens = lm.lens(TEXT, top=4)
    want = logprobs(lm.logits(ids), torch.tensor([*ids[1:], 0]), 4)
    assert lens.taps == ["embedding", *(f"layers.{number}" for number in range(6))]
    assert torch.equal(lens.top_ids[-1], want.top_ids)
    assert torch.equal(lens.top_logprobs[-1], want.top)
    assert torch.equal(lens.next_logprobs[-1], want.chosen[:-1])
    score = lm.score(ids)
    assert lens.next_logprobs[-1].tolist() == [token.chosen for token in score.logprobs[1:]]
    assert lens.top_ids.shape == lens.top_logprobs.shape == (7, len(ids), 4)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["o_proj", "down_proj", "lm_head"]])
def test_an_adapter_changes_what_each_layer_predicts(targets, tmp_path):
    lm = onward.load(random_checkpoint(tmp_path, "llama", tie_word_embeddings=False), dtype="bfloat16")
    ids = [(11 * at) % 250 for at in range(9)]
    plain, adapter = lm.lens(ids, top=3), lm.new_adapter("a", targets=targets)
    with torch.no_grad():
        for parameter in adapter.parameters.values():
            parameter.add_(0.1)
    lm.save_adapter("a", tmp_path / "adapter")
    lm.load_adapter("b", tmp_path / "adapter")
    for name in ("a", "b"):
        lens, score = lm.lens(ids, top=3, adapter=name), lm.score(ids, adapter=name)
        assert lens.next_logprobs[-1].tolist() == [token.chosen for token in score.logprobs[1:]]
        assert not torch.equal(lens.top_logprobs[1], plain.top_logprobs[1])
    with pytest.raises(RequestError, match="there is no adapter 'c'"):
        lm.lens(ids, adapter="c")


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "granite", "deepseekv3", "falconh1"])
def test_a_layers_values_at_the_last_layer_give_its_prediction(family):
    """The prediction after layer n is that of the model whose last layer's values are those of layer n."""
    model = tiny_model(family)
    lm = LanguageModel(replace(model, params=pack_params(model.params)))  # eager calls then use the kernels too
    ids = [(11 * at) % 258 for at in range(9)]
    lens = lm.lens(ids, top=3)
    *names, last = lens.taps
    for name, top_ids, top in zip(names, lens.top_ids, lens.top_logprobs, strict=False):
        states = lm.hidden_states(ids, name)
        steer: Any = {last: onward.Steer(states, replace=True, at="prompt")}
        got = lm.generate(ids, max_new_tokens=1, temperature=0, logprobs=3, steer=steer).logprobs[0].top
        assert [token for token, _ in got] == top_ids[-1].tolist()
        assert [logprob for _, logprob in got] == top[-1].tolist()


def test_the_table_has_the_tokens_of_the_last_positions(lm):
    lines = str(lm.lens(TEXT * 5)).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [f"layers.{at}" for at in (5, 4, 3, 2, 1, 0)] + ["embedding"]
    assert lines[0].split()[-1] == "·who"
    assert max(map(len, lines)) <= 100
    without = LanguageModel(lm.model)
    assert str(without.lens([5, 6])).splitlines()[0].split() == ["5", "6"]
    assert repr(without.lens([5])) == "Lens(7 taps, 1 positions)"


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda lm: lm.lens(TEXT, top=0), "top must be"),
        (lambda lm: lm.lens(TEXT, top=9999), "the vocabulary has 2048 ids"),
        (lambda lm: lm.lens([TEXT, TEXT]), "lens takes one prompt; got a list of 2: call it for each"),
        (lambda lm: lm.lens(list(range(5)) * 999), "4,?995"),
        (
            lambda lm: LanguageModel(
                onward.Model(lambda t, o, c, p: (p[t.long()], c), torch.eye(9), lambda b, n: torch.zeros(b), 9)
            ).lens([1]),
            "a lens needs a model of a built-in family",
        ),
    ],
)
def test_bad_input_is_one_clear_error(lm, call, problem):
    with pytest.raises((RequestError, ContextOverflowError), match=problem):
        call(lm)
