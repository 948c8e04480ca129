"""Files that clients upload, and those with the results of their batches: a private folder, with limits.

Each file has its content and a JSON file with its metadata, which is written last and removed first: a file without
metadata is a rest of an upload that was cut off. All metadata is in memory, about 1 KB per file. Any thread may call.
"""

import fcntl
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from onward.errors import RequestError
from onward.protocols import BodyError
from onward.server.log import log
from onward.util.files import write_whole
from onward.util.text import in_bytes

# The largest share of one API key, the bytes that a file takes besides its content, and the number of files.
_OWNER_SHARE, _ENTRY, _MAX_FILES = 0.5, 4096, 10_000
_LOCK, _UNFINISHED, _METADATA = "onward-files.lock", ".upload-", ".json"
_FILE = re.compile(r"file-[0-9a-f]{24}(\.json)?")

Record = TypeVar("Record", bound=BaseModel)


class FileObject(BaseModel):
    """A file, with its length in bytes. Times are in seconds since 1970."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class StoredFile(FileObject):
    """owner: the client that made it; "" if the server has no API keys. hidden: it was deleted while a batch reads it,
    and is removed afterwards."""

    owner: str
    hidden: bool = False


class FileStore:
    """The files of a server.

    folder: where they are; None: a temporary folder, removed by `close`. max_bytes: of all files.
    """

    def __init__(self, folder: Path | None, max_bytes: int) -> None:
        self._persistent, self._max_bytes = folder, max_bytes
        self._folder: Path | None = None
        self._files: dict[str, StoredFile] = {}  # the oldest first
        self._used: Counter[str] = Counter()  # bytes, by owner
        self._pins: Counter[str] = Counter()  # batches that read a file
        self._changing = threading.RLock()

    @property
    def folder(self) -> Path:
        assert self._folder is not None, "it is open"
        return self._folder

    @property
    def is_open(self) -> bool:
        return self._folder is not None

    @property
    def used(self) -> int:
        """Bytes."""
        with self._changing:
            return self._used.total()

    def open(self) -> None:
        """Create the folder, or load the files in it. Raises `RequestError`: it cannot be used."""
        if self.is_open:
            return
        try:
            if self._persistent is None:
                self._folder = Path(tempfile.mkdtemp(prefix="onward-files-"))
                return
            self._persistent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(self._persistent.iterdir()) and not (self._persistent / _LOCK).exists():
                message = f"the folder {str(self._persistent)!r} has other files: choose an empty or a new one"
                raise RequestError(message)
            self._persistent.chmod(0o700)
            self._lock = (self._persistent / _LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._folder = self._persistent
            self._load()
        except BlockingIOError:
            self._lock.close()
            message = f"another server uses the files in {str(self._persistent)!r}: choose another folder"
            raise RequestError(message) from None
        except OSError as error:
            message = f"files cannot be stored in {str(self._persistent)!r}: {error.strerror or error}"
            raise RequestError(message) from error

    def close(self) -> None:
        """Remove the temporary folder, or release the other one for another server."""
        if self._folder is None:
            return
        if self._persistent is None:
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            self._lock.close()
        self._folder = None

    def _load(self) -> None:
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            path.unlink()
        files = sorted(self.records("file-", StoredFile), key=lambda file: file.created_at)
        self._files = {file.id: file for file in files if self.path(file.id).is_file()}
        for file in self._files.values():
            self._used[file.owner] += file.bytes + _ENTRY
        for path in self.folder.glob("file-*"):
            if _FILE.fullmatch(path.name) and path.name.removesuffix(_METADATA) not in self._files:
                path.unlink()

    def records(self, prefix: str, kind: type[Record]) -> list[Record]:
        """The records in the folder whose ids start with a prefix. Invalid ones are logged and left alone."""
        found: list[Record] = []
        for path in sorted(self.folder.glob(f"{prefix}*{_METADATA}")):
            try:
                found.append(kind.model_validate_json(path.read_bytes()))
            except (ValidationError, OSError) as error:
                log("unreadable record", file=path.name, reason=type(error).__name__)
        return found

    def save(self, record: Any) -> None:
        """Write a record with an `id` to the folder. Raises `BodyError`: the disk is full."""
        content = record.model_dump_json().encode()
        try:
            write_whole(self.folder / f"{record.id}{_METADATA}", lambda path: path.write_bytes(content))
        except OSError as error:
            raise _disk_error(error) from error

    def forget(self, id: str) -> None:
        """Remove a record."""
        (self.folder / f"{id}{_METADATA}").unlink(missing_ok=True)

    def path(self, id: str) -> Path:
        """The content of a file."""
        return self.folder / id

    def find(self, owner: str, id: str, param: str | None = None) -> StoredFile:
        """Raises `BodyError`: the client has no such file."""
        file = self._files.get(id)
        if file is None or file.hidden or file.owner != owner or _has_expired(file, time.time()):
            raise BodyError(f"no file {id[:64]!r}", param, "file_not_found", 404)
        return file

    def listed(self, owner: str) -> list[StoredFile]:
        """All files of a client, the oldest first."""
        now = time.time()
        with self._changing:
            files = [file for file in self._files.values() if file.owner == owner]
        return [file for file in files if not file.hidden and not _has_expired(file, now)]

    def delete(self, owner: str, id: str) -> None:
        """Delete a file. A batch that reads it can finish. Raises `BodyError`: the client has no such file."""
        with self._changing:
            self._remove(self.find(owner, id))

    def expire(self) -> None:
        """Remove the files whose time is over."""
        now = time.time()
        with self._changing:
            for file in [file for file in self._files.values() if _has_expired(file, now)]:
                self._remove(file)

    def pin(self, id: str) -> None:
        """Keep a file's content, even if it is deleted, until `unpin`."""
        with self._changing:
            self._pins[id] += 1

    def unpin(self, id: str) -> None:
        with self._changing:
            self._pins[id] -= 1
            if id in self._files and self._files[id].hidden:
                self._remove(self._files[id])

    def _remove(self, file: StoredFile) -> None:
        if self._pins[file.id] > 0:
            if not file.hidden:
                file.hidden = True
                self.save(file)
            return
        self.forget(file.id)
        self.path(file.id).unlink(missing_ok=True)
        del self._files[file.id]
        self._used[file.owner] -= file.bytes + _ENTRY

    def remove_hidden(self) -> None:
        """Remove the deleted files that no batch reads."""
        with self._changing:
            for file in [file for file in self._files.values() if file.hidden]:
                self._remove(file)

    def reserve(self, owner: str, nbytes: int, *, unlimited: bool = False) -> None:
        """Count bytes of a client; less if negative. Raises `BodyError`: they are more than it may store."""
        with self._changing:
            if nbytes > 0 and not unlimited:
                self._check_space(owner, nbytes)
            self._used[owner] += nbytes

    def check_space(self, owner: str, nbytes: int) -> None:
        """Raises `BodyError`: there is no space for so many bytes."""
        with self._changing:
            self._check_space(owner, nbytes)

    def _check_space(self, owner: str, nbytes: int) -> None:
        own = int(self._max_bytes * _OWNER_SHARE) if owner else self._max_bytes
        left = min(self._max_bytes - self._used.total(), own - self._used[owner])
        if nbytes > left:
            whose = "of this API key" if owner else "of this server"
            message = f"the files {whose} may take {in_bytes(own)}, and {in_bytes(max(0, left))} are left"
            raise BodyError(f"{message}: delete files", "file", "files_space", 413)
        if len(self._files) >= _MAX_FILES:
            raise BodyError(f"this server stores at most {_MAX_FILES:,} files: delete files", None, "files_space", 413)

    def create(self, owner: str, *, unlimited: bool = False) -> "NewFile":
        """Begin a file. unlimited: without regard to the space. Raises `BodyError`: there is no space for it."""
        return NewFile(self, owner, unlimited)

    def add(self, file: StoredFile, content: Path) -> None:
        """Add a complete file. content: is moved into the folder. Its space has been reserved."""
        with self._changing:
            os.replace(content, self.path(file.id))
            try:
                self.save(file)
            except BodyError:
                self.path(file.id).unlink()
                raise
            if (old := self._files.pop(file.id, None)) is not None:
                self._used[old.owner] -= old.bytes + _ENTRY
            self._files[file.id] = file


class NewFile:
    """A file that is being written. Commit or discard it."""

    def __init__(self, store: FileStore, owner: str, unlimited: bool) -> None:
        self._store, self._owner, self._unlimited = store, owner, unlimited
        self.nbytes = 0
        self._path = store.folder / f"{_UNFINISHED}{secrets.token_hex(12)}"
        store.reserve(owner, _ENTRY, unlimited=unlimited)
        try:
            self._content: IO[bytes] | None = open(self._path, "xb", opener=_private)  # noqa: SIM115
        except OSError as error:
            store.reserve(owner, -_ENTRY)
            raise _disk_error(error) from error

    def write(self, content: bytes) -> None:
        """Raises `BodyError`: there is no space for it."""
        assert self._content is not None
        self._store.reserve(self._owner, len(content), unlimited=self._unlimited)
        self.nbytes += len(content)
        try:
            self._content.write(content)
        except OSError as error:
            raise _disk_error(error) from error

    def commit(
        self, filename: str, purpose: Literal["batch", "batch_output"], seconds: int, id: str | None = None
    ) -> StoredFile:
        """Add it to the store. seconds: until it expires. id: a new one by default. Raises `BodyError`: the disk is
        full."""
        assert self._content is not None
        now = int(time.time())
        file = StoredFile(
            id=new_id("file-") if id is None else id,
            bytes=self.nbytes,
            created_at=now,
            filename=filename,
            purpose=purpose,
            expires_at=now + seconds,
            owner=self._owner,
        )
        try:
            self._content.flush()
            os.fsync(self._content.fileno())
            self._content.close()
            os.utime(self._path, (now, now))  # results of batches depend on it
            self._store.add(file, self._path)
        except OSError as error:
            raise _disk_error(error) from error
        self._content = None
        return file

    def discard(self) -> None:
        """Remove it, unless it was committed."""
        if self._content is not None:
            with suppress(OSError):
                self._content.close()
            self._content = None
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._store.reserve(self._owner, -self.nbytes - _ENTRY)


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _has_expired(file: StoredFile, now: float) -> bool:
    return file.expires_at is not None and file.expires_at <= now


def _disk_error(error: OSError) -> BodyError:
    return BodyError(f"the file cannot be stored: {error.strerror or error}", code="disk_error", status=503)
