"""A tokenizer of pieces and bytes that is written to GGUF makes the ids of its tokenizer.json."""

import json
import random

import gguf
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from onward.checkpoint.convert import convert
from onward.checkpoint.gguf import GgufCheckpoint
from onward.checkpoint.tokenizer import JsonTokenizer
from onward.errors import RequestError
from onward.testing import random_checkpoint

LETTERS = "▁abcdehlnorst.,!éß東\n\t"
SPECIAL = ["<unk>", "<s>", "</s>", "<start_of_turn>"]
RUNS = ["▁" * count for count in range(2, 8)] + ["\n" * count for count in range(2, 8)] + ["<table>"]


def pieces_tokenizer(seed: int, *, prefix: bool, by_length: bool) -> Tokenizer:
    """What transformers makes of a random model of sentencepiece: every pair that makes a piece, best scores first.

    prefix: as Llama 2 and Mistral, else Gemma. by_length: the pairs of one score lie as transformers puts them now,
    else as it did; runs of spaces and of line ends have one score.
    """
    draw = random.Random(seed)
    pieces = list(LETTERS) if prefix else [letter for letter in LETTERS if letter != "\t"]
    while len(pieces) < 400:
        piece = draw.choice(pieces) + draw.choice(pieces[: 20 + len(pieces) // 4])
        if len(piece) < 12 and piece not in pieces and "\n" not in piece and set(piece) != {"▁"}:
            pieces.append(piece)
    in_bytes = [f"<0x{byte:02X}>" if prefix or byte != 9 else "\t" for byte in range(256)]
    tokens = [*SPECIAL, *in_bytes, *RUNS, *draw.sample(pieces, len(pieces))]
    ids = {text: id for id, text in enumerate(tokens)}
    scores = dict.fromkeys(RUNS, 0.0) | {piece: -1.0 - place for place, piece in enumerate(pieces)}
    merges = []
    for piece, score in scores.items():
        pairs = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        there = [(left, right, score) for left, right in pairs if left in ids and right in ids]
        merges += sorted(there, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    order = (lambda pair: (pair[2], len(pair[0]), len(pair[1]))) if by_length else (lambda pair: pair[2])
    merges = [(left, right) for left, right, _ in sorted(merges, key=order, reverse=True)]
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in RUNS])
    to_marks, back = normalizers.Replace(" ", "▁"), [decoders.Replace("▁", " "), decoders.ByteFallback()]
    back += [decoders.Fuse(), *([decoders.Strip(" ", 1, 0)] if prefix else [])]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_marks]) if prefix else to_marks
    if not prefix:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(back)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def folder_with(path, tokenizer: Tokenizer):
    random_checkpoint(path, "llama", vocab_size=tokenizer.get_vocab_size() + 5)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def random_texts(seed: int) -> list[str]:
    draw = random.Random(seed)
    parts = [*LETTERS, *"    ", *"zqß🦊\r\u0301\u00a0", "   ", "\n\n", "<s>", "<table>", "<start_of_turn>", "<0x41>"]
    return ["".join(draw.choices(parts, k=draw.randrange(0, 40))) for _ in range(10_000)]


@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
def test_the_ids_are_those_of_tokenizer_json(prefix, by_length, tmp_path):
    original = pieces_tokenizer(1 + prefix, prefix=prefix, by_length=by_length)
    source = folder_with(tmp_path / "source", original)
    convert(source, tmp_path / "model.gguf", "gguf")
    ours = GgufCheckpoint(tmp_path / "model.gguf").tokenizer
    texts = random_texts(3)
    for text, encoded in zip(texts, original.encode_batch(texts), strict=True):
        assert ours.encode(text) == encoded.ids, repr(text)
        assert ours.decode(encoded.ids) == original.decode(encoded.ids)
    assert (ours.bos_id, ours.eos_id) == (1, 2)
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    assert fields["tokenizer.ggml.add_space_prefix"].contents() is prefix
    assert fields["tokenizer.ggml.unknown_token_id"].contents() == 0
    kinds = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32]
    assert fields["tokenizer.ggml.token_type"].types == kinds  # llama.cpp opens no other


def test_scores_fall_as_the_merges_of_pieces_do(tmp_path):
    original = pieces_tokenizer(5, prefix=True, by_length=False)
    convert(folder_with(tmp_path / "source", original), tmp_path / "model.gguf", "gguf")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    scores = dict(zip(*(fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores")), strict=True))
    merged = dict.fromkeys("".join(pair) for pair in json.loads(original.to_str())["model"]["merges"])
    plain = [scores[piece] for piece in merged if piece not in RUNS]
    assert plain == sorted(plain, reverse=True)
    assert len(set(plain)) == len(plain)
    assert min(scores[piece] for piece in merged if piece in RUNS) > plain[0]


def metaspace(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)


def changed_merges(change) -> Tokenizer:
    parts = json.loads(pieces_tokenizer(1, prefix=True, by_length=False).to_str())
    change(parts["model"]["merges"])
    return Tokenizer.from_str(json.dumps(parts))


def among_others(merges: list) -> None:
    """Puts one pair of a piece that several make behind all others."""
    pieces = ["".join(pair) for pair in merges]
    at = next(at for at, piece in enumerate(pieces) if pieces.count(piece) > 1 and piece not in RUNS)
    merges.append(merges.pop(at))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (metaspace, "normalizer is .*, and GGUF can only say"),
        (lambda t: setattr(t, "normalizer", normalizers.NFKC()), "normalizer is .*NFKC"),
        (lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Digits()), "pre_tokenizer is .*Digits"),
        (lambda t: setattr(t, "decoder", decoders.Fuse()), "decoder is .*Fuse"),
        (lambda t: t.add_special_tokens([AddedToken("<|end|>", rstrip=True)]), r"'<\|end\|>' has rstrip"),
        (lambda merges: merges.pop(), "never merges .* 1 pairs in all"),
        (among_others, "lie among each other"),
    ],
)
def test_what_a_file_cannot_say_is_refused(change, words, tmp_path):
    if words in ("never merges .* 1 pairs in all", "lie among each other"):
        tokenizer = changed_merges(change)
    else:
        change(tokenizer := pieces_tokenizer(1, prefix=True, by_length=False))
    with pytest.raises(RequestError, match=words):
        convert(folder_with(tmp_path / "source", tokenizer), tmp_path / "x.gguf", "gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_unknown_tokenizer_is_refused(tmp_path):
    words = Tokenizer(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2, "<unk>": 3}, unk_token="<unk>"))
    assert JsonTokenizer(words, {}).vocab_size == 4
    with pytest.raises(RequestError, match="no BPE of bytes, or of pieces and bytes"):
        convert(folder_with(tmp_path / "source", words), tmp_path / "x.gguf", "gguf")
