"""llama.cpp's rules for vocabularies: how texts are split, which ids end them, and unusual files."""

import json
from pathlib import Path

import numpy as np
import pytest
from gguf_files import write_model
from test_gguf_tokenizers import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER, write_sentencepiece
from tokenizers import Regex, pre_tokenizers

from onward.checkpoint import GgufCheckpoint
from onward.checkpoint.checkpoint import CheckpointFolder
from onward.checkpoint.convert import convert
from onward.checkpoint.gguf.pretokenizer import SPLITTINGS
from onward.checkpoint.gguf.vocabulary import Vocabulary
from onward.errors import OnwardWarning, TokenizerError
from tiny_checkpoint import refused, sentencepiece_tokenizer

SAMPLE = "Hello  world\n\n 1234567 don'T 東京abc あア!?x"
# A name of each rule -> how it cuts the sample: llama.cpp's expressions cut alike.
CUTS = {
    "default": "Hello| | world|\n\n| |123|456|7| don|'|T| 東京abc| あア|!?|x",
    "gpt-2": "Hello| | world|\n\n| 1234567| don|'|T| 東京abc| あア|!?|x",
    "lfm2": "Hello| | world|\n\n| |123|456|7| don|'T| 東京abc| あア|!?|x",
    "stablelm2": "Hello| | world|\n\n| |1|2|3|4|5|6|7| don|'T| 東京abc| あア|!?|x",
    "codeshell": "Hello| | world|\n\n |1|2|3|4|5|6|7| don|'|T| 東京abc| あア|!?|x",
    "kanana2": "Hello| | world|\n\n| |123|456|7| don'T| 東京abc| あア|!?|x",
    "hunyuan-dense": "Hello| | world|\n\n| |123|456|7| don|'T| |東京|abc| |あア|!?|x",
    "deepseek-llm": "Hello| | world|\n|\n| |1234567| don|'|T| |東京|abc| |あア|!?|x",
    "deepseek-coder": "Hello| | world|\n|\n| |1|2|3|4|5|6|7| don|'|T| |東京|abc| |あア|!?|x",
    "kimi-k2": "Hello| | world|\n\n| |123|456|7| don'T| |東京|abc| あア|!?|x",
    "falcon": "Hello| | world|\n\n| |123|456|7| don|'|T| 東京abc| あア|!?|x",
    "superbpe": "Hello  world\n\n |1|234|567| don'T 東京abc あア!?x",
    "bloom": "Hello| | world|\n\n| 1234567| don'T| 東京abc| あア|!?|x",
    "viking": "Hello| | world|\n\n| |1|2|3|4|5|6|7| don'T| 東京abc| あア|!?|x",
    "tiny_aya": "Hello| | world|\n\n| |1|234|567| don'T| 東京abc| あア|!?|x",
    "chameleon": "Hello|  |world|\n|\n| |1|2|3|4|5|6|7| don|'|T| 東京abc| あア|!|?|x",
    "afmoe": "Hello| | world|\n\n| |1|234|567| don|'T| |東京|abc| |あア|!?|x",
    "exaone-moe": "Hello| | world|\n\n| |1|2|3|4|5|6|7| don|'T| 東京abc あア|!?|x",
    "youtu": "Hello| | world|\n\n| |1|2|3|4|5|6|7| don'T| |東京|abc| |あア|!?|x",
    "spark2_5": "Hello| | world|\n|\n| |1|2|3|4|5|6|7| don|'T| |東京|abc| |あア|!?|x",
}
_LIKE_LLAMA = "falcon3 falcon-h1 pixtral midm-2.0 jina-v5-nano llama3 llama-v3 llama-bpe"
SAME = {
    "gpt-2": "phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo jais trillion "
    "granite-docling exaone4 jina-v1-en jina-v2-code roberta-bpe",
    "lfm2": f"{_LIKE_LLAMA} dbrx smaug-bpe chatglm-bpe glm4 glm5 minicpm5 jais-2",
    "stablelm2": "qwen2 deepseek-r1-qwen kormo f2llmv2 qwen35 megrez hunyuan solar-open grok-2 tekken seed-coder "
    "bailingmoe bailingmoe2 llada-moe laguna ufakzeka",
    "codeshell": "starcoder refact command-r smollm exaone minerva-7b mellum2",
    "kanana2": "gpt-4o llama4 talkie minimax-m2 granite-embed-multi-97m",
    "hunyuan-dense": "deepseek-v3 joyai-llm hy_v4",
    "bloom": "poro-chat gpt3-finnish",
    "tiny_aya": "cohere2moe",
}


@pytest.mark.parametrize(("rule", "pieces"), CUTS.items())
def test_every_pretokenizer_splits_as_in_llama_cpp(rule, pieces):
    for name in (rule, *SAME.get(rule, "").split()):
        cuts = [pre_tokenizers.Split(Regex(text), "isolated") for text in SPLITTINGS[name].expressions]
        found = [piece for piece, _ in pre_tokenizers.Sequence(cuts).pre_tokenize_str(SAMPLE)]
        assert found == pieces.split("|"), name


def test_every_pretokenizer_name_has_a_rule():
    named = {*CUTS, *(name for names in SAME.values() for name in names.split()), "gpt2"}
    assert named == set(SPLITTINGS)


def test_gemma4_may_be_named_as_a_pretokenizer(tmp_path):
    original = sentencepiece_tokenizer(metaspace=False)
    merges = [" ".join(pair) for pair in json.loads(original.to_str())["model"]["merges"]]
    write_sentencepiece(tmp_path / "m.gguf", original, add_tokenizer_model="gemma4", add_token_merges=merges)
    expected = GgufCheckpoint(tmp_path / "m.gguf").tokenizer
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    checkpoint.files[0].metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gemma4"}
    for text in ("hello world", "lo  wor\n\nld", "é 🦊<s>."):
        assert checkpoint.tokenizer.encode(text) == expected.encode(text)


@pytest.mark.parametrize("kind", [NORMAL, USER, UNUSED, CONTROL, None])
@pytest.mark.parametrize(
    "text", ["<|im_end|>", "<|eom_id|>", "</s>", "[EOT]", "<|call|>", "<|fim_pad|>", "<|file_sep|>"]
)
def test_tokens_with_known_names_end_a_text(kind, text):
    types = None if kind is None else [NORMAL] * len(BYTES) + [kind]
    vocabulary = vocabulary_of([text], types)
    assert vocabulary.ends == (256,)
    tokenizer = vocabulary.tokenizer()
    assert tokenizer.encode(f"a{text}b") == [97 - 33, 256, 98 - 33]
    assert tokenizer.decode([256]) == ""


def test_some_tokens_do_not_end_a_text_if_others_exist():
    def ends(*texts: str) -> list[str]:
        vocabulary = vocabulary_of(texts)
        return [vocabulary.tokens[id] for id in vocabulary.ends]

    assert ends("<|end|>") == ["<|end|>"]
    assert ends("<|end|>", "<|return|>") == ["<|end|>", "<|return|>"]
    assert ends("<|end|>", "<|return|>", "<|call|>") == ["<|return|>", "<|call|>"]
    assert ends("<|end|>", "<|flush|>", "<|calls|>") == ["<|flush|>", "<|calls|>"]
    assert ends("</s>", "<|tool_response>", "<turn|>") == ["<|tool_response>", "<turn|>"]
    assert ends("[PAD]", "<PAD>") == ["[PAD]"]  # the first, where no key names one
    assert ends("ab", "ba") == []


@pytest.mark.parametrize("value", [257.0, 257])
def test_ids_of_any_integer_type_are_read(value):
    assert vocabulary_of(["ab", "ba"], eot_token_id=value).ends == (257,)
    assert vocabulary_of(["ab", "ba"], fim_rep_token_id=value).ends == (257,)


def test_special_ids_past_the_vocabulary_are_ignored_with_a_warning():
    with pytest.warns(OnwardWarning, match="eos_token_id is 300, and there are 257 tokens"):
        vocabulary = vocabulary_of(["ab"], eos_token_id=300)
    assert vocabulary.ends == ()
    assert vocabulary.tokenizer().eos_id is None
    assert vocabulary_of(["ab"], eos_token_id=-1).ends == ()


@pytest.mark.parametrize(
    "types", [(NORMAL, NORMAL), (NORMAL, USER), (USER, NORMAL), (CONTROL, NORMAL), (NORMAL, CONTROL)]
)
def test_two_ids_with_one_text_both_decode(types):
    vocabulary = vocabulary_of(["ab", "ba", "ab"], [NORMAL] * 256 + [types[0], NORMAL, types[1]], merges=["a b"])
    tokenizer = vocabulary.tokenizer()
    texts = ["" if kind == CONTROL else "ab" for kind in types]
    assert [tokenizer.decode([id]) for id in (256, 258)] == texts
    assert tokenizer.decode([256, 257, 258]) == f"{texts[0]}ba{texts[1]}"
    assert tokenizer.tokens()[256:] == ["ab", "ba", "ab"]
    assert tokenizer.vocab_size == 259
    assert tokenizer.encode("ab") == [258 if types[0] != CONTROL and types != (USER, NORMAL) else 256]


def test_types_and_scores_of_any_integer_type_and_excess_length_are_read():
    for dtype in (np.int8, np.int32, np.uint32, np.int64, np.float32):
        assert vocabulary_of(["ab"], np.array([NORMAL] * 256 + [CONTROL, 7], dtype)).types[256] == CONTROL
    with refused(TokenizerError, "must be integers"):
        vocabulary_of(["ab"], np.full(257, 1.5))


def test_a_missing_pretokenizer_is_a_warning():
    with pytest.warns(OnwardWarning, match="pre is missing"):
        vocabulary_of(["ab"], pre=None).tokenizer()


def test_add_eos_token_is_ignored_with_a_warning():
    with pytest.warns(OnwardWarning, match="add_eos_token"):
        tokenizer = vocabulary_of(["ab"], eos_token_id=256, add_eos_token=1).tokenizer()
    assert tokenizer.encode("a") == [64]


@pytest.mark.parametrize(("name", "behind"), [("Phi-3.5-mini-instruct", []), ("Phi3", []), ("Phi 4", [198])])
def test_phi3_tokens_strip_the_spaces_after_them(name, behind):
    vocabulary = vocabulary_of(["<|user|>", "</s>", "<s>"], [NORMAL] * 256 + [USER, CONTROL, CONTROL])
    vocabulary._metadata["general.name"] = name
    encode = vocabulary.tokenizer().encode
    assert encode("<|user|>\na") == [256, *behind, 64]
    assert encode("</s>\na") == [257, *behind, 64]
    assert encode("<s>\na") == [258, 198, 64]


@pytest.mark.parametrize("kind", [USER, CONTROL])
@pytest.mark.parametrize("text", ["naïve", "Ġx", "çé", "a b", "▁y", "東"])
def test_added_tokens_decode_to_their_text(kind, text):
    tokenizer = vocabulary_of([text], [NORMAL] * 256 + [kind]).tokenizer()
    ids = tokenizer.encode(f"a{text}b")
    assert ids == [64, 256, 65]
    assert tokenizer.decode(ids) == ("ab" if kind == CONTROL else f"a{text}b")
    assert tokenizer.bytes_of(256) == (b"" if kind == CONTROL else text.encode())
    assert tokenizer.tokens()[256] == text


@pytest.mark.parametrize("text", ["é", "Ã", "Ġx"])
def test_added_tokens_take_no_pieces_from_other_texts(text):
    """The letter "é" is the byte 0xE9, which "逅" begins with."""
    pieces = ["Ġx"]
    vocabulary = vocabulary_of([*pieces, text], [NORMAL] * 257 + [USER], merges=["Ġ x"])
    tokenizer = vocabulary.tokenizer()
    for sample in ("逅", f"a{text}b", "a x", "çé"):
        assert tokenizer.decode(tokenizer.encode(sample)) == sample
    assert tokenizer.decode([257]) == text


def test_merges_of_unknown_tokens_are_ignored():
    with pytest.warns(OnwardWarning, match="1 of 2 merges, such as 'x y', use a token"):
        tokenizer = vocabulary_of(["ab"], merges=["x y", "a b"]).tokenizer()
    assert tokenizer.encode("abxy") == [256, 120 - 33, 121 - 33]


def test_merged_tokens_of_type_unused_are_used():
    vocabulary = vocabulary_of(["ab", "[PAD257]"], [NORMAL] * 256 + [UNUSED, UNUSED], merges=["a b"])
    tokenizer = vocabulary.tokenizer()
    assert tokenizer.encode("ab") == [256]
    assert tokenizer.decode([256, 257]) == "ab"


def test_the_first_of_duplicate_merges_counts():
    tokenizer = vocabulary_of(["ab", "bc"], merges=["a b", "b c", "a b"]).tokenizer()
    assert tokenizer.encode("abc") == [256, 99 - 33]


HALVES = "東".encode()[:2], "東".encode()[2:]


@pytest.mark.parametrize("kind", [NORMAL, USER])
def test_tokens_that_are_not_text_keep_their_bytes(tmp_path, kind):
    texts = [*(letter.encode() for letter in BYTES), *HALVES, b"\xff", b"ab"]

    def metadata(writer) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(texts)
        writer.add_token_types([NORMAL] * 256 + [kind] * 3 + [NORMAL])
        writer.add_token_merges(["a b"])

    write_model(tmp_path / "m.gguf", "qwen3", "F32", metadata=metadata, vocab_size=len(texts), num_hidden_layers=1)
    tokenizer = GgufCheckpoint(tmp_path / "m.gguf").tokenizer
    assert tokenizer.vocab_size == 260
    assert tokenizer.decode([256, 257]) == "東"
    assert tokenizer.decode([257]) == tokenizer.decode([258]) == "\ufffd"
    assert [tokenizer.bytes_of(id) for id in (256, 257, 258)] == [*HALVES, b"\xff"]
    assert tokenizer.decode(tokenizer.encode("\ufffd東")) == "\ufffd東"
    assert max(tokenizer.encode("\ufffd東")) < 256


def test_unsupported_tokenizer_behavior_is_a_warning(tmp_path):
    def metadata(writer) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([*BYTES, "ab", "naïve"])
        writer.add_token_types([NORMAL] * 257 + [USER])
        writer.add_token_merges(["a b"])

    write_model(tmp_path / "m.gguf", "qwen3", "F32", metadata=metadata, vocab_size=258, num_hidden_layers=1)
    with pytest.warns(OnwardWarning, match=r"the texts of 1 tokens of .*m\.gguf, such as id 257"):
        convert(tmp_path / "m.gguf", tmp_path / "folder", "safetensors")
    tokenizers = [GgufCheckpoint(tmp_path / "m.gguf").tokenizer, CheckpointFolder(tmp_path / "folder").tokenizer]
    assert len({tuple(tokenizer.encode("naïve ab")) for tokenizer in tokenizers}) == 1


def test_pieces_that_are_not_text_keep_their_bytes():
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a"]
    texts += [half.decode("utf-8", "surrogateescape") for half in HALVES]
    types = np.array([UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, NORMAL, NORMAL, NORMAL, NORMAL])
    metadata = {"model": "llama", "tokens": texts, "token_type": types, "scores": np.zeros(len(texts))}
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    tokenizer = Vocabulary(keys, Path("m.gguf")).tokenizer()
    first = len(texts) - 2
    assert tokenizer.decode([first - 1, first, first + 1]) == "a東"
    assert tokenizer.bytes_of(first) == HALVES[0]
    assert "\ufffd" not in (tokenizer.tokens()[first] or "")
    assert tokenizer.decode(tokenizer.encode("\ufffd")) == "\ufffd"


@pytest.mark.parametrize("value", [True, False, None])
def test_only_scored_pieces_may_get_a_space_prefix(tmp_path, value):
    """llama.cpp's BPE does not look at the key."""
    original = sentencepiece_tokenizer(metaspace=False)
    merges = [" ".join(pair) for pair in json.loads(original.to_str())["model"]["merges"]]
    write_sentencepiece(tmp_path / "m.gguf", original, add_tokenizer_model="gemma4", add_token_merges=merges)
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    plain = dict(checkpoint.files[0].metadata)
    checkpoint.files[0].metadata["tokenizer.ggml.add_space_prefix"] = value
    plain["tokenizer.ggml.add_space_prefix"] = False
    expected = Vocabulary(plain, Path("m.gguf")).tokenizer()
    for text in ("hello world", " a"):
        ids = checkpoint.tokenizer.encode(text)
        assert ids == expected.encode(text)
        assert checkpoint.tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER])
def test_gemma4_markup_tokens_decode_as_text(kind):
    vocabulary = vocabulary_of(["</s>", "<|tool_response>"], [NORMAL] * 256 + [kind, CONTROL])
    assert vocabulary.ends == (257,)
    assert vocabulary.tokenizer().decode([256]) == "</s>"


@pytest.mark.parametrize("text", ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"])
def test_harmony_marks_are_skipped_as_in_transformers(text):
    tokenizer = vocabulary_of([text], [NORMAL] * 256 + [CONTROL]).tokenizer()
    assert tokenizer.encode(text) == [256]
    assert tokenizer.decode([256]) == ""
    assert tokenizer.special_tokens == {256: text}


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def vocabulary_of(texts, types=None, **keys: object) -> Vocabulary:
    """Of the 256 bytes, in the order of their characters, and these tokens."""
    metadata = {"model": "gpt2", "pre": "gpt-2", "tokens": [*BYTES, *texts], "merges": [], **keys}
    metadata |= {} if types is None else {"token_type": np.array(types)}
    return Vocabulary({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, Path("m.gguf"))
