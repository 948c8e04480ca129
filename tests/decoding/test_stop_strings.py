"""Stop strings end the text before the first of them and never leak, wherever tokens cut them."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from onward.decoding import Sequence, StopStrings, StreamingDetokenizer
from onward.testing import ByteTokenizer


class Pieces:
    """A detokenizer whose token i is the i-th piece of a text."""

    def __init__(self, pieces):
        self._pieces = pieces

    def push(self, token_id):
        return self._pieces[token_id]

    def flush(self):
        return ""


def earliest(text, stops):
    """Where the first stop string of a text begins, or None."""
    return min((text.find(stop) for stop in stops if stop in text), default=None)


def stream_of(pieces, stops):
    """What is given out for each piece up to the one that stops, and at the end; and whether it stopped."""
    stream = StopStrings(Pieces(pieces), stops)
    given_out = []
    for token in range(len(pieces)):
        given_out.append(stream.push(token))
        if stream.stopped_by is not None:
            break
    return given_out, stream.flush(), stream.stopped_by is not None


# Few letters, so that stop strings begin, break off, overlap and repeat all the time.
pieces = st.lists(st.text("ab<", max_size=4), max_size=12)
stops = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3)


@given(pieces, stops)
def test_the_text_is_what_stands_before_the_first_stop_string(pieces, stops):
    given_out, last, stopped = stream_of(pieces, stops)
    taken = "".join(pieces[: len(given_out)])
    assert stopped == (earliest("".join(pieces), stops) is not None)
    assert "".join(given_out) + last == taken[: earliest(taken, stops)]
    assert earliest("".join(given_out) + last, stops) is None, "a stop string never shows"


@given(pieces, stops)
def test_it_stops_with_the_token_that_completes_a_stop_string(pieces, stops):
    given_out, _, stopped = stream_of(pieces, stops)
    assume(stopped)
    assert earliest("".join(pieces[: len(given_out) - 1]), stops) is None


@given(pieces, stops)
def test_nothing_is_held_back_but_what_may_begin_a_stop_string(pieces, stops):
    given_out, _, stopped = stream_of(pieces, stops)
    for count in range(1, len(given_out) + 1 - stopped):
        text = "".join(pieces[:count])
        held = text.removeprefix("".join(given_out[:count]))
        begun = [text[at:] for at in range(len(text)) if any(stop.startswith(text[at:]) for stop in stops)]
        assert held == max(begun, key=len, default="")


@given(st.text("ab€", max_size=12), st.lists(st.text("ab€", min_size=1, max_size=3), max_size=2))
def test_stop_strings_and_half_characters_together(text, stops):
    tokenizer = ByteTokenizer()
    sequence = Sequence([0], 1000, text=StopStrings(StreamingDetokenizer(tokenizer.decode), stops))
    streamed = ""
    for token in tokenizer.encode(text):
        streamed += sequence.accept(token)
        if sequence.finish_reason:
            break
    else:
        streamed += sequence.accept(tokenizer.encode("!")[0])
    taken = tokenizer.decode(sequence.token_ids)
    assert sequence.finish_reason == (None if earliest(taken, stops) is None else "stop")
    if sequence.finish_reason:
        assert streamed == sequence.text == taken[: earliest(taken, stops)]
    else:
        assert taken.startswith(streamed)


def sequence_over(pieces, max_new_tokens, eos=frozenset(), stop=()):
    return Sequence([0], max_new_tokens, eos, StopStrings(Pieces(pieces), stop))


def test_a_stop_string_over_three_tokens_never_leaks():
    sequence = sequence_over(["Hi <", "|en", "d|> there"], 10, stop=["<|end|>"])
    assert [sequence.accept(token) for token in range(3)] == ["Hi ", "", ""]
    assert (sequence.text, sequence.finish_reason) == ("Hi ", "stop")


def test_what_was_held_back_comes_when_it_turns_out_to_be_nothing():
    sequence = sequence_over(["a<", "|", "b"], 10, stop=["<|end|>"])
    assert [sequence.accept(token) for token in range(3)] == ["a", "", "<|b"]


@pytest.mark.parametrize("ending", ["length", "eos"])
def test_what_was_held_back_comes_when_the_text_ends(ending):
    sequence = sequence_over(["a<", "|", "unseen"], 2 if ending == "length" else 10, {2}, ["<|end|>"])
    got = [sequence.accept(token) for token in range(2 if ending == "length" else 3)]
    assert "".join(got) == sequence.text == "a<|"
    assert sequence.finish_reason == ("length" if ending == "length" else "stop")


def test_the_text_of_an_eos_id_is_not_part_of_the_text():
    sequence = sequence_over(["a", "b", "END"], 10, {2})
    assert [sequence.accept(token) for token in range(3)] == ["a", "b", ""]
    assert (sequence.text, sequence.token_ids) == ("ab", [0, 1, 2])


def test_the_tokens_of_a_stop_string_are_part_of_the_ids():
    sequence = sequence_over(["a", "b", "c"], 10, stop="b")
    sequence.accept(0)
    sequence.accept(1)
    assert (sequence.text, sequence.token_ids, sequence.finish_reason) == ("a", [0, 1], "stop")


def test_a_stop_string_at_the_last_token_is_a_stop_and_no_length():
    sequence = sequence_over(["a", "b"], 2, stop="b")
    sequence.accept(0)
    sequence.accept(1)
    assert sequence.finish_reason == "stop"


def test_a_stop_string_that_the_flush_completes_stops():
    """The broken character is shown only when nothing can follow it any more, and then it is the stop string."""
    sequence = Sequence([0], 2, text=StopStrings(StreamingDetokenizer(ByteTokenizer().decode), ["\ufffd"]))
    assert [sequence.accept(0x61), sequence.accept(0xE2)] == ["a", ""]
    assert (sequence.text, sequence.finish_reason) == ("a", "stop")


def test_after_a_stop_nothing_follows():
    stream = StopStrings(Pieces(["stop", "more"]), ["stop"])
    assert (stream.push(0), stream.push(1), stream.flush()) == ("", "", "")
