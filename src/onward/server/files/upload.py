"""An upload: the parts of its multipart/form-data body (RFC 7578), its fields, and the file that it writes.

The reader holds one part's headers, or the end of its content that may be the start of a boundary: never a part.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.message import Message
from typing import Any

from onward.protocols import BodyError
from onward.protocols.body import Body, Validation, validated
from onward.server.client import too_large
from onward.server.files.records import MAX_SECONDS, MIN_SECONDS, ExpiresAfter
from onward.server.files.store import FileStore, NewFile, StoredFile
from onward.server.settings import Settings
from onward.util.text import brief

# Bytes of a boundary (RFC 2046, 5.1.1) and of the headers of a part; parts of a body.
_MAX_BOUNDARY, _MAX_HEAD, _MAX_PARTS = 70, 8192, 16
_LINE_BREAK, _END_OF_HEAD = b"\r\n", b"\r\n\r\n"
_ENCODINGS = ("", "7bit", "8bit", "binary")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")


@dataclass(frozen=True)
class Part:
    """The start of a part. filename: None for a field."""

    name: str
    filename: str | None


class MultipartReader:
    """Reads the parts of one body. content_type: the header of the request. Raises `BodyError`: it has no valid
    boundary."""

    def __init__(self, content_type: str) -> None:
        message = Message()
        message["content-type"] = content_type
        boundary = message.get_boundary("")
        if message.get_content_type() != "multipart/form-data":
            media_type = content_type.partition(";")[0].strip() or "none"
            text = f"the body must be a form with a file, with Content-Type multipart/form-data; got {media_type!r}"
            raise BodyError(text, code="unsupported_media_type", status=415)
        if not boundary or len(boundary) > _MAX_BOUNDARY or not boundary.isascii() or not boundary.isprintable():
            raise _invalid(f"the Content-Type has no boundary of 1 to {_MAX_BOUNDARY} characters")
        self._delimiter = f"\r\n--{boundary}".encode()
        self._buffer = bytearray(_LINE_BREAK)  # before the first delimiter, where the line break is left out
        self._parts = 0
        self._state: Callable[[], Part | bytes | None] = self._start
        self.is_complete = False

    def feed(self, data: bytes) -> Iterator[Part | bytes]:
        """Yield the start of each part, and then its content in pieces. Raises `BodyError`: the body is invalid, or has
        too many or too large parts."""
        self._buffer += data
        while not self.is_complete:
            before, state = len(self._buffer), self._state
            event = state()
            if event is not None:
                yield event
            elif len(self._buffer) == before and self._state == state:
                return  # it needs more data

    def finish(self) -> None:
        """Raise `BodyError` unless the body has ended with its last boundary."""
        if not self.is_complete:
            raise _invalid("it ends before its last boundary")

    def _start(self) -> Part | bytes | None:
        """Before the first boundary."""
        if not self._delimiter.startswith(self._buffer[: len(self._delimiter)]):
            raise _invalid("it does not start with its boundary")
        if len(self._buffer) >= len(self._delimiter):
            del self._buffer[: len(self._delimiter)]
            self._state = self._head
        return None

    def _head(self) -> Part | None:
        """After a boundary: the end, or a line break and the headers of a part."""
        follows = bytes(self._buffer[:2])
        if follows == b"--":
            self.is_complete = True
            return None
        if len(follows) == 2 and follows != _LINE_BREAK:
            raise _invalid("a boundary is followed by something else than a line break")
        end = self._buffer.find(_END_OF_HEAD, 0, _MAX_HEAD)
        if end < 0:
            if len(self._buffer) >= _MAX_HEAD:
                raise _invalid(f"the headers of a part have more than {_MAX_HEAD} bytes")
            return None
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise _invalid(f"it has more than {_MAX_PARTS} parts")
        part = _part(bytes(self._buffer[2:end]))
        del self._buffer[: end + len(_END_OF_HEAD)]
        self._state = self._content
        return part

    def _content(self) -> bytes | None:
        """Inside a part."""
        end = self._buffer.find(self._delimiter)
        if end < 0:
            content = bytes(self._buffer[: max(0, len(self._buffer) - len(self._delimiter) + 1)])
            del self._buffer[: len(content)]
            return content or None
        content = bytes(self._buffer[:end])
        del self._buffer[: end + len(self._delimiter)]
        self._state = self._head
        return content or None


def _part(head: bytes) -> Part:
    message = Message()
    try:
        lines = head.decode().split("\r\n") if head else []
    except UnicodeDecodeError:
        raise _invalid("the headers of a part are not UTF-8") from None
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None:
            raise _invalid("a part has an invalid header")
        message[match[1]] = match[2].rstrip()
    if message.get_content_disposition() != "form-data":
        raise _invalid("a part has no header Content-Disposition: form-data")
    if message.get("content-transfer-encoding", "").strip().lower() not in _ENCODINGS:
        raise _invalid("a part has a Content-Transfer-Encoding: send it as it is")
    name = message.get_param("name", header="content-disposition")
    if not isinstance(name, str) or not name:
        raise _invalid("a part has no name")
    filename = message.get_filename()
    return Part(name, None if filename is None else filename.replace("%22", '"'))  # as browsers and httpx escape it


def _invalid(problem: str) -> BodyError:
    return BodyError(f"the body is not valid multipart/form-data: {problem}", code="invalid_multipart")


_MAX_FIELD, _MAX_NAME = 1024, 255  # bytes of a field, characters of a file's name
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_EXPIRY = {"anchor": _ANCHOR, "seconds": _SECONDS}
FIELDS = ("purpose", *_EXPIRY.values())

# The JSON Schema of the form.
SCHEMA = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "JSON lines."},
        "purpose": {"type": "string", "enum": ["batch"]},
        _ANCHOR: {"type": "string", "enum": ["created_at"]},
        _SECONDS: {"type": "integer", "minimum": MIN_SECONDS, "maximum": MAX_SECONDS},
    },
}


class _ExpiryFields(Body):
    expires_after: ExpiresAfter | None = None


class UploadForm:
    """The form of an upload, with the file that it writes. buffer: content that `flush` will write."""

    def __init__(self, files: FileStore, owner: str, settings: Settings) -> None:
        self._files, self._owner, self._settings = files, owner, settings
        self._fields: dict[str, bytearray] = {}
        self._filename: str | None = None
        self._file: NewFile | None = None
        self._field: bytearray | None = None  # that is being read; None: the file
        self._nbytes = 0
        self.buffer = bytearray()

    def begin(self, part: Part) -> None:
        """A part begins. Raises `BodyError`."""
        if part.name == "file":
            if self._filename is not None or part.filename is None:
                problem = "must have a filename" if part.filename is None else "appears twice"
                raise BodyError(f"file {problem}", "file")
            self._filename, self._field = part.filename[:_MAX_NAME], None
            return
        if part.name not in FIELDS:
            message = f"{brief(part.name)} is not a field: remove it; there are file, {', '.join(FIELDS)}"
            raise BodyError(message, part.name[:64], "unknown_parameter")
        if part.name in self._fields:
            raise BodyError(f"{part.name} appears twice", part.name)
        self._field = self._fields[part.name] = bytearray()

    def add(self, content: bytes) -> None:
        """Content of the part. Raises `BodyError`: it is too long."""
        if self._field is None:
            self._nbytes += len(content)
            if self._nbytes > self._settings.max_file:
                raise too_large(self._settings.max_file)
            self.buffer += content
            return
        self._field += content
        if len(self._field) > _MAX_FIELD:
            raise BodyError(f"a field has more than {_MAX_FIELD} bytes")

    def flush(self) -> None:
        """Write what has arrived. Raises `BodyError`: there is no space for it."""
        if self._file is None:
            self._file = self._files.create(self._owner)
        self._file.write(bytes(self.buffer))
        self.buffer.clear()

    def commit(self) -> StoredFile:
        """Check the fields, and add the file. Raises `BodyError`."""
        values = {name: value.decode("utf-8", "replace") for name, value in self._fields.items()}
        if self._filename is None or "purpose" not in values:
            missing = "file" if self._filename is None else "purpose"
            raise BodyError(f"{missing} is required", missing, "missing_required_parameter")
        if values["purpose"] != "batch":
            raise BodyError(f"purpose must be 'batch'; got {brief(values['purpose'])}", "purpose")
        after: dict[str, Any] = {name: values[key] for name, key in _EXPIRY.items() if key in values}
        if (seconds := after.get("seconds", "")).isascii() and seconds.isdigit() and len(seconds) < 10:
            after["seconds"] = int(seconds)
        valid = validated(_ExpiryFields, {"expires_after": after or None}, Validation())
        self.flush()
        assert self._file is not None
        after_seconds = MAX_SECONDS if valid.expires_after is None else valid.expires_after.seconds
        return self._file.commit(self._filename, "batch", after_seconds)

    def discard(self) -> None:
        """Remove the file, unless it was committed."""
        if self._file is not None:
            self._file.discard()
