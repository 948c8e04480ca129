"""Files that are there whole or not at all."""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a neighbour of `file`, which takes the file's place once it is complete and on the disk.

    Whenever this is interrupted, `file` is what it was or what it was to become. It is then readable by its owner
    alone. A link stays a link.

    Raises:
        OSError, ValueError: the file cannot be written, or cannot be a file's name.
    """
    file = file.resolve()
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    os.close(handle)
    neighbour = Path(name)
    try:
        write(neighbour)
        with neighbour.open("rb+") as written:
            os.fsync(written.fileno())
        os.replace(neighbour, file)
    except BaseException:
        neighbour.unlink(missing_ok=True)
        raise
    _sync_folder(file.parent)


def _sync_folder(folder: Path) -> None:
    """Put the new name on the disk too, where the system can: what it names is there already."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
