"""examples/grpo.py: it counts sentences, its loss is the GRPO objective, and it runs."""

import importlib.util
from pathlib import Path

import pytest
import torch
from benchmarks.grpo import interval, picture

import onward

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"


@pytest.fixture(scope="module")
def grpo():
    spec = importlib.util.spec_from_file_location("grpo", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "count"), [("", 0), ("One. Two", 1), ('"Hi!" said Bo. Then?', 3), ("It was 3.5 m. Yes.", 2)]
)
def test_sentences(grpo, text, count):
    assert grpo.sentences(text) == count


def test_rewards_are_highest_for_the_right_count(grpo):
    values = [grpo.reward("A. " * count) for count in range(10)]
    assert max(values) == values[grpo.SENTENCES] == 1.0
    assert sum(value == 1.0 for value in values) == 1


def test_a_fresh_sample_has_the_gradient_of_the_policy(grpo):
    logprobs = torch.randn(grpo.NEW_TOKENS, requires_grad=True)
    loss = grpo.loss_of([logprobs], [logprobs.detach()], [2.0], clip=0.2)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, torch.full_like(gradient, -2.0 / grpo.NEW_TOKENS))


def test_the_example_runs_with_ratios_of_one(grpo, capsys):
    lm = onward.load("demo", trainable=True)
    before = {name: parameter.detach().clone() for name, parameter in lm.named_parameters()}
    shares = grpo.train(lm, 2, 1e-4, 0, prompts=2, group=3)  # it asserts the ratios
    assert len(shares) == 2
    assert capsys.readouterr().out.count("right, reward") == 2
    assert not any(torch.equal(parameter, before[name]) for name, parameter in lm.named_parameters())


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 150


def test_the_interval_of_the_gain_and_the_picture():
    assert interval([0.5, 0.6, 0.7]) == pytest.approx((0.6 - 4.303 * 0.1 / 3**0.5, 0.6 + 4.303 * 0.1 / 3**0.5))
    one, two = picture([[0.0, 0.5, 1.0]]), picture([[0.0, 0.5, 1.0], [0.2, 0.2, 0.2]])
    assert two.count("<polyline") == one.count("<polyline") + 1
