"""A GGUF file has the text settings of the checkpoint: ids, special ids, ends, templates and sampling."""

import json
import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import onward
from onward.checkpoint import GgufCheckpoint
from onward.checkpoint.checkpoint import CheckpointFolder
from onward.checkpoint.convert import convert
from onward.errors import CheckpointError, ConfigError, OnwardWarning, RequestError
from onward.testing import random_checkpoint

SPECIAL = ["<s>", "</s>", "<|im_end|>", "<mask>"]
BOS, EOS, IM_END, MASK = range(256, 260)  # where nothing is merged
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def bytes_tokenizer(*merges: tuple[str, str]) -> Tokenizer:
    """Byte-level BPE that cuts as GPT-2."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: id for id, text in enumerate([*letters, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def folder_with(path, tokenizer: Tokenizer | None, **files):
    """A checkpoint with this tokenizer; files: other small JSON files by their names without the end."""
    random_checkpoint(path, vocab_size=300)
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    for name, content in {"tokenizer_config": NAMES, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def converted(tmp_path, tokenizer: Tokenizer | None, **files) -> tuple[CheckpointFolder, GgufCheckpoint]:
    source = folder_with(tmp_path / "source", tokenizer, **files)
    convert(source, tmp_path / "model.gguf", "gguf")
    return CheckpointFolder(source), GgufCheckpoint(tmp_path / "model.gguf")


def random_texts() -> list[str]:
    draw = random.Random(0)
    parts = [*"hello, é东\n\t 12", "  ", *SPECIAL, "<|fim|>"]
    return ["".join(draw.choices(parts, k=draw.randrange(0, 20))) for _ in range(3000)]


@pytest.mark.parametrize("merges", [[], [("l", "l"), ("h", "e"), ("he", "ll")]])
def test_byte_level_ids_equal_those_of_tokenizer_json(merges, tmp_path):
    tokenizer = bytes_tokenizer(*merges)
    tokenizer.add_tokens([AddedToken("<|fim|>", normalized=False)])
    folder, file = converted(tmp_path, tokenizer)
    for text in random_texts():
        assert file.tokenizer.encode(text) == folder.tokenizer.encode(text), repr(text)


@pytest.mark.parametrize("way", ["lstrip", "rstrip", "single_word"])
def test_byte_level_added_tokens_that_gguf_lacks_are_refused(way, tmp_path):
    tokenizer = bytes_tokenizer()
    tokenizer.add_tokens([AddedToken("<|fim|>", normalized=False, **{way: True})])
    with pytest.raises(RequestError, match=rf"GGUF cannot express {way} of the added token '<\|fim\|>'"):
        converted(tmp_path, tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("normalizer", "taken"),
    [
        (normalizers.NFC(), True),
        (normalizers.Sequence([]), True),
        (normalizers.NFKC(), False),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]), False),
    ],
)
def test_normalizers_that_gguf_lacks_are_named(normalizer, taken, tmp_path):
    tokenizer = bytes_tokenizer()
    tokenizer.normalizer = normalizer
    if taken:
        converted(tmp_path, tokenizer)
    else:
        with pytest.raises(RequestError, match=r"normalizer is .*, and GGUF supports only NFC for byte-level BPE"):
            converted(tmp_path, tokenizer)


@pytest.mark.parametrize(
    ("around", "words"),
    [
        ("$A", None),
        ("<s> $A", None),
        ("<s> $A </s>", "adds </s> to"),
        ("<mask> <s> $A", "adds <mask> <s> to"),
    ],
)
def test_surrounding_tokens_that_gguf_lacks_are_a_warning(around, words, tmp_path):
    tokenizer = bytes_tokenizer()
    pairs = [(text, tokenizer.token_to_id(text)) for text in SPECIAL]
    tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=pairs)
    if words is None:
        folder, file = converted(tmp_path, tokenizer)
        assert file.tokenizer.encode("hello") == folder.tokenizer.encode("hello")
    else:
        with pytest.warns(OnwardWarning, match=f"the tokenizer {words} each text, which GGUF cannot express"):
            converted(tmp_path, tokenizer)


@pytest.mark.parametrize("names", [NAMES, {"bos_token": "<s>"}])
@pytest.mark.parametrize("ends", [7, [7], [EOS, 7, 9], [IM_END, EOS, 7], [7, IM_END, 9]])
def test_every_eos_of_the_folder_is_written(ends, names, tmp_path):
    """Including tokens that end a text by their name."""
    files = {"tokenizer_config": names, "generation_config": {"eos_token_id": ends}}
    folder, file = converted(tmp_path, bytes_tokenizer(), **files)
    own = {EOS} if "eos_token" in names else set()
    assert set(file.eos) == {*folder.eos, EOS, IM_END}
    assert file.tokenizer.eos_id == (EOS if own else folder.eos[0])


def test_eos_ids_are_written_without_a_tokenizer(tmp_path):
    folder, file = converted(tmp_path, None, generation_config={"eos_token_id": [7, 9]})
    assert file.tokenizer is None
    assert file.eos == folder.eos == (7, 9)


def test_more_eos_ids_than_gguf_allows_are_refused(tmp_path):
    with pytest.raises(RequestError, match=r"the end-of-text ids are 257, 1, 2, 3, and GGUF has keys for 3"):
        converted(tmp_path, bytes_tokenizer(), generation_config={"eos_token_id": [1, 2, 3]})


@pytest.mark.parametrize(
    ("generation", "kind", "words"),
    [
        ({"eos_token_id": 300}, ConfigError, "eos_token_id names id 300, but the model's vocabulary ends at 299"),
        ({}, CheckpointError, "ids up to 359, but the model's vocabulary ends at 299"),
    ],
)
def test_a_tokenizer_of_another_model_is_refused(generation, kind, words, tmp_path):
    tokenizer = bytes_tokenizer()
    if kind is CheckpointError:
        tokenizer.add_tokens([f"<{number}>" for number in range(100)])
    with pytest.raises(kind, match=words):
        converted(tmp_path, tokenizer, generation_config=generation)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.filterwarnings("ignore:.*do_sample, so decoding is greedy")
@pytest.mark.parametrize(
    "generation",
    [
        {},
        {"temperature": 0.7},
        {"do_sample": False, "temperature": 0.7},
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05},
        {"do_sample": True, "temperature": 1, "top_k": None},
    ],
)
def test_sampling_defaults_of_the_folder_are_written(generation, tmp_path):
    source = folder_with(tmp_path / "source", None, generation_config=generation)
    convert(source, tmp_path / "model.gguf", "gguf")
    folder, file = (onward.load(path, compile="eager") for path in (source, tmp_path / "model.gguf"))
    assert file.defaults == folder.defaults


def test_both_templates_are_written_with_their_tokens(tmp_path):
    plain, tools = "{{ bos_token }}{{ pad_token }}{{ unk_token }}{{ messages[0].content }}", "{{ tools }}"
    templates = [{"name": "default", "template": plain}, {"name": "tool_use", "template": tools}]
    config = NAMES | {"pad_token": "<mask>", "unk_token": {"content": "</s>"}, "chat_template": templates}
    folder, file = converted(tmp_path, bytes_tokenizer(), tokenizer_config=config)
    assert file.chat_template.sources == folder.chat_template.sources == (plain, tools)
    message = [{"role": "user", "content": "Hi"}]
    assert file.chat_template.render(message) == folder.chat_template.render(message) == "<s><mask></s>Hi"


def test_invalid_unicode_is_refused(tmp_path):
    with pytest.raises(RequestError, match="is not valid Unicode, which GGUF requires"):
        converted(tmp_path, bytes_tokenizer(), tokenizer_config=NAMES | {"chat_template": "\ud800 {{ messages }}"})
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def pieces() -> Tokenizer:
    """BPE of pieces and bytes."""
    tokens = {text: id for id, text in enumerate([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a"])}
    tokenizer = Tokenizer(models.BPE(tokens, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def words() -> Tokenizer:
    return Tokenizer(models.WordLevel({text: id for id, text in enumerate([*SPECIAL, "a"])}, unk_token="<s>"))


@pytest.mark.parametrize("kind", [pieces, words])
def test_other_tokenizers_are_refused_before_any_work(kind, tmp_path):
    """The weights are not read: the folder has none."""
    source = folder_with(tmp_path / "source", kind())
    (source / "model.safetensors").unlink()
    with pytest.raises(RequestError, match=r"only byte-level BPE.*--to safetensors.*convert_hf_to_gguf\.py"):
        convert(source, tmp_path / "model.gguf", "gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
