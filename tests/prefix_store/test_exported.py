"""A prefix in a separate file: complete or refused."""

import os
import stat
from pathlib import Path

import pytest

from onward.prefix_store import Part
from onward.prefix_store.exported import load_prefix, read_prefix, save_prefix

IDS = list(range(10))  # two blocks of 4, and half of one
DATA = [os.urandom(5000), os.urandom(5000), os.urandom(2500), b"state"]
PARTS = [Part(at, 0, [memoryview(data)]) for at, data in enumerate(DATA[:3])] + [Part(2, 1, [memoryview(DATA[3])])]


def save(file: Path) -> None:
    save_prefix(file, key="key", root="root", ids=IDS, parts=PARTS, metadata={"notes": '{"a": "ü"}'}, block=4)


def test_saved_equals_loaded(tmp_path: Path) -> None:
    save(tmp_path / "text.safetensors")
    assert stat.S_IMODE((tmp_path / "text.safetensors").stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to("text.safetensors")
    segment = load_prefix(tmp_path / "link")
    assert (segment.key, segment.root, segment.block) == ("key", "root", 4)
    assert (segment.tokens, segment.metadata) == (IDS, {"notes": '{"a": "ü"}'})
    assert [(entry.block, entry.kind) for entry in segment.entries] == [(0, 0), (1, 0), (2, 0), (2, 1)]
    targets = [bytearray(len(data)) for data in DATA]
    requests = [(entry.part, [memoryview(target)]) for entry, target in zip(segment.entries, targets, strict=True)]
    assert read_prefix(tmp_path / "link", requests)
    assert [bytes(target) for target in targets] == DATA


@pytest.mark.parametrize("at", [3, 20, 200, 4100, -1])
def test_a_flipped_byte_is_refused(tmp_path: Path, at: int) -> None:
    file = tmp_path / "text.safetensors"
    save(file)
    content = bytearray(file.read_bytes())
    content[at] ^= 4
    file.write_bytes(content)
    try:
        segment = load_prefix(file)
    except ValueError:
        return
    requests = [(entry.part, [memoryview(bytearray(entry.part.nbytes))]) for entry in segment.entries]
    assert not read_prefix(file, requests)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a segment"),
        (b"GGUF" + bytes(100), "not a segment"),
        (b'\x12\0\0\0\0\0\0\0{"__metadata__":{}}', "not a segment"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        load_prefix(tmp_path / "file")


def test_another_version_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "file")
    content = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(content.replace(b'"onward_prefix":"1"', b'"onward_prefix":"2"'))
    with pytest.raises(ValueError, match="its format is 2, and this Onward reads 1"):
        load_prefix(tmp_path / "file")
