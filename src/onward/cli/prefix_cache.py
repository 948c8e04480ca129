"""`onward prefix-cache`: show or delete what the prefix cache has in a folder."""

from pathlib import Path
from typing import Annotated

import typer

from onward.cli.flags import flag
from onward.cli.inputs import expanded
from onward.errors import RequestError, one_line
from onward.util.options import OUTPUT
from onward.util.text import in_bytes


def prefix_cache(
    action: Annotated[str, typer.Argument(metavar="ACTION", help="info or clear.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of --prefix-cache-dir.")],
    *,
    older_than: float | None = flag("Delete only files that were not used for X days.", group=OUTPUT, low=0),
) -> None:
    """Show or delete the prefixes that a folder has on disk.

    info prints a line for each model (its weights, format and build): files,
    tokens, bytes, and when they were last used. clear deletes them, also while
    other processes use the folder. Other files are left alone.
    """
    if action not in ("info", "clear"):
        raise RequestError(f"the action must be info or clear; got {action!r}")
    if older_than is not None and action != "clear":
        raise RequestError("--older-than is an option of clear")
    from onward.prefix_store.folder import clear, contents

    path = expanded(folder)
    try:
        if action == "clear":
            count, nbytes = clear(str(path), None if older_than is None else older_than * 86_400)
            typer.echo(f"deleted {_files(count)}, {in_bytes(nbytes)}")
            return
        groups = contents(str(path))
    except OSError as error:
        raise RequestError(f"{str(folder)!r} cannot be read: {error.strerror or one_line(error)}") from error
    for group in groups:
        ages = _age(group.newest) if group.files == 1 else f"{_age(group.newest)} to {_age(group.oldest)}"
        typer.echo(
            f"{group.model or 'unnamed model'} [{group.key}]: {_files(group.files)}, {group.tokens:,} tokens, "
            f"{in_bytes(group.nbytes)}, used {ages} ago"
        )
    total = sum(group.nbytes for group in groups)
    typer.echo(f"total: {_files(sum(group.files for group in groups))}, {in_bytes(total)}")


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count:,} files"


def _age(seconds: float) -> str:
    """A time such as '3 min'."""
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
