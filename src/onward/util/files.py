"""Write a file or a checkpoint folder whole or not at all."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onward.errors import RequestError


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file beside `file`, and rename it to `file` once it is complete and on the disk.

    `write` is called with the temporary file's path and fills it. If this is interrupted, `file` has either its old
    content or all of the new. The owner alone can read the new file. A symbolic link stays one: what it points to is
    replaced.

    Raises:
        OSError, ValueError: the file cannot be written, or cannot be a file's name.
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
    _sync_folder(file.parent)


def _sync_folder(folder: Path) -> None:
    """Flush the new name to the disk too, where the system can; the content is there already."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def check_destination(destination: Path, *, is_file: bool = False) -> None:
    """Raise unless `destination` can be written, and is absent or, where it is to be a folder, empty."""
    is_free = destination.is_dir() and not is_file and not any(destination.iterdir())
    if not is_free and (destination.exists() or destination.is_symlink()):
        what = "a file that is absent" if is_file else "a folder that is absent or empty"
        raise RequestError(f"{destination} is there already: give {what}")
    parent = next(place for place in destination.absolute().parents if place.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise RequestError(f"{destination} cannot be written, for {parent} is no folder that takes files: give another")


@contextmanager
def appears(destination: Path) -> Iterator[Path]:
    """A path beside the destination that takes its place when the block ends well; else folders made for it go away
    again. A symbolic link to an empty folder is that folder. Raises `RequestError` if the disk is full."""
    place = destination.resolve()
    partial = place.with_name(f".{place.name}.partial-{secrets.token_hex(4)}")
    made = [folder for folder in place.parents if not folder.exists()]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.rename(place)
    except OSError as error:
        raise RequestError(f"{destination} cannot be written: {error.strerror or error}") from error
    finally:
        # After a rename nothing is there, and the folders are not empty.
        with suppress(OSError):
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
