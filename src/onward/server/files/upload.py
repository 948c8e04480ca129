"""The form of an upload: its fields, and the file that it writes."""

from typing import Any

from onward.protocols import BodyError
from onward.protocols.body import Body, Validation, validated
from onward.server.client import too_large
from onward.server.files.multipart import Part
from onward.server.files.records import MAX_SECONDS, MIN_SECONDS, ExpiresAfter
from onward.server.files.store import FileStore, NewFile, StoredFile
from onward.server.settings import Settings
from onward.util.text import brief

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
