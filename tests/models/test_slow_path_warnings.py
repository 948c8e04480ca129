"""If decoding is slow for a reason that the user can fix, a warning says so, once."""

import os
import subprocess
import sys
import warnings

import pytest
import torch

import onward
from onward import errors
from onward.errors import OnwardWarning
from onward.models import Model


@pytest.fixture(autouse=True)
def no_warnings_yet(monkeypatch):
    monkeypatch.setattr(errors, "_warned", set())


def untraceable(extra=0):
    def forward(tokens, offsets, cache, params):
        if offsets.max() > 1000:  # reads a value
            raise AssertionError
        logits = torch.zeros(*tokens.shape, 8)
        logits[..., (3 + extra) % 8] = 1
        return logits, cache

    return Model(forward, (), lambda batch, max_len: torch.zeros(batch, max_len), 8)


def other_untraceable():
    def forward(tokens, offsets, cache, params):
        length = int(tokens.sum())
        return torch.zeros(*tokens.shape, 8) + 0 * length, cache

    return Model(forward, (), lambda batch, max_len: torch.zeros(batch, max_len), 8)


def warnings_of(*lms):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for lm in lms:
            lm.generate([1], max_new_tokens=2)
    assert all(issubclass(warning.category, OnwardWarning) for warning in caught)
    return [str(warning.message) for warning in caught]


def test_an_untraceable_forward_names_its_line_once():
    lm = onward.LanguageModel(untraceable())
    (message,) = warnings_of(lm, lm, onward.LanguageModel(untraceable(1)))
    assert "test_slow_path_warnings.py:" in message
    assert "in forward" in message
    assert 'compile="eager" silences this' in message


def test_a_second_untraceable_forward_also_warns():
    messages = warnings_of(*map(onward.LanguageModel, (untraceable(), other_untraceable())))
    assert len(set(messages)) == len(messages) == 2


def test_an_invalid_forward_is_not_reported_as_slow():
    def bare_logits(tokens, offsets, cache, params):
        return torch.zeros(*tokens.shape, 8)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(errors.RequestError, match="must return"):
            onward.decode(bare_logits, cache={}, params={}, first_token=3, max_new_tokens=3)


def test_compile_eager_gives_no_warning():
    onward.LanguageModel(untraceable(), compile="eager").generate([1], max_new_tokens=2)


WARNED = """
import warnings, onward
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for compile in {compiles}:
        onward.load("demo", compile=compile).generate([1], max_new_tokens=1)
print(*(f"{{w.category.__name__}} {{w.message}}" for w in said), sep="\\n")
"""


def warnings_with(compiles, **environment):
    done = subprocess.run(
        [sys.executable, "-c", WARNED.format(compiles=compiles)],
        env=os.environ | environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def test_missing_kernels_are_reported_once(tmp_path):
    (line,) = warnings_with(["auto", "auto"], ONWARD_NATIVE_DIR=str(tmp_path)).splitlines()
    assert line.startswith("OnwardWarning no native kernels were built when onward was installed")
    assert str(tmp_path) in line
    assert "Install a C++17 compiler" in line


def test_missing_kernels_are_not_reported_if_disabled_on_purpose(tmp_path):
    assert warnings_with(["eager"], ONWARD_NATIVE_DIR=str(tmp_path)) == ""
    assert warnings_with(["auto"], ONWARD_NATIVE_DIR=str(tmp_path), ONWARD_OPS="definition") == ""
