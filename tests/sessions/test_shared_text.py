"""Sessions and other calls share one prefix cache: none of them evicts a session's pinned text."""

import subprocess
import sys
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

import onward
from onward.testing import ByteTokenizer, tiny_model

OPTIONS = {"temperature": 0.0, "ignore_eos": True}
TEXT = [(5 * at * at + at) % 250 for at in range(160)]


@cache
def model(name):
    options = {"mistral": {"sliding_window": 40}}.get(name, {})
    return tiny_model(name, seed=5, max_position_embeddings=512, **options)


@pytest.mark.parametrize("memory", [0, 2**28])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "qwen3next"])
@given(st.lists(st.tuples(st.integers(-1, 2), st.integers(1, 159), st.integers(1, 20)), max_size=8))
def test_a_turn_reuses_its_whole_session(name, memory, calls):
    """Whatever the others have cached: longer and shorter texts, or the same one."""
    lm = onward.LanguageModel(model(name), ByteTokenizer(), prefix_memory=memory)
    sessions = [onward.Session(lm) for _ in range(3)]
    for number, length, count in calls:
        caller = lm if number < 0 else sessions[number]
        caller.generate(TEXT[:length], max_new_tokens=count, **OPTIONS)
    for session in sessions:
        if tokens := session.tokens:
            assert session.generate([*tokens, 7], max_new_tokens=1, **OPTIONS).cached_tokens == len(tokens)


def test_the_interpreter_exits_silently_with_abandoned_streams():
    code = """
import onward
from onward.testing import ByteTokenizer, tiny_model
lm = onward.LanguageModel(tiny_model("qwen3"), ByteTokenizer())
stream, in_session = lm.stream("ab"), onward.Session(lm).stream("ab")
next(stream), next(in_session)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
