"""Atomic writing of files and checkpoint folders."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onward.errors import RequestError


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically and durably, readable only by the owner. The target of a symbolic link is replaced.

    write: called with the path of a temporary file. Raises `OSError` or `ValueError` if it cannot be written.
    """
    file = file.resolve()
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # the new name too, if the system can; the content is on the disk already
        flush(file.parent)


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, from the system's cache to the disk. Raises `OSError`."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_destination(destination: Path, *, is_file: bool = False) -> None:
    """Raise `RequestError` unless `destination` is writable and absent, or an empty folder if not `is_file`."""
    is_free = destination.is_dir() and not is_file and not any(destination.iterdir())
    if not is_free and (destination.exists() or destination.is_symlink()):
        what = "a file that is absent" if is_file else "a folder that is absent or empty"
        raise RequestError(f"{destination} already exists: give {what}")
    parent = next(place for place in destination.absolute().parents if place.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise RequestError(f"{destination} cannot be written, because {parent} is not a writable folder: give another")


@contextmanager
def appears(destination: Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to the destination on success; on failure it is deleted, with the folders
    created for it. A symbolic link to an empty folder stands for that folder. Raises `RequestError` for a full disk."""
    path = destination.resolve()
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    created = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.rename(path)
    except OSError as error:
        raise RequestError(f"{destination} cannot be written: {error.strerror or error}") from error
    finally:
        # After the rename nothing is there, and the folders are not empty.
        with suppress(OSError):
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        for folder in created:
            with suppress(OSError):
                folder.rmdir()
