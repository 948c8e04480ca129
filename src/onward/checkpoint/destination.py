"""Where a checkpoint is written: it appears whole or not at all."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onward.errors import RequestError


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
