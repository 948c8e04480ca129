"""Damaged or absurd GGUF files are refused with one clear error, before memory is allocated."""

import contextlib
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import write_model
from hypothesis import given
from hypothesis import strategies as st

import onward
from onward.checkpoint import GgufCheckpoint
from onward.checkpoint.gguf.reader import GgufFile
from onward.errors import CheckpointError, OnwardError, OnwardWarning
from onward.models import read_config
from tiny_checkpoint import refused


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, sizes: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def gguf(
    entries: list[bytes] = [],  # noqa: B006
    tensors: list[bytes] = [],  # noqa: B006
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A file byte by byte, legal or not."""
    announced = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, *announced) + b"".join(entries) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


def test_contents_of_a_file(tmp_path):
    entries = [
        entry("a", 4, struct.pack("<I", 7)),
        entry("b", 8, text("naïve")),
        entry("c", 9, struct.pack("<IQ", 6, 2) + struct.pack("<2f", 0.5, -1)),
        entry("d", 9, struct.pack("<IQ", 8, 2) + text("x") + text("")),
        entry("e", 7, b"\1"),
    ]
    values = np.arange(6, dtype=np.float32)
    (tmp_path / "m.gguf").write_bytes(gguf(entries, [tensor("w", (3, 2))], values.tobytes()))
    file = GgufFile(tmp_path / "m.gguf")
    assert file.metadata.pop("c").tolist() == [0.5, -1.0]
    assert file.metadata == {"a": 7, "b": "naïve", "d": ["x", ""], "e": True}
    stored = file.tensors["w"]
    assert stored.shape == (2, 3)
    assert stored.rows.numpy().tobytes() == values.tobytes()


HUGE = 2**60
CASES = {
    "nothing": (b"", "is not a GGUF file"),
    "another format": (b"PK\3\4" + b"\0" * 60, "is not a GGUF file"),
    "a header alone": (b"GGUF\3\0\0\0", "is not a GGUF file"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (gguf(version=1), "version 1"),
    "a version to come": (gguf(version=4), "version 4"),
    "2^60 entries": (gguf(counts=(0, HUGE)), f"{HUGE} metadata entries"),
    "2^60 tensors": (gguf(counts=(HUGE, 0)), f"{HUGE} tensors"),
    "a string of 2^60 bytes": (gguf([struct.pack("<Q", HUGE)], data=b"\0" * 64), "exceeds the file"),
    "2^60 numbers": (gguf([entry("a", 9, struct.pack("<IQ", 6, HUGE))]), f"{HUGE} numbers of 'a'"),
    "2^60 strings": (gguf([entry("a", 9, struct.pack("<IQ", 8, HUGE))]), f"{HUGE} strings of 'a'"),
    "arrays of arrays": (gguf([entry("a", 9, struct.pack("<IQ", 9, 1) * 50)]), "array of kind 9"),
    "an unknown kind": (gguf([entry("a", 77, b"")]), "kind 77"),
    "a name twice": (gguf([entry("a", 7, b"\1")] * 2), "'a' twice"),
    "no sizes": (gguf([], [tensor("w", ())]), "0 dimensions"),
    "many sizes": (gguf([], [tensor("w", (1,) * 9)]), "9 dimensions"),
    "a size of 0": (gguf([], [tensor("w", (0,))]), "not a whole number"),
    "half a block": (gguf([], [tensor("w", (48,), 8)], b"\0" * 64), "not a whole number of Q8_0"),
    "a tensor past the end": (gguf([], [tensor("w", (64,))], b"\0" * 64), "ends at byte"),
    "2^60 weights": (gguf([], [tensor("w", (HUGE, 8))]), "ends at byte"),
    "sizes whose product wraps": (gguf([], [tensor("w", (2**32, 2**32))]), "ends at byte"),
    "an offset of 2^60": (gguf([], [tensor("w", (8,), 0, HUGE)], b"\0" * 64), "ends at byte"),
    "an offset between": (gguf([], [tensor("w", (8,), 0, 4)], b"\0" * 64), "not a multiple of 32"),
    "an unknown type": (gguf([], [tensor("w", (8,), 99)]), "number 99"),
    "a type that is not read": (gguf([], [tensor("w", (256,), 16)]), "IQ2_XXS"),
    "a tensor twice": (gguf([], [tensor("w", (8,))] * 2, b"\0" * 64), "'w' appears twice"),
    "an alignment of 0": (gguf([entry("general.alignment", 4, struct.pack("<I", 0))]), "power of two"),
    "an alignment that is text": (gguf([entry("general.alignment", 8, text("32"))]), "power of two"),
}


@pytest.mark.parametrize("name", CASES)
def test_invalid_files_are_refused(tmp_path, name):
    content, reason = CASES[name]
    (tmp_path / "m.gguf").write_bytes(content)
    with refused(CheckpointError, reason, "m.gguf"):
        GgufFile(tmp_path / "m.gguf")


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> bytes:
    """A whole small model with a tokenizer, of a few kilobytes before its weights."""
    file = tmp_path_factory.mktemp("fuzz") / "m.gguf"

    def vocabulary(writer) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(["a", "b", "ab", "<end>"])
        writer.add_token_types([1, 1, 1, 3])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(3)
        writer.add_chat_template("{{ messages[0].content }}")

    shape = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "vocab_size": 8, "num_hidden_layers": 1}
    write_model(file, "llama", "Q8_0", metadata=vocabulary, **shape)
    return file.read_bytes()


def load_or_refuse(folder: Path, content: bytes) -> None:
    """Nothing but an error of Onward's may come of any bytes."""
    file = folder / "m.gguf"
    file.unlink(missing_ok=True)  # a file that is mapped keeps its bytes
    file.write_bytes(content)
    with contextlib.suppress(OnwardError):
        assert onward.load(file).logits([1, 2]).shape == (2, 8)


@given(data=st.data())
def test_any_bytes_in_the_metadata(small, tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    spoilt = bytearray(small)
    end = small.rindex(b"output.weight") + 40  # past it lie the weights
    for _ in range(data.draw(st.integers(1, 4))):
        spoilt[data.draw(st.integers(0, end))] = data.draw(st.integers(0, 255))
    load_or_refuse(folder, bytes(spoilt))


@given(data=st.data())
def test_any_value_of_any_kind(small, tmp_path_factory, data):
    """Metadata that a file may say, each replaced by a value of another kind or size."""
    file = tmp_path_factory.getbasetemp() / "kinds.gguf"
    if not file.exists():
        file.write_bytes(small)
    checkpoint = GgufCheckpoint(file)
    metadata = checkpoint.files[0].metadata
    keys = [*metadata, "split.count", "split.no", "llama.rope.scaling.type", "llama.rope.scaling.factor"]
    keys += [
        "llama.attention.value_length",
        "tokenizer.ggml.scores",
        "tokenizer.ggml.add_bos_token",
        "general.sampling.temp",
    ]
    arrays = st.lists(st.integers(-3, 9), max_size=4).map(lambda numbers: np.array(numbers, np.int32))
    floats = st.floats() | st.lists(st.floats(width=32), max_size=4).map(lambda numbers: np.array(numbers, np.float32))
    values = st.integers(-(2**63), 2**64) | floats | st.booleans() | st.text(max_size=4) | arrays
    for _ in range(data.draw(st.integers(1, 3))):
        metadata[data.draw(st.sampled_from(keys))] = data.draw(values | st.lists(st.text(max_size=3), max_size=4))
    with warnings.catch_warnings(), contextlib.suppress(OnwardError):
        warnings.simplefilter("ignore", OnwardWarning)  # ids past the vocabulary are ignored
        _ = checkpoint.tokenizer, checkpoint.chat_template, checkpoint.eos, checkpoint.generation_config
        config = read_config(checkpoint.config)
        checkpoint.read_weights(config, dtype=None, device=torch.device("meta"))


@given(at=st.integers(0, 6000))
def test_any_truncation(small, tmp_path_factory, at):
    folder = tmp_path_factory.getbasetemp()
    (folder / "m.gguf").unlink(missing_ok=True)
    (folder / "m.gguf").write_bytes(small[: min(at, len(small) - 1)])
    with pytest.raises(OnwardError):
        onward.load(folder / "m.gguf")


@given(content=st.binary(max_size=400))
def test_any_bytes_after_the_magic(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp()
    (folder / "m.gguf").unlink(missing_ok=True)
    (folder / "m.gguf").write_bytes(b"GGUF\3\0\0\0" + content)
    with pytest.raises(OnwardError):
        onward.load(folder / "m.gguf")


def test_files_are_read_as_by_the_gguf_package(small, tmp_path):
    import gguf as package

    (tmp_path / "m.gguf").write_bytes(small)
    ours, theirs = GgufFile(tmp_path / "m.gguf"), package.GGUFReader(tmp_path / "m.gguf")
    expected = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert {k: v.tolist() if hasattr(v, "tolist") else v for k, v in ours.metadata.items()} == expected
    for tensor in theirs.tensors:
        stored = ours.tensors[tensor.name]
        assert stored.shape == tuple(tensor.shape.tolist()[::-1])
        assert stored.rows.numpy().tobytes() == tensor.data.tobytes()
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    assert GgufCheckpoint(tmp_path / "m.gguf").chat_template is not None
