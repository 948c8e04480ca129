"""Output appears completely or not at all, and a failure is one clear error."""

import errno
import os

import pytest

from onward.checkpoint.convert import convert
from onward.cli.main import run
from onward.errors import RequestError
from onward.language_model import quantize_folder
from onward.testing import random_checkpoint
from onward.util.files import appears


def everything(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def no_room(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def source(tmp_path):
    return random_checkpoint(tmp_path / "source")


WAYS = {
    "gguf": lambda source, to: convert(source, to.with_name("x.gguf"), "gguf"),
    "safetensors": lambda source, to: convert(source, to, "safetensors"),
    "quantized": lambda source, to: quantize_folder(source, to, "int8"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_full_disk_is_an_error_and_leaves_nothing(way, source, tmp_path, monkeypatch):
    before = everything(tmp_path)
    monkeypatch.setattr("os.fsync", no_room)
    with pytest.raises(RequestError, match=r"x.* cannot be written: No space left on device"):
        WAYS[way](source, tmp_path / "new" / "folders" / "x")
    assert everything(tmp_path) == before


@pytest.mark.parametrize("way", WAYS)
def test_a_file_in_place_of_a_folder_is_an_error(way, source, tmp_path):
    (tmp_path / "file").write_text("kept")
    before = everything(tmp_path)
    with pytest.raises(RequestError, match=r"cannot be written, because .*file is not a writable folder"):
        WAYS[way](source, tmp_path / "file" / "x")
    assert everything(tmp_path) == before
    assert (tmp_path / "file").read_text() == "kept"


def test_a_too_long_name_is_an_error(source, tmp_path):
    with pytest.raises(RequestError, match="File name too long"):
        convert(source, tmp_path / f"{'x' * 245}.gguf", "gguf")


def test_an_interrupt_leaves_only_previous_files(tmp_path):
    (tmp_path / "there").mkdir()

    def write() -> None:
        with appears(tmp_path / "there" / "new" / "x") as partial:
            partial.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert everything(tmp_path) == ["there"]


def test_folders_filled_by_others_meanwhile_stay(tmp_path):
    def write() -> None:
        with appears(tmp_path / "a" / "b" / "x") as partial:
            partial.mkdir()
            (tmp_path / "a" / "of others").write_text("kept")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert everything(tmp_path) == ["a", "a/of others"]


def test_a_link_to_an_empty_folder_stays_a_link(source, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    convert(source, tmp_path / "link", "safetensors")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "empty" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model", "must end with .gguf"),
        ("model.gguf.bin", "must end with .gguf"),
        ("model-00001-of-00002.gguf", "is the name of one of 2 parts"),
        ("model-00001-of-00000.gguf", "is the name of one of 0 parts"),
    ],
)
def test_file_names_that_cannot_be_loaded_as_gguf_are_refused(name, words, source, tmp_path):
    with pytest.raises(RequestError, match=words):
        convert(source, tmp_path / name, "gguf")
    assert everything(tmp_path) == ["source", "source/config.json", "source/model.safetensors"]


def test_a_full_disk_is_not_reported_for_standard_output(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.fsync", no_room)
    assert run(["convert", str(source), str(tmp_path / "x.gguf"), "--to", "gguf"]) == 2
    error = capsys.readouterr().err
    assert "x.gguf cannot be written" in error
    assert "standard output" not in error
