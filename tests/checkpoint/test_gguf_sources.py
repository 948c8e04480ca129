"""Sources of GGUF models: a file, a folder with one file, split files, the hub."""

import shutil

import pytest
from gguf_files import write_model

import onward
from onward.checkpoint import find_folder
from onward.checkpoint.gguf import parts_of
from onward.errors import CheckpointError, SourceError
from tiny_checkpoint import refused


def logits(source):
    return onward.load(source).logits([5, 6, 7]).tolist()


@pytest.fixture
def parts(tmp_path):
    """A model in three parts, and the same in one file."""
    folder = tmp_path / "parts"
    folder.mkdir()
    write_model(folder / "m.gguf", "qwen3", "Q8_0", split_after=10)
    write_model(tmp_path / "whole.gguf", "qwen3", "Q8_0")
    files = sorted(folder.glob("*.gguf"))
    assert [file.name for file in files] == parts_of(files[0].name)
    assert len(files) == 3
    return files


def test_split_files(parts, tmp_path):
    expected = logits(tmp_path / "whole.gguf")
    for source in (*parts, parts[0].parent, str(parts[1])):
        assert logits(source) == expected


def test_a_missing_part_is_named(parts):
    parts[2].unlink()
    with refused(CheckpointError, parts[2].name, "missing"):
        onward.load(parts[0])


def test_inconsistently_named_parts_are_refused(parts):
    shutil.copy(parts[1], parts[2])
    with refused(CheckpointError, parts[2].name, "part 1"):
        onward.load(parts[0])


def test_a_renamed_part_is_refused(parts, tmp_path):
    shutil.copy(parts[0], tmp_path / "first.gguf")
    with refused(CheckpointError, "first.gguf", "of 3"):
        onward.load(tmp_path / "first.gguf")


def test_a_folder_with_one_model(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    write_model(folder / "m.gguf", "qwen3", "Q8_0")
    assert find_folder(folder) == folder / "m.gguf"
    assert logits(folder) == logits(folder / "m.gguf")


def test_a_folder_with_several_models_names_them(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with refused(SourceError, "a.gguf, b.gguf", "give the path of one"):
        onward.load(tmp_path)


def test_config_json_takes_precedence_over_a_gguf_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert find_folder(tmp_path) == tmp_path


def test_other_files_are_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with refused(SourceError, "model.bin", "GGUF"):
        onward.load(tmp_path / "model.bin")
