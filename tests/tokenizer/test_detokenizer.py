"""Streaming is decoding in pieces: the pieces add up to the text, and never contain half a character."""

from functools import lru_cache

import pytest
import tokenizers
from hypothesis import assume, example, given
from hypothesis import strategies as st

from onward.checkpoint import CheckpointFolder, find_folder
from onward.testing import ByteTokenizer
from onward.tokenizer import StreamingDetokenizer
from onward.tokenizer.text_stream import REPLACEMENT
from onward.tokenizer.tokenizer import JsonTokenizer


@lru_cache
def tokenizer(name):
    return ByteTokenizer() if name == "bytes" else CheckpointFolder(find_folder("demo")).tokenizer


TOKENIZERS = ["bytes", "byte-level BPE"]
SAMPLES = [
    "",
    "plain",
    "naïve café",
    "日本語",
    "👩‍👩‍👧‍👦 family",
    "e\u0301",
    "\x00\x7f\u0080",
    f"a{REPLACEMENT}b",
    REPLACEMENT * 3,
]


def streamed(name, ids):
    """The pieces of pushing every id, and the last one of the flush."""
    detokenizer = StreamingDetokenizer(tokenizer(name).decode)
    return [detokenizer.push(token) for token in ids], detokenizer.flush()


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(max_size=40))
def test_text_makes_the_round_trip(name, text):
    assert tokenizer(name).decode(tokenizer(name).encode(text)) == text


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(max_size=40) | st.sampled_from(SAMPLES))
def test_pieces_add_up_to_the_text_without_partial_characters(name, text):
    pieces, last = streamed(name, tokenizer(name).encode(text))
    assert "".join(pieces) + last == text
    so_far = ""
    for piece in pieces:
        so_far += piece
        assert text.startswith(so_far), "a piece once given out stands"


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT), max_size=20))
def test_a_character_is_emitted_with_its_last_byte(text):
    pieces, last = streamed("bytes", tokenizer("bytes").encode(text))
    assert [piece for piece in pieces if piece] == list(text)
    assert last == ""


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_of_any_ids_add_up_to_their_decoding(name, data):
    """Most sequences of ids are no UTF-8; special tokens among them decode to nothing."""
    ids = data.draw(st.lists(st.integers(0, tokenizer(name).vocab_size - 1), max_size=30))
    pieces, last = streamed(name, ids)
    assert "".join(pieces) + last == tokenizer(name).decode(ids)


# First and continuation bytes, the ones in which UTF-8 goes wrong, and special ids between them.
TRICKY = [0x61, 0x80, 0xBF, 0xC3, 0xE2, 0x82, 0xAC, 0xED, 0xA0, 0xF0, 0x9F, 0xFF, 256, 257]


@given(st.lists(st.sampled_from(TRICKY)))
@example([0xE2, 0x82, 0x61])
@example([0xE2, 256, 0x82, 0xAC])
@example([0x61, 0xF0, 0x9F, 0xE2, 0x82, 0xAC])
def test_broken_characters_are_emitted_as_decoded(ids):
    pieces, last = streamed("bytes", ids)
    assert "".join(pieces) + last == tokenizer("bytes").decode(ids)


def test_bytes_of_an_unfinished_character_are_buffered():
    pieces, last = streamed("bytes", tokenizer("bytes").encode("a€b"))
    assert (pieces, last) == (["a", "", "", "€", "b"], "")


def test_an_unfinished_character_at_the_end_is_flushed_as_a_replacement():
    pieces, last = streamed("bytes", tokenizer("bytes").encode("a€")[:-1])
    assert (pieces, last) == (["a", "", ""], REPLACEMENT)


def test_flush_leaves_nothing_behind():
    detokenizer = StreamingDetokenizer(tokenizer("bytes").decode)
    detokenizer.push(0xE2)
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""
    assert detokenizer.push(0x61) == "a"


def test_context_dependent_tokens_are_emitted_as_decoded():
    """As sentencepiece does: the space of the first word is not part of the text."""
    words = ["▁Once", "▁upon", "▁", "a", "▁time"]

    def decode(ids):
        return "".join(words[token] for token in ids).replace("▁", " ").removeprefix(" ")

    detokenizer = StreamingDetokenizer(decode)
    pieces = [detokenizer.push(token) for token in range(5)]
    assert pieces == ["Once", " upon", " ", "a", " time"]


def test_a_long_text_costs_the_same_for_every_token():
    longest = []

    def decode(ids):
        longest.append(len(ids))
        return tokenizer("bytes").decode(ids)

    detokenizer = StreamingDetokenizer(decode)
    for token in tokenizer("bytes").encode("a long text, €, " * 200):
        detokenizer.push(token)
    assert max(longest) <= 2 * len("€".encode())


# ── byte fallback, which decodes a run of bytes as a whole ──────────────────────────────────────────────────────


@lru_cache
def byte_fallback():
    """A tokenizer as sentencepiece's: id b is the byte b, and 256 begins a word."""
    vocabulary = {**{f"<0x{byte:02X}>": byte for byte in range(256)}, "▁a": 256, "<unk>": 257}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    decoders = tokenizers.decoders
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    return JsonTokenizer(inner, {})


def pushed(before, ids):
    detokenizer = StreamingDetokenizer(byte_fallback().decode, before)
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


@given(st.text("aé€🦊", max_size=6), st.text("aé€🦊", max_size=6))
@example("日本語", "")
@example("🦊🦊🦊", "é")
def test_whole_characters_before_a_text_change_nothing(before, text):
    """However many of the ids before it are looked at, and wherever a character of theirs begins."""
    ids = list(text.encode())
    assert pushed(list(before.encode()), ids) == text
    if before:
        assert pushed(list(before.encode()), [256, *ids]) == f" a{text}"


@given(st.text("aé€🦊", max_size=6), st.sampled_from(["é", "€", "🦊"]), st.integers(1, 3))
def test_a_truncated_byte_character_breaks_no_other(text, last, cut):
    begun = last.encode()[:cut]
    assume(len(begun) < len(last.encode()))
    assert pushed([], list(text.encode() + begun)) == text + REPLACEMENT * len(begun)
