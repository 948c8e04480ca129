"""Stop strings end the text before the first of them and never leak, wherever tokens split them."""

import functools
from itertools import groupby

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import onward
from onward.checkpoint import CheckpointFolder, find_folder
from onward.decoding import Sequence
from onward.testing import ByteTokenizer
from onward.tokenizer import StopStrings, StreamingDetokenizer, special_tokens


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
    """The emitted text for each piece up to the one that stops, and at the end; and whether it stopped."""
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
def test_the_text_ends_before_the_first_stop_string(pieces, stops):
    given_out, last, stopped = stream_of(pieces, stops)
    taken = "".join(pieces[: len(given_out)])
    assert stopped == (earliest("".join(pieces), stops) is not None)
    assert "".join(given_out) + last == taken[: earliest(taken, stops)]
    assert earliest("".join(given_out) + last, stops) is None, "a stop string never shows"


@given(pieces, stops)
def test_decoding_stops_at_the_token_that_completes_a_stop_string(pieces, stops):
    given_out, _, stopped = stream_of(pieces, stops)
    assume(stopped)
    assert earliest("".join(pieces[: len(given_out) - 1]), stops) is None


@given(pieces, stops)
def test_only_possible_stop_strings_are_delayed(pieces, stops):
    given_out, _, stopped = stream_of(pieces, stops)
    for count in range(1, len(given_out) + 1 - stopped):
        text = "".join(pieces[:count])
        held = text.removeprefix("".join(given_out[:count]))
        begun = [text[at:] for at in range(len(text)) if any(stop.startswith(text[at:]) for stop in stops)]
        assert held == max(begun, key=len, default="")


@given(st.text("ab€", max_size=12), st.lists(st.text("ab€", min_size=1, max_size=3), max_size=2))
def test_stop_strings_and_partial_characters_together(text, stops):
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


def test_delayed_text_is_released_when_it_is_no_stop_string():
    sequence = sequence_over(["a<", "|", "b"], 10, stop=["<|end|>"])
    assert [sequence.accept(token) for token in range(3)] == ["a", "", "<|b"]


@pytest.mark.parametrize("ending", ["length", "eos"])
def test_delayed_text_is_released_at_the_end(ending):
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


def test_a_stop_string_at_the_last_token_finishes_with_stop():
    sequence = sequence_over(["a", "b"], 2, stop="b")
    sequence.accept(0)
    sequence.accept(1)
    assert sequence.finish_reason == "stop"


def test_a_stop_string_completed_by_the_flush_stops():
    """The broken character is shown only when nothing can follow it any more, and then it is the stop string."""
    sequence = Sequence([0], 2, text=StopStrings(StreamingDetokenizer(ByteTokenizer().decode), ["\ufffd"]))
    assert [sequence.accept(0x61), sequence.accept(0xE2)] == ["a", ""]
    assert (sequence.text, sequence.finish_reason) == ("a", "stop")


def test_nothing_follows_a_stop():
    stream = StopStrings(Pieces(["stop", "more"]), ["stop"])
    assert (stream.push(0), stream.push(1), stream.flush()) == ("", "", "")


# ── special tokens, which are not part of the text ───────────────────────────────────────────────────────────────


@functools.cache
def demo_tokenizer():
    return CheckpointFolder(find_folder("demo")).tokenizer


def raw_text(ids):
    """With special tokens written out, as `decode(ids, skip_special_tokens=False)` of the tokenizers library does."""
    special = special_tokens(demo_tokenizer())
    runs = groupby(ids, key=special.get)
    return "".join(text * len([*run]) if text else demo_tokenizer().decode([*run]) for text, run in runs)


@st.composite
def texts_with_special_tokens(draw):
    """Ids of words and special tokens, and stop strings cut from their text."""
    words = st.one_of(
        st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im", "|>", "\n", "€"]), st.text("ab€ ", max_size=3)
    )
    ids = demo_tokenizer().encode("".join(draw(st.lists(words, max_size=8))), add_special_tokens=False)
    raw = raw_text(ids)
    ends = st.tuples(st.integers(0, max(len(raw) - 1, 0)), st.integers(1, 14))
    shown = demo_tokenizer().decode(ids)
    text = st.sampled_from([raw, shown])
    stops = [draw(text)[at : at + length] for at, length in draw(st.lists(ends, max_size=2))]
    return ids, [stop for stop in stops if stop]


def first_match(ids, stops):
    """Where in the raw text the first stop string begins that is in it, or in the text without special tokens."""
    raw = raw_text(ids)
    places = [at for at in range(len(raw)) if len(visible_part(ids, at)) < len(visible_part(ids, at + 1))]
    shown = visible_part(ids, len(raw))
    assert [raw[at] for at in places] == [*shown]
    starts = [raw.find(stop) for stop in stops if stop in raw]
    return min([*starts, *(places[shown.find(stop)] for stop in stops if stop in shown)], default=None)


@given(texts_with_special_tokens(), st.booleans())
def test_stop_strings_match_special_tokens(case, as_eos):
    ids, stops = case
    special = special_tokens(demo_tokenizer())
    eos = set(special) if as_eos else frozenset()
    marks = {2: special[2]}
    stream = StopStrings(StreamingDetokenizer(demo_tokenizer().decode), stops, marks, special)
    sequence = Sequence([0], 1000, eos, stream)
    streamed, taken = "", []
    for token in ids:
        streamed += sequence.accept(token)
        taken.append(token)
        if sequence.finish_reason is not None:
            break
    else:
        streamed += stream.flush()
    raw, start = raw_text(taken), first_match(taken, stops)
    assert (sequence.finish_reason == "stop") == (start is not None or any(token in eos for token in taken))
    assert (sequence.stopped_by in stops) == (start is not None), "a stop string precedes the eos that completes it"
    assert first_match(taken[:-1], stops) is None, "it stops with the token that completes a stop string"
    assert streamed == visible_part(taken, len(raw) if start is None else start)
    marked = [at for at, token in enumerate(taken) if token in marks and token not in eos]
    if start is not None:
        marked = [at for at in marked if len(raw_text(taken[: at + 1])) <= start]
    assert [mark.at for mark in stream.marks] == marked, "a mark in a stop string is not part of the answer"


def visible_part(ids, end):
    """What stands among the first `end` characters of the raw text, without special tokens."""
    shown, at = "", 0
    for special, run in groupby(ids, key=special_tokens(demo_tokenizer()).get):
        text = raw_text([*run])
        shown += text[: max(0, end - at)] if special is None else ""
        at += len(text)
    return shown


@pytest.mark.parametrize("stop", ["<|im_end|>", "\ufffd<|im_end|>", "\ufffd<"])
def test_a_stop_string_at_a_special_token_inside_a_character(stop):
    tokenizer = demo_tokenizer()
    stream = StopStrings(StreamingDetokenizer(tokenizer.decode), [stop], special=special_tokens(tokenizer))
    ids = [*tokenizer.encode("a€", add_special_tokens=False)[:-1], 2]
    text = "".join(stream.push(token) for token in ids) + stream.flush()
    assert (text, stream.stopped_by) == ("a\ufffd" if stop[0] == "<" else "a", stop)


def test_a_special_token_inside_a_character_does_not_break_it_without_a_stop():
    tokenizer = demo_tokenizer()
    stream = StopStrings(StreamingDetokenizer(tokenizer.decode), ["<|im_end|>!"], special=special_tokens(tokenizer))
    ids = tokenizer.encode("a€", add_special_tokens=False)
    assert "".join(map(stream.push, [*ids[:-1], 2, ids[-1]])) + stream.flush() == "a€"


@pytest.mark.parametrize("stop", ["<|im_end|>", "<|im", "like?<|im_end|>", "<|im_end|>\n", "|>user"])
def test_every_way_of_generating_stops_at_a_special_token(stop):
    lm = onward.load("demo")
    prompt = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    options = {"temperature": 0, "max_new_tokens": 40, "eos": []}
    whole = lm.generate(prompt, **options)
    raw = raw_text(whole.token_ids)
    expected = visible_part(whole.token_ids, raw.index(stop))
    options["stop"] = [stop]
    stream = lm.stream(prompt, **options)
    pieces = [*stream]
    beams = lm.generate(prompt, **options | {"beams": 2})
    drafted = lm.generate(prompt, **options, draft="lookup")
    with onward.Engine(lm) as engine:
        served = engine.submit(prompt, **options).result()
        resumed = engine.resume(lm.request(prompt, **options), emitted=served.token_ids[:3]).result()
    batched = lm.generate([prompt, "The fox"], **options)[0]
    in_session = onward.Session(lm).generate(prompt, **options)
    for one in (lm.generate(prompt, **options), drafted, served, resumed, batched, in_session):
        assert (one.text, one.finish_reason, one.stopped_by) == (expected, "stop", stop)
        assert earliest(raw_text(one.token_ids[:-1]), [stop]) is None
    assert "".join(piece.text for piece in pieces) == expected
    for one in (beams, lm.generate(prompt, stop=[stop], temperature=0, max_new_tokens=40)):
        start = earliest(raw_text(one.token_ids), [stop])
        assert one.text == visible_part(one.token_ids, 10**6 if start is None else start)
