"""Each token has its own bytes: they add up to the text, also for alternatives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tokenizer import TOKENIZERS, texts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from onward.sampling.logprobs import TokenLogprobs
from onward.testing import ByteTokenizer
from onward.tokenizer import JsonTokenizer
from onward.tokenizer.text_stream import token_texts

WORDS = {word: id for id, word in enumerate(["[UNK]", "a", "##b", "é", "##🦊", "東", "."])}


def word_pieces():
    inner = Tokenizer(models.WordPiece(WORDS, unk_token="[UNK]"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    inner.add_special_tokens(["[UNK]"])
    return JsonTokenizer(inner, {})


KINDS = {**TOKENIZERS, "bytes": ByteTokenizer(), "words": word_pieces()}


class OnlyDecodes:
    """A tokenizer of a user's own that does not tell the bytes of its tokens."""

    def __init__(self, inner):
        self.decode = inner.decode


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
def test_token_bytes_add_up_to_those_of_the_text(name, data):
    tokenizer = KINDS[name]
    ids = tokenizer.encode(data.draw(texts), add_special_tokens=data.draw(st.booleans()))
    before = data.draw(st.integers(0, len(ids)))
    if tokenizer.decode(ids[:before]).endswith("\ufffd"):
        before = 0
    prompt, ids = ids[:before], ids[before:]
    tops = [data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=3)) for _ in ids]
    entries = [TokenLogprobs(0.0, tuple((other, -1.0) for other in top)) for top in tops]
    tokens = token_texts(ids, entries, prompt, tokenizer)
    start = tokenizer.decode(prompt)
    whole = tokenizer.decode([*prompt, *ids])
    assert start + "".join(token.text for token in tokens) == whole
    assert start.encode() + b"".join(token.bytes for token in tokens) == whole.encode()
    for at, (token, top) in enumerate(zip(tokens, tops, strict=True)):
        begun = start.encode() + b"".join(token.bytes for token in tokens[:at])
        for other, own in zip(top, token.top, strict=True):
            assert own.bytes == token_texts([*ids[:at], other], None, prompt, tokenizer)[-1].bytes
            alone = tokenizer.decode([*prompt, *ids[:at], other])
            if "\ufffd" not in alone:
                assert begun + own.bytes == alone.encode()
                assert not own.text.startswith("bytes:")
            if own.bytes and own.text.startswith("bytes:\\x"):
                with pytest.raises(UnicodeDecodeError):
                    own.bytes.decode()
            assert bool(own.text) == bool(own.bytes)


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "metaspace", "demo", "bytes"])
def test_alternatives_inside_a_character(name):
    tokenizer = KINDS[name]
    ids = tokenizer.encode("x🦊", add_special_tokens=False)
    letter, *_, last = ids
    entries = [TokenLogprobs(0.0, ((letter, -1.0), (last, -2.0)))] * len(ids)
    *_, end = token_texts(ids, entries, [letter], tokenizer)
    byte = tokenizer.bytes_of(last)
    assert byte
    assert "🦊".encode().endswith(byte)
    assert (end.text, end.bytes) == ("🦊", byte)
    assert end.top[1] == ("🦊", byte, ()), "the text that it has where it is chosen"
    assert end.top[0].bytes == end.top[0].text.encode() in (b"x", b" ")
    middle = token_texts(ids, entries, [letter], tokenizer)[-2]
    assert middle.top[1] == ("bytes:" + "".join(f"\\x{each:02x}" for each in byte), byte, ())


def test_special_tokens_have_neither_bytes_nor_text():
    tokenizer = KINDS["demo"]
    assert token_texts([2], [TokenLogprobs(0.0, ((1, -1.0),))], [], tokenizer) == [("", b"", (("", b"", ()),))]


@given(text=texts)
def test_without_token_bytes_a_character_belongs_to_its_last_token(text):
    tokenizer = OnlyDecodes(ByteTokenizer())
    ids = ByteTokenizer().encode(text)
    tokens = token_texts(ids, None, [], tokenizer)
    assert all(token.bytes == token.text.encode() for token in tokens)
    assert "".join(token.text for token in tokens) == text
