"""`onward prefix-cache`: the contents of a folder, and deleting them."""

import os
import re
import time
from pathlib import Path

import pytest
from command_line import Cli
from tests.prefix_store.texts import TEXT, opened, put, read_right


def test_info_has_a_line_for_each_model(cli: Cli, tmp_path: Path) -> None:
    put(opened(tmp_path, model="a model"), "root", TEXT, kinds=(0, 1))
    put(opened(tmp_path, key="other"), "root", TEXT[:8])
    put(opened(tmp_path, key="other"), "root", [5, 6, 7, 8])
    (tmp_path / "notes.txt").write_text("not ours")
    files = sorted(tmp_path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    for age, file in zip((86_400 * 3, 7200, 100), files, strict=True):
        os.utime(file, (time.time() - age,) * 2)
    result = cli("prefix-cache", "info", str(tmp_path))
    assert (result.code, result.err) == (0, "")
    first, second, total = result.out.splitlines()
    assert first.startswith("a model [")
    assert re.search(r"\]: 1 file, 24 tokens, 12\.5 kB, used (1[01]\d s|\d+ min) ago$", first)
    assert second.startswith("unnamed model [")
    assert "]: 2 files, 12 tokens, " in second
    assert second.endswith(", used 2 h to 3 days ago")
    assert total == f"total: 3 files, {sum(file.stat().st_size for file in files) / 1000:.3g} kB"


def test_clear_deletes_only_our_files(cli: Cli, tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, "root", TEXT)
    put(store, "root", [1, 2, 3, 4])
    old = tmp_path / store.find("root", [1, 2, 3, 4])[0][0].file
    os.utime(old, (time.time() - 2 * 86_400,) * 2)
    (tmp_path / "notes.txt").write_text("not ours")
    assert cli("prefix-cache", "clear", str(tmp_path), "--older-than", "1").out.startswith("deleted 1 file, ")
    assert not old.exists()
    assert read_right(store, "root", TEXT) == 6
    (last,) = tmp_path.glob("*.safetensors")
    os.utime(last, (time.time() + 3600,) * 2)  # in use, by the clock of another machine
    assert cli("prefix-cache", "clear", str(tmp_path)).out.startswith("deleted 1 file, ")
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    assert read_right(store, "root", TEXT) == 0
    assert cli("prefix-cache", "info", str(tmp_path)).out == "total: 0 files, 0 bytes\n"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["show", "."], "the action must be info or clear; got 'show'"),
        (["info", ".", "--older-than", "1"], "--older-than is an option of clear"),
        (["info", "absent"], "'absent' cannot be read: No such file or directory"),
        (["clear", "absent"], "'absent' cannot be read: No such file or directory"),
        (["info"], "missing argument"),
    ],
)
def test_bad_arguments_are_one_line(cli: Cli, arguments: list[str], error: str) -> None:
    result = cli("prefix-cache", *arguments)
    assert (result.code, result.out) == (2, "")
    assert error in result.err
