"""A tokenizer from a GGUF file gives the ids of the tokenizer.json that it was made from."""

import json
import random
from functools import cache

import pytest
from gguf_files import write_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import onward
from onward.checkpoint import GgufCheckpoint
from onward.checkpoint.gguf.pretokenizer import SPLITTINGS
from onward.errors import TokenizerError
from tiny_checkpoint import SPECIAL, TEXTS, refused, sentencepiece_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
LETTERS = [
    *"abcxyzABCXYZ0123456789   \t\n\r.,:;!?'\"/+-=<>^~|$()[]{}_`\\",
    "'s",
    "'LL",
    "é",
    "ß",
    "n\u0303",
    "東",
    "京",
    "а",
    "🦊",
]
LETTERS += [
    "\u00a0",
    "\u2028",
    "ﬁ",
    "İ",
    "\u0301",
    "١",
    "½",
    "あ",
    "ア",
    "<s>",
    "<|im_end|>",
    "the",
    " world",
    "Hello",
    "\ufeff",
]


@cache
def strings(count: int = 3_000, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(LETTERS, k=draw.randrange(0, 24))) for _ in range(count)]


def trained(splitting: str) -> Tokenizer:
    """Byte-level BPE over this splitting, with enough merges that cuts matter."""
    rule = SPLITTINGS[splitting]
    tokenizer = Tokenizer(models.BPE(ignore_merges=rule.whole_words))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(text), "isolated") for text in rule.expressions]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3 + strings(400, seed=9), trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def write_byte_level(file, tokenizer: Tokenizer, pre: str | None, **metadata: object) -> None:
    content = json.loads(tokenizer.to_str())
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [text for text, _ in sorted(vocab.items(), key=lambda entry: entry[1])]
    kinds = {entry["content"]: CONTROL if entry["special"] else USER for entry in content["added_tokens"]}

    def vocabulary(writer) -> None:
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([kinds.get(text, NORMAL) for text in tokens])
        writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        for name, value in metadata.items():
            getattr(writer, name)(value)

    write_model(file, "qwen3", "Q8_0", metadata=vocabulary, vocab_size=len(tokens), num_hidden_layers=1)


# The first name of each rule.
RULES = list({rule: pre for pre, rule in reversed(SPLITTINGS.items())}.values())


@pytest.mark.parametrize("pre", RULES)
@pytest.mark.stride(2)
def test_byte_level(tmp_path, pre):
    original = trained(pre)
    write_byte_level(tmp_path / "m.gguf", original, pre, add_add_bos_token=False)
    ours = GgufCheckpoint(tmp_path / "m.gguf").tokenizer
    for text, encoded in zip(texts := strings(), original.encode_batch(texts), strict=True):
        assert ours.encode(text) == encoded.ids, repr(text)
        assert ours.decode(encoded.ids) == original.decode(encoded.ids)


def test_the_gpt2_rule_equals_that_of_tokenizers(tmp_path):
    """The one rule that the `tokenizers` library has built in."""
    tokenizer = trained("gpt-2")
    write_byte_level(tmp_path / "m.gguf", tokenizer, "gpt-2")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    ours = GgufCheckpoint(tmp_path / "m.gguf").tokenizer
    assert all(ours.encode(text) == tokenizer.encode(text).ids for text in strings())


def write_sentencepiece(file, original: Tokenizer, **metadata: object) -> None:
    vocab = original.get_vocab()
    tokens = [text for text, _ in sorted(vocab.items(), key=lambda entry: entry[1])]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    merged = ["".join(pair) for pair in json.loads(original.to_str())["model"]["merges"]]
    scores = [-float(merged.index(text)) if text in merged else -1e6 for text in tokens]

    def vocabulary(writer) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        for name, value in metadata.items():
            getattr(writer, name)(value)

    write_model(file, "llama", "Q8_0", metadata=vocabulary, vocab_size=len(tokens), num_hidden_layers=1)


def test_sentencepiece(tmp_path):
    original = sentencepiece_tokenizer(metaspace=False)
    write_sentencepiece(tmp_path / "m.gguf", original)
    ours = GgufCheckpoint(tmp_path / "m.gguf").tokenizer
    draw = random.Random(1)
    parts = ["hello", "world", " ", "  ", "or", "he", "ll", "é", "🦊", "<s>", ".", "\n", "w", "lo", "a"]
    texts = ["".join(draw.choices(parts, k=draw.randrange(0, 12))) for _ in range(10_000)]
    for text, encoded in zip(texts, original.encode_batch(texts), strict=True):
        assert ours.encode(text) == encoded.ids, repr(text)  # both begin with the BOS
        assert ours.decode(encoded.ids) == original.decode(encoded.ids)


def test_pieces_with_merges(tmp_path):
    """Gemma 4's: no space in front, and merges in the file."""
    original = sentencepiece_tokenizer(metaspace=False)
    original.normalizer = normalizers.Replace(" ", "▁")
    original.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    merges = [" ".join(pair) for pair in json.loads(original.to_str())["model"]["merges"]]
    write_sentencepiece(
        tmp_path / "m.gguf", original, add_tokenizer_model="gemma4", add_token_merges=merges, add_add_bos_token=True
    )
    ours = GgufCheckpoint(tmp_path / "m.gguf").tokenizer
    for text in ["hello world", " hello", "lo  wor\n\nld", "é 🦊<s>.", ""]:
        assert ours.encode(text) == original.encode(text).ids, repr(text)
        assert ours.decode(ours.encode(text)) == original.decode(original.encode(text).ids)


def test_scored_pieces_may_have_merges_too(tmp_path):
    """As earlier versions of Onward wrote them: the merges count."""
    original = sentencepiece_tokenizer(metaspace=False)
    merges = [" ".join(pair) for pair in json.loads(original.to_str())["model"]["merges"]]
    write_sentencepiece(tmp_path / "m.gguf", original, add_token_merges=merges)
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    metadata = checkpoint.files[0].metadata
    metadata["tokenizer.ggml.scores"] = -metadata["tokenizer.ggml.scores"]  # these alone make other tokens
    ours = checkpoint.tokenizer
    for text in ["hello world", " hello", "lo  wor\n\nld", "é 🦊<s>.", ""]:
        assert ours.encode(text) == original.encode(text).ids, repr(text)


def test_without_a_space_prefix(tmp_path):
    write_sentencepiece(tmp_path / "m.gguf", sentencepiece_tokenizer(metaspace=False), add_add_space_prefix=False)
    ours = GgufCheckpoint(tmp_path / "m.gguf").tokenizer
    pieces = ours.tokens()
    assert [pieces[id] for id in ours.encode("hello", add_special_tokens=False)] == ["hello"]
    assert ours.decode(ours.encode(" hello")) == " hello"


@pytest.mark.parametrize(("value", "expected"), [(None, False), (True, True), (False, False)])
def test_the_bos_is_added_as_the_file_specifies(tmp_path, value, expected):
    metadata = {} if value is None else {"add_add_bos_token": value}
    write_byte_level(tmp_path / "m.gguf", trained("qwen2"), "qwen2", **metadata)
    ids = GgufCheckpoint(tmp_path / "m.gguf").tokenizer.encode("hello")
    assert (ids[0] == 0) is expected


def test_llama3_adds_a_bos_by_default(tmp_path):
    write_byte_level(tmp_path / "m.gguf", trained("llama-bpe"), "llama-bpe")
    assert GgufCheckpoint(tmp_path / "m.gguf").tokenizer.encode("hello")[0] == 0


def test_special_tokens_and_eos(tmp_path):
    write_byte_level(tmp_path / "m.gguf", trained("qwen2"), "qwen2")
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    tokenizer = checkpoint.tokenizer
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert checkpoint.eos == (1, SPECIAL.index("<|im_end|>"))
    think = tokenizer.encode("<think>")
    assert len(think) == 1
    assert tokenizer.decode(think) == "<think>"  # added, but no special token
    assert tokenizer.decode(tokenizer.encode("<s>hello</s>")) == "hello"


def test_a_chat_through_the_files_template(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    write_byte_level(tmp_path / "m.gguf", trained("qwen2"), "qwen2", add_chat_template=template)
    lm = onward.load(tmp_path / "m.gguf")
    prompt = GgufCheckpoint(tmp_path / "m.gguf").chat_template.render([{"role": "user", "content": "hello"}])
    assert prompt == "<s><|im_start|>hello<|im_end|>"
    assert lm.chat([{"role": "user", "content": "hello"}], max_new_tokens=4).token_ids


def spoilt(tmp_path, **changes: object) -> GgufCheckpoint:
    write_byte_level(tmp_path / "m.gguf", trained("qwen2"), "qwen2")
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    for name, value in changes.items():
        checkpoint.files[0].metadata[f"tokenizer.ggml.{name}"] = value
    return checkpoint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "bert"}, ("'bert'", "gpt2, llama, gemma4")),
        ({"model": 7}, ("tokenizer.ggml.model", "int")),
        ({"pre": "klingon"}, ("'klingon'", "qwen2")),
        ({"merges": None}, ("tokenizer.ggml.merges", "nothing")),
        ({"merges": ["ab"]}, ("merge 'ab'",)),
        ({"tokens": []}, ("no tokens",)),
        ({"token_type": [1]}, ("token_type", "a number for each of")),
        ({"bos_token_id": "x"}, ("bos_token_id",)),
    ],
)
def test_invalid_tokenizers_are_refused(tmp_path, changes, words):
    if "tokens" in changes:
        changes = changes | {"token_type": None}
    checkpoint = spoilt(tmp_path, **changes)
    with refused(TokenizerError, *words):
        assert checkpoint.tokenizer is None
