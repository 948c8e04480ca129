"""Damage is a miss: never an error, never wrong bytes. If a disk cannot be written, there is one warning."""

import errno
import hashlib
import json
import os
import random
import shutil
import warnings
from pathlib import Path

import pytest
from tests.prefix_store.texts import TEXT, opened, parts, put, read_right

from onward.errors import OnwardWarning
from onward.prefix_store import PrefixStore
from onward.prefix_store.file_system import FileSystem
from onward.prefix_store.segment import key_of


def the_file(folder: Path) -> Path:
    (file,) = (file for file in folder.iterdir() if key_of(file.name))
    return file


def test_any_flipped_byte_is_a_miss(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    put(store, "root", TEXT, kinds=(0, 1))
    store.close()
    file, rng = the_file(tmp_path / "store"), random.Random(0)
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(8), *range(8, header, 61), *range(header, header + 4 * len(TEXT)), *range(4096, len(whole), 127)]
    fewer = 0
    for at in places:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        store = opened(tmp_path / "store")
        right = read_right(store, "root", TEXT)  # asserts that what is read is right
        store.close()
        in_parts = at >= header + 4 * len(TEXT)
        assert right < 6 if in_parts or at < 8 else right in (0, 6), at  # 6: a space of the header
        fewer += right < 6
        assert file.exists() == (right in (0, 6) and not in_parts), "a file with damaged parts is deleted"
    assert fewer > 0.8 * len(places)


@pytest.mark.parametrize("part", [0, 1, 7, 8, 100, 4095, 4096, 5000, -1])
def test_a_truncated_file_is_a_miss(tmp_path: Path, part: int) -> None:
    store = opened(tmp_path)
    put(store, "root", TEXT)
    file = the_file(tmp_path)
    file.write_bytes(file.read_bytes()[:part])
    assert read_right(store, "root", TEXT) < 6  # by a store that knew the whole file
    again = opened(tmp_path)
    assert read_right(again, "root", TEXT) < 6


def test_damaged_files_are_replaced_by_the_next_put(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, "root", TEXT)
    file = the_file(tmp_path)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert read_right(store, "root", TEXT) == 5
    store.flush()
    assert (store.find("root", TEXT), store.stats().damaged) == ([], 1)
    put(store, "root", TEXT)
    assert read_right(store, "root", TEXT) == 6


def test_other_files_are_ignored_and_left_alone(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=64_000)
    put(store, "root", TEXT)
    file = the_file(tmp_path)
    whole = file.read_bytes()
    name = file.name
    file.unlink()
    names = [f"{name[:-20]}{number:08x}.safetensors" for number in range(12)]
    header = int.from_bytes(whole[:8], "little")
    json_ = whole[8 : 8 + header].rstrip()

    def with_header(content: bytes, length: int | None = None) -> bytes:
        return (len(content) if length is None else length).to_bytes(8, "little") + content + whole[8 + header :]

    contents = [
        with_header(json_.replace(b'"onward_prefix":"1"', b'"onward_prefix":"2"')),  # a later version
        with_header(json_.replace(b'"root":"root"', b'"root":"r00t"')),
        with_header(b"[" * 100_000),
        with_header(b"{}"),
        with_header(b'{"__metadata__":[]}'),
        with_header(b'{"__metadata__":{"onward_prefix":"1"},"tokens":{"data_offsets":[0,1e99]}}'),
        with_header(json_, 2**63),
        with_header(b"\xff" * 100),
    ]
    for each, content in zip(names, contents, strict=False):
        (tmp_path / each).write_bytes(content)
        (tmp_path / each).chmod(0o600)
    (tmp_path / names[8]).mkdir()
    os.mkfifo(tmp_path / names[9], 0o600)
    (tmp_path / "elsewhere").write_bytes(whole)
    (tmp_path / names[10]).symlink_to(tmp_path / "elsewhere")
    (tmp_path / names[11]).write_bytes(whole)
    (tmp_path / names[11]).chmod(0o666)  # anybody may have written it
    foreign = [tmp_path / "notes.txt", tmp_path / f"{name}.bak", tmp_path / f"x{name}"]
    for each in foreign:
        each.write_bytes(bytes(20_000))
    again = opened(tmp_path, max_bytes=64_000)
    assert again.find("root", TEXT) == []
    put(again, "root", TEXT)
    assert read_right(again, "root", TEXT) == 6
    assert all(each.exists() for each in [*foreign, *(tmp_path / each for each in names[8:])])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"root":"root"', '"root":["root"]'),
        ('"root":"root"', '"root":"\\ud800"'),
        ('"block":"4"', '"block":"999999999999999999999999"'),
        ('[96,796]', '[96.5,796.5]'),
        ('[96,796]', '[96,100000000000000000000]'),
        ('[96,796]', '[796,96]'),
        ('"0.0"', '"0.-1"'),
        ('"0.5"', '"0.500"'),
        ('"part_checksums":"', '"part_checksums":"x '),
        ('"part_checksums":"', '"part_checksums":"x'),
    ],
)  # fmt: skip
def test_headers_with_a_forged_digest_raise_nothing(tmp_path: Path, old: str, new: str) -> None:
    store = opened(tmp_path)
    put(store, "root", TEXT)
    store.close()
    whole = the_file(tmp_path).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    text = whole[8:header].decode()
    assert old in text
    tensors = json.loads(text.replace(old, new))
    fields, ids = tensors.pop("__metadata__"), whole[header : header + 4 * len(TEXT)]
    del fields["digest"]
    digest = hashlib.sha256(json.dumps([fields, list(tensors.items())], sort_keys=True).encode() + ids).hexdigest()
    content = json.dumps({"__metadata__": {**fields, "digest": digest}, **tensors}).encode()
    the_file(tmp_path).write_bytes(len(content).to_bytes(8, "little") + content + whole[header:])
    again = opened(tmp_path)
    found = again.find("root", TEXT)
    for block in found:
        again.read([(part, [memoryview(bytearray(700))]) for part in block.values()])
    put(again, "root", TEXT)
    assert read_right(again, "root", TEXT) == 6


class Failing(FileSystem):
    """A disk on which one call fails."""

    def __init__(self, call: str, number: int) -> None:
        self.calls = 0

        def fail(*_: object) -> None:
            self.calls += 1
            raise OSError(number, os.strerror(number))

        setattr(self, call, fail)


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("write", errno.ENOSPC), ("sync", errno.ENOSPC), ("create", errno.EROFS), ("make_folder", errno.EACCES),
        ("rename", errno.ENOENT), ("sync_folder", errno.EIO), ("set_modified", errno.EROFS),
    ],
)  # fmt: skip
def test_an_unwritable_disk_means_one_warning(tmp_path: Path, call: str, number: int) -> None:
    put(opened(tmp_path / "store"), "root", TEXT[:8])
    system = Failing(call, number)
    accepted: list[bool] = []

    def use() -> PrefixStore:
        store = opened(tmp_path / "store", system=system)
        for _ in range(3):
            accepted.append(store.put("root", TEXT, parts("root", TEXT, range(6))))
            assert store.flush(30)
        return store

    with pytest.warns(OnwardWarning, match="new prefixes stay in memory only") as caught:
        store = use()
    assert len(caught) == 1
    assert os.strerror(number) in str(caught[0].message)
    assert accepted == [call != "make_folder", False, False]
    assert read_right(store, "root", TEXT) >= 2, "what is there is still read"
    assert not [file for file in (tmp_path / "store").iterdir() if file.suffix == ".partial"]


def test_writing_resumes_when_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.prefix_store.writer._RETRY_SECONDS", 0.0)
    system = Failing("write", errno.ENOSPC)
    store = opened(tmp_path, system=system)
    with pytest.warns(OnwardWarning):
        put(store, "root", TEXT)
    put(store, "root", TEXT)  # without another warning
    del system.write
    put(store, "root", TEXT)
    assert read_right(store, "root", TEXT) == 6


def test_warnings_that_are_errors_do_not_end_the_thread(tmp_path: Path) -> None:
    store = opened(tmp_path, system=Failing("write", errno.ENOSPC))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        put(store, "root", TEXT)
    assert not store.put("root", TEXT, parts("root", TEXT, range(6)))


def test_a_folder_that_vanishes_means_one_warning(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    put(store, "root", TEXT[:8])
    found = store.find("root", TEXT)
    shutil.rmtree(tmp_path / "store")
    assert store.read([(found[0][0], [memoryview(bytearray(700))])]) == 0
    with pytest.warns(OnwardWarning) as caught:
        put(store, "root", TEXT)
    assert len(caught) == 1
    assert not store.put("root", TEXT, parts("root", TEXT, range(6)))
    assert store.flush(30)
    assert store.find("root", TEXT) == []


def test_a_file_in_place_of_the_folder_means_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.warns(OnwardWarning) as caught:
        store = opened(tmp_path / "file")
    assert len(caught) == 1
    assert not store.put("root", TEXT, parts("root", TEXT, range(6)))
    assert store.flush(30)
    assert store.find("root", TEXT) == []
    assert (tmp_path / "file").read_text() == "text"
