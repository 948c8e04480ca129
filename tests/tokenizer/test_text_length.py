"""The lower bound on a text's number of tokens is correct: no text that fits a context is refused by its length."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

import onward
from onward.errors import ContextOverflowError
from onward.language_model.request import check_length
from onward.tokenizer import JsonTokenizer
from tiny_checkpoint import SPECIAL, byte_level_tokenizer, sentencepiece_tokenizer

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def with_normalizer(normalizer):
    inner = byte_level_tokenizer()
    inner.normalizer = normalizer
    return inner


def unknown(*, fuse_unk, unk_token="<unk>"):
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "ab": 5, "#" * 30: 6}
    return Tokenizer(models.BPE(vocab, [("a", "b")], unk_token=unk_token, fuse_unk=fuse_unk))


def with_added(**options):
    inner = byte_level_tokenizer()
    inner.add_tokens([AddedToken("<mask>", **options)])
    return inner


def removing():
    inner = byte_level_tokenizer()
    parts = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    inner.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return inner


BOUNDED = {
    "demo": onward.load("demo").tokenizer._inner,
    "byte level": byte_level_tokenizer(),
    "sentencepiece": sentencepiece_tokenizer(metaspace=False),
    "metaspace": sentencepiece_tokenizer(metaspace=True),
    "NFC": with_normalizer(normalizers.NFC()),
    "NFKC": with_normalizer(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "unknown": unknown(fuse_unk=False),
    "added": with_added(normalized=True),
}
UNBOUNDED = {
    "fused": unknown(fuse_unk=True),
    "dropped": unknown(fuse_unk=False, unk_token=None),
    "spaces": with_added(lstrip=True),
    "removed": removing(),
    "strip": with_normalizer(normalizers.Strip()),
    "short": with_normalizer(normalizers.Replace("aaaa", "a")),
    "pattern": with_normalizer(normalizers.Replace(Regex("a+"), "a")),
}
composed = ["e\u0301", "\u03b1\u0313\u0300\u0345", "\u1100\u1161\u11a8", "\u1f82", "\ufb03", "\u212b"]
parts = st.sampled_from([*SPECIAL, " ", "\n", "hello", " world", "▁", "ab", "<mask>", "#", "é", "🦊", *composed])
texts = st.lists(parts | st.text(st.characters(exclude_categories=["Cs"]))).map("".join) | parts.map(
    lambda text: text * 40
)


@pytest.mark.parametrize("name", BOUNDED)
@given(text=texts)
def test_a_text_has_at_least_the_estimated_tokens(name, text):
    tokenizer = JsonTokenizer(BOUNDED[name], NAMES if name != "demo" else {})
    least = tokenizer.least_tokens(text)
    assert (least > 0) == bool(text)
    assert least <= len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", UNBOUNDED)
def test_normalizers_that_drop_characters_have_no_bound(name):
    assert JsonTokenizer(UNBOUNDED[name], NAMES).least_tokens("a" * 10_000) == 0


def test_the_bound_is_that_of_the_longest_token():
    tokenizer = JsonTokenizer(unknown(fuse_unk=False), NAMES)
    assert tokenizer.least_tokens("#" * 300) == 10
    assert tokenizer.least_tokens("a" * 301) == 11
    assert JsonTokenizer(BOUNDED["NFC"], NAMES).least_tokens("é" * 4) == 1


def test_a_text_too_long_for_the_context_is_refused_unencoded(monkeypatch):
    lm = onward.load("demo")
    assert lm.model.max_seq_len == 1024
    monkeypatch.setattr(JsonTokenizer, "encode", None)
    for call in (lambda text: lm.request(text), lambda text: lm.chat_request([{"role": "user", "content": text}])):
        with pytest.raises(
            ContextOverflowError, match=r"prompt has .* characters, which is at least .*1,024"
        ) as caught:
            call("a" * 100_000)
        assert caught.value.option == "prompt"
    check_length("a" * 1024, lm.tokenizer, 1024)
    check_length("a" * 100_000, None, 1024)
    check_length("a" * 100_000, lm.tokenizer, None)


@pytest.mark.parametrize("name", ["demo", "byte level", "sentencepiece", "metaspace", "NFC"])
@given(text=texts, special=st.booleans())
def test_a_long_text_has_the_ids_of_a_short_one(name, text, special):
    """The two ways to encode a text give the same ids."""
    inner = BOUNDED[name]
    alone = inner.encode(text, add_special_tokens=special).ids
    assert inner.encode_batch_fast([text], add_special_tokens=special)[0].ids == alone


def test_a_long_text_does_not_block_other_threads():
    tokenizer, gaps = onward.load("demo").tokenizer, []
    text = "The fox ran over the hill. " * 20_000
    ended = threading.Event()

    def ticks():
        last = time.perf_counter()
        while not ended.wait(0.001):
            last, before = time.perf_counter(), last
            gaps.append(last - before)

    thread = threading.Thread(target=ticks)
    thread.start()
    began = time.perf_counter()
    ids = tokenizer.encode(text)
    seconds = time.perf_counter() - began
    ended.set()
    thread.join()
    assert len(ids) > 100_000
    assert max(gaps) < max(0.5 * seconds, 0.05)
