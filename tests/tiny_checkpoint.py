"""Small checkpoint folders, and a check that loading is refused."""

import contextlib
import functools
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from onward.errors import OnwardError, OptionError, RequestError
from onward.models import WeightScope, read_config

TEXTS = [
    "Once upon a time there was a small fox who lived by the river.",
    "The fox said: “Hello, world!” and the world said hello.",
    "1 + 1 = 2; naïve café, Straße, 東京, привет 🦊",
]
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 352,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# Of a tiny model of a family whose experts are 128 large ones by default: 30 million weights.
_FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
FEW_EXPERTS = {"glm4moe": {"n_routed_experts": 4, **_FEW}, "qwen3moe": {"num_experts": 4, **_FEW}}
TOKENIZER_CONFIG = {"bos_token": "<s>", "eos_token": "</s>"}


def write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")


def read_json(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))


def change_json(file: Path, **fields: object) -> None:
    """Set fields of a JSON object; those set to `...` are removed."""
    content = (read_json(file) if file.exists() else {}) | fields
    write_json(file, {name: value for name, value in content.items() if value is not ...})


class _Drawn:
    """Makes and records every requested tensor."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._dtype = dtype
        self._random = torch.Generator().manual_seed(1)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.tensors[name] = (torch.randn(shape, generator=self._random) * 0.1).to(self._dtype)
        return self.tensors[name]


def random_tensors(config: dict, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    drawn = _Drawn(dtype)
    read_config(config).read(WeightScope(drawn))
    return drawn.tensors


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE with a few merges and four special tokens, ids 0 to 3; every text is in its range."""
    return Tokenizer.from_str(_byte_level())


@functools.cache
def _byte_level() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer.to_str()


def sentencepiece_tokenizer(*, metaspace: bool) -> Tokenizer:
    """What a Llama 2 or Mistral tokenizer.json holds: pieces with "▁" for a space, bytes for the rest, a BOS.

    A text gets a space in front, which decoding takes off again: by the normalizer, always (the older form), or by
    the Metaspace pre-tokenizer, where it does not begin with one already.
    """
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    letters = "▁helowrdtaisn.,"
    for letter in letters:
        vocab[letter] = len(vocab)
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "w"), ("▁", "▁"), ("o", "r")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def make_checkpoint(
    folder: Path, *, dtype: torch.dtype = torch.float32, tokenizer: bool = True, **changes: object
) -> Path:
    """A whole checkpoint with random weights; `changes` are of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    write_json(folder / "config.json", config)
    save_file(random_tensors(config, dtype), folder / "model.safetensors")
    if tokenizer:
        byte_level_tokenizer().save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    return folder


def split_into_shards(
    folder: Path, names: tuple[str, ...] = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
) -> dict[str, str]:
    """Cut model.safetensors into shards with an index; tensor -> shard."""
    tensors = load_file(folder / "model.safetensors")
    where = {name: names[at % len(names)] for at, name in enumerate(sorted(tensors))}
    for shard in names:
        (folder / shard).parent.mkdir(exist_ok=True)
        save_file({name: tensors[name] for name in tensors if where[name] == shard}, folder / shard)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    (folder / "model.safetensors").unlink()
    return where


def raw_safetensors(file: Path, header: dict | bytes, data: bytes) -> None:
    """A safetensors file byte by byte, legal or not."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


@contextlib.contextmanager
def refused(kind: type[OnwardError], *words: str):
    """The block raises exactly this kind of error, in one line that says all of `words`. An option that is invalid is a
    `RequestError`, too."""
    with pytest.raises(OnwardError) as caught:
        yield
    message = str(caught.value)
    found = RequestError if type(caught.value) is OptionError else type(caught.value)
    assert found is kind, f"{type(caught.value).__name__}: {message}"
    assert "\n" not in message
    assert message
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"


@pytest.fixture
def folder(tmp_path):
    """A whole small checkpoint, to be spoilt by the test. The conftest of a folder that wants it imports it."""
    return make_checkpoint(tmp_path / "tiny")
