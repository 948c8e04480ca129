"""Ways to send a request, well-behaved or not. Each returns the answers in the order of their arrival."""

import contextlib
import http.client
import io
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# Seconds that an attacker waits for an answer: 12 of them may wait for each other, on a machine that tests run on.
PATIENCE = 30.0
NO_ANSWER = 0  # in place of a status: nothing came in time
CLOSED = 1  # in place of a status: the server closed the connection without an answer


@dataclass(frozen=True)
class Target:
    port: int
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {"Content-Type": "application/json", **key}

    def head(self, path: str, length: int | None, more: dict[str, str] | None = None) -> bytes:
        """The head of a POST. length: as it claims; None for a chunked body."""
        size = {"Transfer-Encoding": "chunked"} if length is None else {"Content-Length": str(length)}
        headers = {"Host": f"127.0.0.1:{self.port}", **self.headers, **size, **(more or {})}
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


@dataclass(frozen=True)
class Answer:
    """status: `NO_ANSWER` or `CLOSED` if there was no answer."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def is_refusal_for_now(self) -> bool:
        """The server is busy, on purpose, and says when to come again."""
        return self.status in (429, 503) and "retry-after" in self.headers


def ask(
    target: Target, path: str, body: bytes | None, headers: dict[str, str] | None = None, method: str = "POST"
) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=PATIENCE)
    try:
        with contextlib.suppress(OSError):  # the server closes before it has read everything, possibly after an error
            connection.request(method, path, body, target.headers | (headers or {}))
        return _read(connection.getresponse())
    except TimeoutError:
        return Answer(NO_ANSWER)
    except (OSError, http.client.HTTPException):
        return Answer(CLOSED)
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse) -> Answer:
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, headers, response.read())


Sender = Callable[[Target, str, bytes, dict[str, str]], list[Answer]]


def whole(target: Target, path: str, body: bytes, headers: dict[str, str]) -> list[Answer]:
    """As any client would."""
    return [ask(target, path, body, headers)]


def by_method(method: str) -> Sender:
    return lambda target, path, body, headers: [ask(target, path, body, headers, method)]


@contextmanager
def connected(target: Target, buffer: int | None = None) -> Iterator[socket.socket]:
    """buffer: bytes of the receive buffer, so that an unread stream stays with the server."""
    with socket.socket() as connection:
        if buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.settimeout(PATIENCE)
        connection.connect(("127.0.0.1", target.port))
        yield connection


def _answers(connection: socket.socket, count: int) -> list[Answer]:
    """The next answers on a connection; the last one may be `CLOSED`."""
    found: list[Answer] = []
    reader = connection.makefile("rb")
    while len(found) < count:
        response = http.client.HTTPResponse(_Reader(reader))  # type: ignore[arg-type]
        try:
            response.begin()
            found.append(_read(response))
        except TimeoutError:
            return [*found, Answer(NO_ANSWER)]
        except (OSError, http.client.HTTPException):
            return [*found, Answer(CLOSED)]
    return found


class _Reader:
    """Lets responses that follow each other on one connection share its buffer."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def makefile(self, mode: str) -> Any:
        return _Unclosed(self._file)


class _Unclosed:
    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def close(self) -> None:
        pass


def raw(make: Callable[[Target, str, bytes], bytes], answers: int = 1, *, ends: bool = True) -> Sender:
    """Bytes that need not be HTTP. ends: no more will come."""

    def send(target: Target, path: str, body: bytes, headers: dict[str, str]) -> list[Answer]:
        with connected(target) as connection:
            try:
                connection.sendall(make(target, path, body))
                if ends:
                    connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            return _answers(connection, answers)

    return send


def left(seconds: float) -> Sender:
    """The client leaves after `seconds`, in the middle of an answer or before it, if that has not ended by then."""

    def send(target: Target, path: str, body: bytes, headers: dict[str, str]) -> list[Answer]:
        with connected(target) as connection:
            connection.sendall(target.head(path, len(body), headers) + body)
            end = time.monotonic() + seconds
            received = b""
            while (rest := end - time.monotonic()) > 0:
                connection.settimeout(rest)
                try:
                    received += (chunk := connection.recv(2**16))
                except TimeoutError:
                    break
                if not chunk or ((answer := _parsed(received)) is not None and answer.body):
                    break
            answer = _parsed(received)
            return [answer] if answer is not None else []

    return send


def _parsed(received: bytes) -> Answer | None:
    """The answer in these bytes, without the body if it has not ended; None without a whole head."""
    if b"\r\n\r\n" not in received:
        return None
    response = http.client.HTTPResponse(_Reader(io.BytesIO(received)))  # type: ignore[arg-type]
    response.begin()
    try:
        return _read(response)
    except http.client.HTTPException:
        return Answer(response.status)


def partly(share: float, connections: int, seconds: float) -> Sender:
    """Only a part of the body, on several connections at once, which stay open for `seconds`."""

    def send(target: Target, path: str, body: bytes, headers: dict[str, str]) -> list[Answer]:
        part = memoryview(body)[: int(len(body) * share)]
        opened = [socket.create_connection(("127.0.0.1", target.port), PATIENCE) for _ in range(connections)]
        try:
            for connection in opened:
                connection.settimeout(seconds)
                try:
                    connection.sendall(target.head(path, len(body), headers))
                    connection.sendall(part)
                except OSError:  # the server takes no more of them, or refuses them
                    pass
            time.sleep(seconds)
        finally:
            for connection in opened:
                connection.close()
        return []

    return send


def slowly(pause: float, seconds: float) -> Sender:
    """A byte at a time."""

    def send(target: Target, path: str, body: bytes, headers: dict[str, str]) -> list[Answer]:
        with connected(target) as connection:
            content = target.head(path, len(body), headers) + body
            for at in range(int(seconds / pause)):
                connection.sendall(content[at : at + 1])
                time.sleep(pause)
        return []

    return send


def unread(seconds: float) -> Sender:
    """A client that asks, reads nothing and stays for `seconds`."""

    def send(target: Target, path: str, body: bytes, headers: dict[str, str]) -> list[Answer]:
        with connected(target, buffer=4096) as connection:
            connection.sendall(target.head(path, len(body), headers) + body)
            time.sleep(seconds)
        return []

    return send


def chunked(target: Target, path: str, body: bytes, headers: dict[str, str]) -> list[Answer]:
    """The body in chunks, which never end."""
    chunk = b"%x\r\n%s\r\n" % (len(body), body)
    with connected(target) as connection:
        connection.sendall(target.head(path, None, headers))
        try:
            for _ in range(64):
                connection.sendall(chunk)
        except OSError:
            pass
        return _answers(connection, 1)


def as_bytes(body: Any) -> bytes:
    """JSON of a body, without spaces; bytes are sent as they are."""
    return body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
