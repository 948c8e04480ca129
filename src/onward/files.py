"""Write a file whole or not at all."""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


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
