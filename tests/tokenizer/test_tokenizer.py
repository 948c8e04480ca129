"""tokenizer.json, and the settings in tokenizer_config.json."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

import onward
from onward.checkpoint import CheckpointFolder
from onward.errors import CheckpointError, OnwardWarning, RequestError, TokenizerError
from onward.tokenizer import JsonTokenizer, StreamingDetokenizer
from onward.util.text_input import TextError
from tiny_checkpoint import (
    SPECIAL,
    byte_level_tokenizer,
    change_json,
    make_checkpoint,
    read_json,
    refused,
    sentencepiece_tokenizer,
    write_json,
)

BYTE_LEVEL = JsonTokenizer(byte_level_tokenizer(), {"bos_token": "<s>", "eos_token": "</s>"})
SENTENCEPIECE = JsonTokenizer(sentencepiece_tokenizer(metaspace=False), {"bos_token": "<s>", "eos_token": "</s>"})
METASPACE = JsonTokenizer(sentencepiece_tokenizer(metaspace=True), {"bos_token": "<s>", "eos_token": "</s>"})
DEMO = onward.load("demo").tokenizer
TOKENIZERS = {"byte-level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE, "metaspace": METASPACE, "demo": DEMO}

# Names of special tokens in a text stand for the tokens, in every library.
NAMES = (*SPECIAL, "<unk>", "<|endoftext|>")
letters = st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \nhello▁é東🦊")
texts = st.text(letters).filter(lambda text: not any(name in text for name in NAMES))


def comes_back_as(name: str, text: str) -> str:
    """The text, except for losses inherent to the tokenizer."""
    if name in ("sentencepiece", "metaspace"):
        text = text.replace("▁", " ")  # its own sign for a space
    return text.removeprefix(" ") if name == "metaspace" else text


def pieces(tokenizer, ids):
    detokenizer = StreamingDetokenizer(tokenizer.decode)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


# ── text to ids and back ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=texts)
def test_any_text_makes_the_round_trip(name, text):
    tokenizer = TOKENIZERS[name]
    expected = comes_back_as(name, text)
    assert tokenizer.decode(tokenizer.encode(text)) == expected
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == expected


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=texts)
def test_streamed_pieces_add_up_to_the_text(name, text):
    tokenizer = TOKENIZERS[name]
    assert "".join(pieces(tokenizer, tokenizer.encode(text))) == comes_back_as(name, text)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200)
@given(data=st.data())
def test_no_piece_has_a_partial_character(name, data):
    """Until the end: there, what was never finished is shown as its replacement."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(data.draw(texts.filter(lambda text: "\ufffd" not in text)))
    whole = pieces(tokenizer, ids)
    assert not any("\ufffd" in piece for piece in whole)
    cut = pieces(tokenizer, ids[: data.draw(st.integers(0, len(ids)))])
    assert not any("\ufffd" in piece for piece in cut[:-1])


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=40))
def test_streamed_pieces_of_any_ids_add_up_to_their_text(ids):
    assert "".join(pieces(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@pytest.mark.parametrize(
    "text", ["hello hello", " hello", "  hello", "hello ", " ", "   ", "\n hello", "東 京", " 東", "🦊 "]
)
def test_sentencepiece_preserves_spaces(text):
    ids = SENTENCEPIECE.encode(text)
    assert SENTENCEPIECE.decode(ids) == text
    assert "".join(pieces(SENTENCEPIECE, ids)) == text


def test_a_space_between_two_words_is_streamed_with_the_second():
    assert pieces(SENTENCEPIECE, SENTENCEPIECE.encode("hello hello")) == ["", "hello", " hello", ""]


def test_a_character_of_several_byte_tokens_is_streamed_whole():
    ids = SENTENCEPIECE.encode("é🦊", add_special_tokens=False)
    assert len(ids) == 1 + 2 + 4  # "▁" and the bytes
    assert pieces(SENTENCEPIECE, ids) == ["", "", "é", "", "", "", "🦊", ""]


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "metaspace"])
def test_special_tokens_are_left_out_of_text(name):
    tokenizer = TOKENIZERS[name]
    hello = tokenizer.encode("hello", add_special_tokens=False)
    ids = [tokenizer.bos_id, *hello, tokenizer.eos_id, tokenizer.eos_id]
    assert tokenizer.decode(ids) == "".join(pieces(tokenizer, ids)) == "hello"


def test_the_name_of_a_special_token_in_a_text_is_the_token():
    assert BYTE_LEVEL.encode("<|im_start|>hello<|im_end|>")[:1] == [2]
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode("<|im_start|>hello<|im_end|>")) == "hello"


def test_ids_beyond_the_tokenizers_vocabulary_decode_to_nothing():
    assert BYTE_LEVEL.decode([BYTE_LEVEL.vocab_size, BYTE_LEVEL.vocab_size + 100]) == ""


@pytest.mark.parametrize("ids", [[-1], [2**40], ["a"], [None], [1.5]], ids=str)
def test_invalid_ids(ids):
    with refused(RequestError, "ids must be whole numbers"):
        BYTE_LEVEL.decode(ids)


@pytest.mark.parametrize("text", ["\ud800", "caf\udce9", "ok \udfff"], ids=ascii)
def test_a_lone_surrogate_in_a_prompt_is_refused(text):
    """As os.fsdecode makes them of an argument that is not UTF-8."""
    with refused(TextError, "not valid Unicode"):
        BYTE_LEVEL.encode(text)


@pytest.mark.parametrize("text", [None, 5, b"bytes", ["a"]], ids=str)
def test_invalid_texts(text):
    with refused(RequestError, "str"):
        BYTE_LEVEL.encode(text)


# ── BOS and EOS ───────────────────────────────────────────────────────────────────────────────────────────

HELLO = BYTE_LEVEL.encode("hello", add_special_tokens=False)


def adding(bos: bool) -> Tokenizer:
    """The byte-level tokenizer, its post-processor adding a BOS or not."""
    tokenizer = byte_level_tokenizer()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.mark.parametrize("by_itself", [True, False])
@pytest.mark.parametrize("value", [True, False, None, ...], ids=str)
def test_a_bos_is_added_once_by_add_bos_token_or_the_tokenizer(value, by_itself):
    config = {"bos_token": "<s>"} | ({} if value is ... else {"add_bos_token": value})
    tokenizer = JsonTokenizer(adding(by_itself), config)
    expected = value if isinstance(value, bool) else by_itself
    assert tokenizer.encode("hello") == [0] * expected + HELLO
    assert tokenizer.encode("") == [0] * expected
    assert tokenizer.encode("<s>hello") == [0] * expected + [0, *HELLO]
    assert tokenizer.encode("hello", add_special_tokens=False) == HELLO


def test_add_bos_token_without_a_bos_warns():
    with pytest.warns(OnwardWarning, match="names no bos_token"):
        tokenizer = JsonTokenizer(adding(False), {"add_bos_token": True, "bos_token": None})
    assert (tokenizer.bos_id, tokenizer.encode("hello")) == (None, HELLO)


def test_add_eos_token_is_ignored_with_a_warning():
    with pytest.warns(OnwardWarning, match="add_eos_token"):
        tokenizer = JsonTokenizer(adding(False), {"add_eos_token": True, "eos_token": "</s>"})
    assert tokenizer.encode("hello") == HELLO


@pytest.mark.parametrize("name", ["add_bos_token", "add_eos_token"])
@pytest.mark.parametrize("value", ["false", 1, [], {}], ids=str)
def test_a_flag_is_true_or_false(name, value):
    with refused(TokenizerError, name, "true or false", repr(value)):
        JsonTokenizer(adding(False), {"bos_token": "<s>", name: value})


def test_an_empty_prompt_starts_from_the_bos_or_is_refused(folder):
    assert onward.load(folder).generate("", max_new_tokens=1).prompt_tokens == 1
    change_json(folder / "tokenizer_config.json", bos_token=None)
    with refused(RequestError, "empty", "BOS"):
        onward.load(folder).generate("", max_new_tokens=1)


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_tokenizer_a_model_takes_ids_and_no_text(tmp_path):
    lm = onward.load(make_checkpoint(tmp_path, tokenizer=False))
    completion = lm.generate([1, 2, 3], max_new_tokens=3)
    assert (len(completion.token_ids), completion.text) == (3, "")
    for ask in (lm.generate, lm.encode):
        with refused(TokenizerError, "no tokenizer.json", "ids"):
            ask("hello")
    with refused(TokenizerError, "tokenizer", "eos"):
        lm.generate([1], stop="x")


@pytest.mark.parametrize(
    "content", [b"", b"no json", b"{}", b"[]", b"null", b"\xff\xfe\0", b"[" * 100_000], ids=range(7)
)
def test_a_damaged_tokenizer_is_refused(content, folder):
    (folder / "tokenizer.json").write_bytes(content)
    with refused(TokenizerError, "tokenizer.json", "cannot be read"):
        onward.load(folder)


SAVED = byte_level_tokenizer().to_str().encode()


@given(st.integers(0, len(SAVED) - 1))
def test_a_truncated_tokenizer_is_refused(tmp_path_factory, cut):
    file = tmp_path_factory.getbasetemp() / "cut-tokenizer.json"
    file.write_bytes(SAVED[:cut])
    with refused(TokenizerError, file.name, "cannot be read"):
        JsonTokenizer.read(file, {})


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_an_unknown_special_token_is_refused(name, folder):
    for value in ("<|nowhere|>", {"content": "<|nowhere|>"}):
        change_json(folder / "tokenizer_config.json", **{name: value})
        with refused(TokenizerError, name, "'<|nowhere|>'", "tokenizer.json"):
            onward.load(folder)


@pytest.mark.parametrize("value", [5, True, [], {}, {"content": None}], ids=str)
def test_a_special_token_is_a_text(value, folder):
    change_json(folder / "tokenizer_config.json", bos_token=value)
    with refused(TokenizerError, "bos_token", repr(value)):
        onward.load(folder)


def test_special_tokens_may_be_objects_in_a_separate_file(folder):
    write_json(folder / "tokenizer_config.json", {"eos_token": {"content": "<|im_end|>", "special": True}})
    write_json(folder / "special_tokens_map.json", {"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer = CheckpointFolder(folder).tokenizer
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 3)


def test_tokens_added_only_by_the_config_are_refused(folder):
    known = {str(token_id): {"content": text, "special": True} for token_id, text in enumerate(SPECIAL)}
    change_json(folder / "tokenizer_config.json", added_tokens_decoder=known)
    onward.load(folder)
    for token_id, text in (("320", "<tool>"), ("1", "<s>"), ("one", "<s>")):
        change_json(folder / "tokenizer_config.json", added_tokens_decoder=known | {token_id: {"content": text}})
        with refused(TokenizerError, repr(text), f"id {token_id}", "tokenizer.json"):
            onward.load(folder)


@pytest.mark.parametrize("given", [[], [1], {"0": None}, {"0": {}}, "x"], ids=str)
def test_invalid_added_tokens(given, folder):
    change_json(folder / "tokenizer_config.json", added_tokens_decoder=given)
    if not given:
        onward.load(folder)
        return
    with refused(TokenizerError, "tokenizer_config.json"):
        onward.load(folder)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path, vocab_size=319)
    with refused(CheckpointError, "319", "318", "different models"):
        onward.load(folder)
    exact = make_checkpoint(tmp_path, vocab_size=320)
    assert onward.load(exact).tokenizer.vocab_size == 320


def test_truncation_and_padding_of_the_file_are_disabled(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16, pad_id=0, pad_token="<s>")
    tokenizer.save(str(folder / "tokenizer.json"))
    assert read_json(folder / "tokenizer.json")["truncation"]["max_length"] == 4
    lm = onward.load(folder)
    for text in ("h", "hello hello hello hello"):
        assert lm.encode(text) == BYTE_LEVEL.encode(text)


@pytest.mark.parametrize("content", [b"", b"[]", b"5", b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 5000], ids=range(7))
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_damaged_tokenizer_config_is_refused(name, content, folder):
    (folder / name).write_bytes(content)
    with refused(TokenizerError, name):
        onward.load(folder)


# ── errors of the library, by the name of the file ────────────────────────────────────────────────────────────


def unknown_letters(unk_token: str) -> str:
    """A tokenizer.json of whole words whose token for all others is none of them."""
    return json.dumps(
        json.loads(byte_level_tokenizer().to_str())
        | {
            "model": {"type": "WordLevel", "vocab": {"<s>": 0, "</s>": 1, "hello": 2}, "unk_token": unk_token},
            "added_tokens": [],
        }
    )


def test_a_text_the_vocabulary_cannot_encode_is_an_error_with_the_file(folder):
    (folder / "tokenizer.json").write_text(unknown_letters("zz"))
    tokenizer = CheckpointFolder(folder).tokenizer
    assert tokenizer.encode("hello") == [2]
    with refused(TokenizerError, str(folder / "tokenizer.json"), "cannot encode this text", "UNK"):
        tokenizer.encode("goodbye")


class Panics:
    """A double of a tokenizer whose Rust code panics in one of its methods."""

    def __init__(self, method: str) -> None:
        self._inner = byte_level_tokenizer()
        self._method = method

    def __getattr__(self, name: str):
        if name == self._method:
            raise type("PanicException", (BaseException,), {})("called `Option::unwrap()` on a `None` value")
        return getattr(self._inner, name)


@pytest.mark.parametrize("method", ["no_truncation", "get_vocab", "token_to_id", "encode", "decode"])
def test_a_panic_of_the_library_is_an_error_with_the_file(method):
    with refused(TokenizerError, "the/tokenizer.json", "unwrap()"):
        tokenizer = JsonTokenizer(Panics(method), {"bos_token": "<s>"}, "the/tokenizer.json")
        tokenizer.decode([5])


def test_interrupts_in_the_library_are_passed_on():
    class Interrupted(Panics):
        def __getattr__(self, name: str):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        JsonTokenizer(Interrupted(""), {})


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_a_lone_surrogate_is_no_special_token(name, folder):
    change_json(folder / "tokenizer_config.json", **{name: "\ud800"})
    with refused(TokenizerError, name, "tokenizer_config.json"):
        onward.load(folder)
    change_json(folder / "tokenizer_config.json", **{name: None}, added_tokens_decoder={"1": {"content": "\udfff"}})
    with refused(TokenizerError, "tokenizer_config.json", "does not have"):
        onward.load(folder)
