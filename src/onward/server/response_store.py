"""Stored responses and conversations, in SQLite.

A store is in memory, or in a file that survives a restart and that the replicas of one machine share. An entry is a
response or a conversation. A response has the new items of its input, those of its output, and a base that it
continues: another response, or the first items of a conversation. So each turn of a chat is stored once.
"""

import contextlib
import json
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from onward.errors import RequestError
from onward.protocols import BodyError
from onward.protocols.protocol import Item
from onward.server.errors import rendered

MEMORY = ":memory:"
# The beginnings of ids.
RESPONSE, CONVERSATION = "resp_", "conv_"
_VERSION = 1  # of the tables
_MAX_ENTRIES = 10_000
_ENTRY = 256  # bytes of an entry or an item without its content
_BUSY_SECONDS = 10.0  # to wait for another process's transaction
# Parts of a response: what it continues, the new items of its input, and its output. Items have one of the last two.
BASE, INPUT, OUTPUT = -1, 0, 1
# base: what a response continues. last_item: if that is a conversation, the last item that was in it. used: time of the
# last use, in seconds since 1970. content: JSON; null for a response that has only begun. is_final: whether it is
# complete.
_TABLES = """
CREATE TABLE entries (id TEXT PRIMARY KEY, owner TEXT NOT NULL, base TEXT, last_item INTEGER, used REAL NOT NULL,
    nbytes INTEGER NOT NULL, is_final INTEGER NOT NULL, content TEXT);
CREATE INDEX entries_by_use ON entries (used, owner, nbytes);
CREATE TABLE items (number INTEGER PRIMARY KEY AUTOINCREMENT, entry TEXT NOT NULL REFERENCES entries ON DELETE CASCADE,
    id TEXT NOT NULL, part INTEGER NOT NULL, content TEXT NOT NULL);
CREATE INDEX items_by_entry ON items (entry);
CREATE INDEX items_by_id ON items (id);
"""
_EVICTED = """
SELECT id FROM entries WHERE owner = (SELECT owner FROM entries GROUP BY owner ORDER BY SUM(nbytes) DESC LIMIT 1)
ORDER BY used LIMIT 1
"""


class ResponseStoreError(BodyError):
    """The store cannot be read or written."""

    def __init__(self, error: sqlite3.Error) -> None:
        message = f"the response store cannot be used ({error}): try again later, or send store: false"
        super().__init__(message, code="response_store", status=503)


class _Entry(NamedTuple):
    base: str | None
    last_item: int | None
    is_final: int
    content: str | None


class ResponseStore:
    """Stored responses and conversations. Any thread may call the methods. They raise `BodyError` for an id under which
    nothing of this owner is stored, and `ResponseStoreError`.

    Beyond its limits, the least recently used entries are dropped, those of the owner with the most bytes first. Using
    a response uses all that it continues.

    path: of the file; ":memory:" for none. seconds: how long an entry is stored after its last use. nbytes: maximum
    bytes of all entries. clock: seconds since 1970.

    Raises:
        RequestError: the file cannot be opened or written, or is something else.
    """

    def __init__(self, path: str, seconds: float, nbytes: int, clock: Callable[[], float] = time.time) -> None:
        self._seconds, self._limit, self._clock = seconds, nbytes, clock
        self._lock = threading.Lock()
        try:
            if path != MEMORY:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite's other files follow it
            self._db = sqlite3.connect(path, _BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            self.close = weakref.finalize(self, self._db.close)
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise RequestError(f"the response store {path!r} cannot be opened: {reason}", "response_store") from error

    def _prepare(self) -> None:
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON", "secure_delete = ON"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute("BEGIN IMMEDIATE")  # fails if the file cannot be written
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if not version and not self._db.execute("SELECT name FROM sqlite_master").fetchall():
            for statement in _TABLES.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {_VERSION}")
        elif version != _VERSION:
            raise sqlite3.DatabaseError("it is another program's or another version's database; name a new file")
        self._evict()
        self._db.execute("COMMIT")

    def get(self, owner: str, id: str) -> dict[str, Any]:
        """A response or a conversation."""
        with self._transaction():
            content = self._entry(owner, id).content
        if content is None:
            raise not_found(id)
        return json.loads(content)  # type: ignore[no-any-return]

    def delete(self, owner: str, id: str) -> None:
        """Delete a response or a conversation, with its items."""
        with self._transaction() as db:
            self._entry(owner, id)
            db.execute("DELETE FROM entries WHERE id = ?", (id,))

    def begin(self, owner: str, id: str, conversation: str) -> None:
        """Note the items of a conversation that a response continues. If the response is generated again, it continues
        the same items, whatever was added since."""
        with self._transaction() as db:
            self._entry(owner, conversation, "conversation", "conversation_not_found")
            values = (id, owner, conversation, self._last(conversation), self._clock(), _ENTRY)
            db.execute("INSERT OR IGNORE INTO entries VALUES (?, ?, ?, ?, ?, ?, 0, NULL)", values)

    def put(
        self, owner: str, response: Mapping[str, Any], items: Sequence[Item], base: str | None, *, is_final: bool = True
    ) -> None:
        """Store a response. A final one is never changed; its items are added to its conversation.

        items: new ones of its input. base: the response or the conversation that it continues.
        """
        id, content = response["id"], _json(response)
        with self._transaction() as db:
            row = db.execute("SELECT last_item, is_final FROM entries WHERE id = ?", (id,)).fetchone()
            last, was_final = row or (None, 0)
            if was_final:
                return
            conversation = base if base is not None and base.startswith(CONVERSATION) else None
            if conversation is not None and last is None:  # what `begin` noted was dropped
                last = self._last(conversation)
            db.execute("DELETE FROM entries WHERE id = ?", (id,))
            values = (id, owner, base, last, self._clock(), _ENTRY + len(content), is_final, content)
            db.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
            self._add(id, items)
            self._add(id, response["output"], OUTPUT)
            if conversation is not None and is_final and self._exists(conversation):
                self._add(conversation, [*items, *response["output"]])
            self._evict()

    def context(
        self, owner: str, id: str, param: str | None = None, *, through: int = OUTPUT, limit: int | None = None
    ) -> list[Item]:
        """The items of a conversation, or of a response with all that it continues.

        param: the field to blame. through: the last part to include of the response itself. limit: maximum characters
        of the items' JSON.
        """
        code = "not_found" if param is None else f"{param.removesuffix('_id')}_not_found"
        parts: list[list[str]] = []
        with self._transaction():
            entry = self._entry(owner, id, param, code)
            if not entry.is_final and through == OUTPUT:
                message = f"the response {id!r} is still in progress: wait until its status is completed"
                raise BodyError(message, param, "response_in_progress")
            parts.append(self._items(id, None, through))
            length = sum(map(len, parts[0]))
            while (base := entry.base) is not None and (limit is None or length <= limit):
                if not self._exists(base):
                    message = f"{id!r} continues {base!r}, which was deleted or has expired: send all of it as input"
                    raise BodyError(message, param, code, 404)
                last, entry = entry.last_item, self._entry(owner, base)
                parts.append(self._items(base, last))
                length += sum(map(len, parts[-1]))
        if limit is not None and length > limit:
            message = f"{id!r} has too many characters with all that it continues: at most {limit} are allowed"
            raise BodyError(message, param, "conversation_too_large", 413)
        return [json.loads(item) for part in reversed(parts) for item in part]

    def item(self, owner: str, id: str, param: str | None = None) -> Item:
        """The item with an id."""
        owned = "SELECT id FROM entries WHERE owner = ? AND used >= ?"
        sql = f"SELECT content FROM items WHERE id = ? AND entry IN ({owned}) ORDER BY number DESC LIMIT 1"
        with self._transaction() as db:
            row = db.execute(sql, (id, owner, self._oldest)).fetchone()
        if row is None:
            raise not_found(id, param)
        return json.loads(row[0])  # type: ignore[no-any-return]

    def create(self, owner: str, conversation: Mapping[str, Any], items: Sequence[Item]) -> None:
        """Store a new conversation."""
        id, content = conversation["id"], _json(conversation)
        with self._transaction() as db:
            values = (id, owner, self._clock(), _ENTRY + len(content), content)
            if db.execute("INSERT OR IGNORE INTO entries VALUES (?, ?, NULL, NULL, ?, ?, 1, ?)", values).rowcount:
                self._add(id, items)
            self._evict()

    def update(self, owner: str, conversation: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Change fields of a conversation. Returns it."""
        with self._transaction() as db:
            changed = json.loads(self._entry(owner, conversation).content or "{}") | dict(fields)
            db.execute("UPDATE entries SET content = ? WHERE id = ?", (_json(changed), conversation))
            return changed  # type: ignore[no-any-return]

    def add_items(self, owner: str, conversation: str, items: Sequence[Item]) -> None:
        """Add items to a conversation."""
        with self._transaction():
            self._entry(owner, conversation)
            self._add(conversation, items)
            self._evict()

    def delete_item(self, owner: str, conversation: str, id: str) -> dict[str, Any]:
        """Delete an item of a conversation. Returns the conversation."""
        with self._transaction() as db:
            content = self._entry(owner, conversation).content
            sql = "DELETE FROM items WHERE entry = ? AND id = ? RETURNING LENGTH(content)"
            sizes = db.execute(sql, (conversation, id)).fetchall()
            if not sizes:
                raise not_found(id)
            nbytes = sum(_ENTRY + size for (size,) in sizes)
            db.execute("UPDATE entries SET nbytes = nbytes - ? WHERE id = ?", (nbytes, conversation))
        return json.loads(content or "{}")  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                    self._db.execute("COMMIT")
                except BaseException:
                    if self._db.in_transaction:  # some errors end it
                        self._db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise ResponseStoreError(error) from error

    @property
    def _oldest(self) -> float:
        """The time before which the last use of an expired entry was."""
        return self._clock() - self._seconds

    def _entry(self, owner: str, id: str, param: str | None = None, code: str = "not_found") -> _Entry:
        """An entry, which is thereby used."""
        columns = "base, last_item, is_final, content"
        values = (self._clock(), id, owner, self._oldest)
        sql = f"UPDATE entries SET used = ? WHERE id = ? AND owner = ? AND used >= ? RETURNING {columns}"
        row = self._db.execute(sql, values).fetchone()
        if row is None:
            raise not_found(id, param, code)
        return _Entry(*row)

    def _last(self, conversation: str) -> int:
        """The number of a conversation's last item; 0 if it has none."""
        sql = "SELECT COALESCE(MAX(number), 0) FROM items WHERE entry = ?"
        return self._db.execute(sql, (conversation,)).fetchone()[0]  # type: ignore[no-any-return]

    def _exists(self, id: str) -> bool:
        sql = "SELECT 1 FROM entries WHERE id = ? AND used >= ?"
        return self._db.execute(sql, (id, self._oldest)).fetchone() is not None

    def _items(self, entry: str, last: int | None, through: int = OUTPUT) -> list[str]:
        sql = "SELECT content FROM items WHERE entry = ? AND number <= ? AND part <= ? ORDER BY number"
        rows = self._db.execute(sql, (entry, 2**62 if last is None else last, through))
        return [content for (content,) in rows]

    def _add(self, entry: str, items: Sequence[Item], part: int = INPUT) -> None:
        rows = [(entry, item["id"], part, _json(item)) for item in items]
        self._db.executemany("INSERT INTO items (entry, id, part, content) VALUES (?, ?, ?, ?)", rows)
        nbytes = sum(_ENTRY + len(row[-1]) for row in rows)
        self._db.execute("UPDATE entries SET nbytes = nbytes + ? WHERE id = ?", (nbytes, entry))

    def _evict(self) -> None:
        """Drop expired entries and those that exceed the limit alone, then others while a limit is exceeded."""
        self._db.execute("DELETE FROM entries WHERE used < ? OR nbytes > ?", (self._oldest, self._limit))
        while True:
            count, nbytes = self._db.execute("SELECT COUNT(*), COALESCE(SUM(nbytes), 0) FROM entries").fetchone()
            if count <= _MAX_ENTRIES and nbytes <= self._limit:
                return
            self._db.execute(f"DELETE FROM entries WHERE id = ({_EVICTED})")


def _json(value: Any) -> str:
    """Compact JSON. Lone surrogates, which UTF-8 cannot encode, are escaped."""
    return rendered(value).decode()


def not_found(id: str, param: str | None = None, code: str = "not_found") -> BodyError:
    """The error for an id under which nothing is stored, or nothing of this owner's."""
    problem = "it was never stored, was deleted, has expired, or belongs to another API key"
    return BodyError(f"nothing is stored under the id {id[:80]!r}: {problem}", param, code, 404)
