"""Weights from safetensors: every tensor is read or reported, mapped and not copied; damaged files are refused."""

import json
import struct
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

import onward
from onward.checkpoint import read_weights
from onward.errors import CheckpointError
from onward.models import read_config
from tiny_checkpoint import (
    CONFIG,
    change_json,
    make_checkpoint,
    random_tensors,
    raw_safetensors,
    read_json,
    refused,
    split_into_shards,
    write_json,
)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CPU = torch.device("cpu")


def read(folder, dtype=None):
    return read_weights(folder, read_config(read_json(folder / "config.json")), dtype=dtype, device=CPU)


def tensors_of(params):
    return [leaf for leaf in pytree.tree_leaves(params) if leaf is not None]


def change_tensors(folder, **changes):
    """Set tensors of model.safetensors ("_" in a name stands for "."); those set to None are removed."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors[name.replace("__", ".")] = tensor
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


# ── dtypes ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_dtype_defaults_to_the_checkpoints(dtype, tmp_path):
    folder = make_checkpoint(tmp_path, dtype=DTYPES[dtype])
    assert {tensor.dtype for tensor in tensors_of(read(folder))} == {DTYPES[dtype]}


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("expected", DTYPES)
def test_every_tensor_has_the_requested_dtype(stored, expected, tmp_path):
    folder = make_checkpoint(tmp_path, dtype=DTYPES[stored])
    stored_embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    params = read(folder, DTYPES[expected])
    assert {tensor.dtype for tensor in tensors_of(params)} == {DTYPES[expected]}
    assert torch.equal(params.embed_tokens.weight, stored_embedding.to(DTYPES[expected]))


def test_tensors_of_another_dtype_are_cast_to_the_embeddings(tmp_path):
    folder = make_checkpoint(tmp_path, dtype=torch.bfloat16)
    change_tensors(folder, model__norm__weight=torch.ones(16, dtype=torch.float32))
    assert {tensor.dtype for tensor in tensors_of(read(folder))} == {torch.bfloat16}


def test_values_beyond_float16_are_refused(folder):
    change_tensors(folder, model__norm__weight=torch.full((16,), 1e6))
    with refused(CheckpointError, "model.norm.weight", "1e+06", "65504", "bfloat16"):
        read(folder, torch.float16)
    assert read(folder, torch.bfloat16).norm[0] == torch.tensor(1e6, dtype=torch.bfloat16)


# ── the tensors of the folder against those that config.json needs ─────────────────────────────────────────


@pytest.mark.parametrize("name", sorted(random_tensors(CONFIG)))
def test_every_missing_tensor_is_named_with_its_shape(name, folder):
    shape = list(load_file(folder / "model.safetensors")[name].shape)
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with refused(CheckpointError, repr(name), str(shape), "missing"):
        onward.load(folder)


@pytest.mark.parametrize("name", sorted(random_tensors(CONFIG)))
def test_every_misshaped_tensor_is_named_with_both_shapes(name, folder):
    tensors = load_file(folder / "model.safetensors")
    expected, found = list(tensors[name].shape), [*tensors[name].shape[:-1], tensors[name].shape[-1] + 1]
    save_file(tensors | {name: torch.zeros(found)}, folder / "model.safetensors")
    with refused(CheckpointError, repr(name), str(expected), str(found), "config.json"):
        onward.load(folder)


def test_a_transposed_tensor_is_misshaped(folder):
    change_tensors(folder, model__embed_tokens__weight=torch.zeros(16, 352))
    with refused(CheckpointError, "embed_tokens", "[16, 352]", "[352, 16]"):
        onward.load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float64, torch.float8_e4m3fn])
def test_unsupported_dtypes_are_named(dtype, folder):
    change_tensors(folder, model__norm__weight=torch.ones(16).to(dtype))
    with refused(CheckpointError, "model.norm.weight", str(dtype), "f32"):
        onward.load(folder)


def test_surplus_tensors_are_refused(folder):
    change_json(folder / "config.json", num_hidden_layers=1)
    with refused(CheckpointError, "9 tensors", "model.layers.1.", "config"):
        onward.load(folder)


def test_surplus_biases_are_refused(folder):
    change_tensors(folder, model__layers__0__self_attn__q_proj__bias=torch.zeros(16))
    with refused(CheckpointError, "model.layers.0.self_attn.q_proj.bias", "config"):
        onward.load(folder)


def test_legacy_rotary_frequencies_are_ignored(folder):
    before = onward.load(folder).logits([1, 2])
    change_tensors(folder, **{f"model__layers__{i}__self_attn__rotary_emb__inv_freq": torch.ones(2) for i in (0, 1)})
    assert torch.equal(onward.load(folder).logits([1, 2]), before)


def test_a_tied_head_is_the_embedding(tmp_path):
    folder = make_checkpoint(tmp_path, tie_word_embeddings=True)
    params = read(folder)
    assert params.lm_head.weight is params.embed_tokens.weight


def test_a_stored_tied_head_is_still_the_embedding(tmp_path):
    folder = make_checkpoint(tmp_path, tie_word_embeddings=True)
    change_tensors(folder, lm_head__weight=load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone())
    params = read(folder)
    assert params.lm_head.weight is params.embed_tokens.weight


# ── shards ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "names", [("a.safetensors",), ("x.safetensors", "y.safetensors", "z"), ("one/a.st", "two/a.st")], ids=len
)
def test_sharded_weights_equal_a_single_file(names, folder):
    whole = tensors_of(read(folder))
    split_into_shards(folder, names)
    assert all(torch.equal(a, b) for a, b in zip(whole, tensors_of(read(folder)), strict=True))


def test_a_missing_shard_is_named(folder):
    split_into_shards(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with refused(CheckpointError, "model-00001-of-00002.safetensors", "missing", "index"):
        onward.load(folder)


@pytest.mark.parametrize("shard", ["../tiny/model-00001-of-00002.safetensors", "/etc/hostname", "..", "", "a\0b"])
def test_a_shard_outside_the_folder_is_not_opened(shard, folder):
    where = split_into_shards(folder)
    write_json(folder / "model.safetensors.index.json", {"weight_map": where | {"lm_head.weight": shard}})
    with refused(CheckpointError, repr(shard), "outside its folder"):
        onward.load(folder)


def test_a_shard_with_a_too_long_name_is_missing(folder):
    where = split_into_shards(folder)
    write_json(folder / "model.safetensors.index.json", {"weight_map": where | {"lm_head.weight": "n" * 1000}})
    with refused(CheckpointError, "n" * 1000, "is missing"):
        onward.load(folder)


@pytest.mark.parametrize("name", ["model.nothing.weight", "lm_head.weight"])
def test_a_tensor_missing_from_its_shard_is_named(name, folder):
    where = split_into_shards(folder)
    wrong = next(shard for shard in sorted(set(where.values())) if shard != where.get(name))
    write_json(folder / "model.safetensors.index.json", {"weight_map": where | {name: wrong}})
    with refused(CheckpointError, "index", repr(name), wrong, "where it is missing"):
        onward.load(folder)


def test_tensors_missing_from_the_index_are_read_too(folder):
    split_into_shards(folder)
    shard = folder / "model-00001-of-00002.safetensors"
    save_file(load_file(shard) | {"model.layers.7.extra": torch.zeros(1)}, shard)
    with refused(CheckpointError, "model.layers.7.extra"):
        onward.load(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no json",
        b"[]",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": 1}}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
    ids=range(9),
)
def test_invalid_indexes(content, folder):
    split_into_shards(folder)
    (folder / "model.safetensors.index.json").write_bytes(content)
    with refused(CheckpointError, "model.safetensors.index.json"):
        onward.load(folder)


def test_no_weights_and_weights_in_another_format(folder):
    (folder / "model.safetensors").unlink()
    with refused(CheckpointError, "no weights", "model.safetensors", "model.safetensors.index.json"):
        onward.load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    with refused(CheckpointError, "no weights", "pytorch_model.bin", "save the model as safetensors"):
        onward.load(folder)


# ── damage ────────────────────────────────────────────────────────────────────────────────────────────────


class Spoilable:
    """A checkpoint whose weights are written again and again, each time damaged in another way."""

    def __init__(self, folder):
        self.folder = folder
        self.content = (folder / "model.safetensors").read_bytes()
        self.header_end = 8 + struct.unpack("<Q", self.content[:8])[0]

    def spoilt(self, content: bytes):
        # A new file each time: the old one may still be mapped.
        (self.folder / "new").write_bytes(content)
        return (self.folder / "new").rename(self.folder / "model.safetensors").parent


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return Spoilable(make_checkpoint(tmp_path_factory.mktemp("whole"), tokenizer=False))


@settings(max_examples=150)
@given(st.data())
def test_a_truncated_file_is_refused(whole, data):
    end = len(whole.content)
    cut = data.draw(st.one_of(st.integers(0, whole.header_end + 1), st.integers(0, end - 1)))
    with refused(CheckpointError, "model.safetensors", "damaged or truncated"):
        read(whole.spoilt(whole.content[:cut]))


@given(st.binary(min_size=1, max_size=100))
def test_a_file_with_trailing_bytes_is_refused(whole, more):
    with refused(CheckpointError, "model.safetensors", "damaged"):
        read(whole.spoilt(whole.content + more))


@settings(max_examples=300)
@given(st.data())
def test_header_damage_is_refused_or_harmless(whole, data):
    end = whole.header_end
    at, byte = data.draw(st.integers(0, end - 1)), data.draw(st.integers(0, 255))
    content = whole.content[:at] + bytes([byte]) + whole.content[at + 1 :]
    if at >= 8 and says_the_same(content[8:end], whole.content[8:end]):
        read(whole.spoilt(content))
    else:
        with refused(CheckpointError, str(whole.folder)):
            read(whole.spoilt(content))


def says_the_same(one: bytes, other: bytes) -> bool:
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


@given(st.binary(max_size=200))
def test_files_other_than_safetensors_are_refused(whole, content):
    with refused(CheckpointError, "model.safetensors", "damaged"):
        read(whole.spoilt(content))


def test_a_truncated_shard_is_named(folder):
    split_into_shards(folder)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with refused(CheckpointError, shard.name, "damaged or truncated"):
        onward.load(folder)


def test_a_file_larger_than_the_address_space_is_refused(folder, monkeypatch):
    """Sparse, it takes no room on the disk; mapping it is what fails."""

    def fails(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr("onward.checkpoint.shards.safe_open", fails)
    with refused(CheckpointError, "model.safetensors", "MemoryError"):
        onward.load(folder)


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("pad", range(8))
def test_tensors_at_any_offset_are_read_and_aligned(pad, folder):
    """A header of any length is legal, so tensors can be at any offset."""
    expected = onward.load(folder).logits([1, 2, 3])
    content = (folder / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header, data = content[8 : 8 + size].rstrip(b" "), content[8 + size :]
    raw_safetensors(folder / "model.safetensors", header + b" " * pad, data)
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in tensors_of(read(folder)))
    assert torch.equal(onward.load(folder).logits([1, 2, 3]), expected)


MEBIBYTE = 2**20
LARGE = CONFIG | {"vocab_size": 102_400, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 512}

MEASURE = """
import sys, torch
from pathlib import Path
import onward
from onward.checkpoint import read_weights, CheckpointFolder
from onward.models import read_config

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}
    return sizes["RssAnon:"], sizes["RssFile:"]

folder = Path(sys.argv[1])
onward.load("demo")  # libraries, thread pools
config = read_config(CheckpointFolder(folder).config)
anonymous, of_files = resident()
if sys.argv[2] == "read":
    kept = read_weights(folder, config, dtype=None, device=torch.device("cpu"))
    for weight in kept.embed_tokens.weight, kept.lm_head.weight:
        weight.view(torch.uint8).flatten()[::4096].sum()  # a byte of every page
else:
    kept = onward.load(folder)
print(resident()[0] - anonymous, resident()[1] - of_files)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """200 MB of embedding and head, zeros, which take no room on the disk."""
    folder = tmp_path_factory.mktemp("large")
    header, end = {}, 0
    for name, tensor in random_tensors(LARGE | {"vocab_size": 1}, torch.bfloat16).items():
        shape = [LARGE["vocab_size"], *tensor.shape[1:]] if tensor.shape[0] == 1 else list(tensor.shape)
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    write_json(folder / "config.json", LARGE)
    encoded = json.dumps(header).encode()
    raw_safetensors(folder / "model.safetensors", encoded + b" " * (-len(encoded) % 8), b"")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) + end)
    return folder, end


def measured(folder, how):
    command = [sys.executable, "-c", MEASURE, str(folder), how]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(number) for number in result.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_weights_are_mapped_pages_of_the_file(large):
    folder, size = large
    assert size > 200 * MEBIBYTE
    anonymous, of_files = measured(folder, "read")
    assert anonymous < 0.05 * size  # nothing was copied
    assert of_files > 0.9 * size  # and every page was read


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_a_loaded_model_has_one_copy_of_its_weights(large):
    folder, size = large
    anonymous, of_files = measured(folder, "load")
    assert anonymous + of_files < 1.2 * size
