"""A forked sequence continues independently: each fork equals a sequence that took the same tokens alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.decoding import Sequence
from onward.sampling import TokenLogprobs
from onward.testing import ByteTokenizer
from onward.tokenizer import NoTextStream, StopStrings, StreamingDetokenizer

TOKENIZER = ByteTokenizer()
# Letters, and the bytes of a character of three, so that forks part within characters and stop strings.
ids = st.lists(st.sampled_from([*b"ab", *"€".encode(), 257]), max_size=8)


def sequence(limit: int) -> Sequence:
    text = StopStrings(StreamingDetokenizer(TOKENIZER.decode), ["aab", "b€"])
    return Sequence([1], limit, {257}, text)


def taken(sequence: Sequence, tokens: list[int]) -> list[str]:
    pieces = []
    for token in tokens:
        if sequence.finish_reason is not None:
            break
        pieces.append(sequence.accept(token, TokenLogprobs(-float(token), ())))
    return pieces


def contents(sequence: Sequence) -> tuple:
    return (
        sequence.token_ids,
        sequence.text,
        sequence.finish_reason,
        sequence.logprobs,
        sequence.room,
        sequence.read_history().ids.tolist(),
    )


@given(ids, ids, ids, st.integers(1, 12))
def test_a_fork_equals_a_sequence_that_took_its_tokens_alone(before, one, other, limit):
    trunk = sequence(limit)
    taken(trunk, before)
    if trunk.finish_reason is not None:
        return
    fork = trunk.fork()
    pieces = taken(trunk, one), taken(fork, other)
    for forked, tokens, got in zip((trunk, fork), (one, other), pieces, strict=True):
        alone = sequence(limit)
        taken(alone, before)
        assert taken(alone, tokens) == got
        assert contents(alone) == contents(forked)


def test_a_sequence_takes_over_the_state_of_its_fork():
    trunk = sequence(3)
    fork = trunk.fork()
    taken(fork, [*b"ab", 257])
    trunk.take_over(fork)
    assert contents(trunk) == contents(fork)
    assert trunk.token_ids is not fork.token_ids
    with pytest.raises(AssertionError, match="final"):
        trunk.take_over(fork)
    with pytest.raises(AssertionError, match="only a sequence's own end ends it"):
        sequence(3).take_over(sequence(3))


def test_a_fork_without_text_has_no_text():
    assert isinstance(NoTextStream().fork(), NoTextStream)
