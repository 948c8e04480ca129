"""A hub in a thread: the part of huggingface.co's HTTP protocol that `snapshot_download` uses.

    GET       /api/models/{repo}/revision/{revision}     the sha of a branch, tag or commit
    GET       /api/models/{repo}/tree/{commit}           its files
    HEAD/GET  /{repo}/resolve/{revision}/{file}          one file

Small files are served directly, with their git id as ETag. Safetensors stand for files in large storage: `resolve`
answers 302 with X-Linked-ETag, X-Linked-Size and the address of another host ("localhost", while the hub is
"127.0.0.1"), which serves them whole or from a given byte on. X-Error-Code names an error.
"""

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

HOST = "127.0.0.1"


class Request(NamedTuple):
    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class Repository:
    """commits: sha -> path -> content. revisions: branch or tag -> sha. token: required by a private repository."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    token: str | None = None


class Hub:
    """Start with `Hub()`, stop with `close()`. `requests` lists the requests in order."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.down_with: int | None = None  # a status that answers every request
        self.spent_tokens: set[str] = set()
        self._cuts: dict[str, list[int]] = {}
        self._server = ThreadingHTTPServer((HOST, 0), type("Handler", (_Handler,), {"hub": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def publish(self, repo: str, folder: Path, revision: str = "main", **settings: object) -> str:
        """Commit a folder's files to a branch; the commit's id."""
        files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        repository = self.repositories.setdefault(repo, Repository())
        repository.commits[commit] = files
        repository.revisions[revision] = commit
        for name, value in settings.items():
            setattr(repository, name, value)
        return commit

    def cut(self, file: str, *, at: list[int]) -> None:
        """Let the next downloads of `file` end, one after another, when these many bytes have been sent."""
        self._cuts[file] = list(at)

    def next_cut(self, file: str) -> int | None:
        cuts = self._cuts.get(file)
        return cuts.pop(0) if cuts else None

    def sent(self) -> set[str]:
        """The files whose content was requested."""
        paths = [request.path for request in self.requests if request.method == "GET"]
        parts = [path.partition(mark)[2] for path in paths for mark in ("/resolve/", "/storage/") if mark in path]
        return {unquote(part.partition("/")[2]) for part in parts}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        path = urlsplit(self.path).path
        self.hub.requests.append(Request(self.command, path, self.headers.get("Range"), token))
        if self.hub.down_with is not None:
            return self._fail(self.hub.down_with, None, "the hub is having a bad day")
        if token in self.hub.spent_tokens:
            return self._fail(401, None, "Invalid credentials in Authorization header")
        if path.startswith("/storage/"):
            return self._storage(*path.removeprefix("/storage/").split("/", 1))
        if path.startswith("/api/models/"):
            *names, verb, revision = path.removeprefix("/api/models/").split("/")[:4]
            if names and verb not in ("revision", "tree"):  # the name alone of a repository without an owner
                *names, verb, revision = path.removeprefix("/api/models/").split("/")[:3]
            return self._with_revision(
                "/".join(names), revision, token, {"revision": self._info, "tree": self._tree}[verb]
            )
        if "/resolve/" in path:
            repo, _, rest = path[1:].partition("/resolve/")
            revision, _, file = rest.partition("/")
            return self._with_revision(repo, revision, token, lambda *at: self._file(*at, unquote(file), token))
        return self._fail(404, None, "no such address")

    def _with_revision(self, repo, revision, token, answer) -> None:
        repository = self.hub.repositories.get(repo)
        if repository is None or (repository.token is not None and token != repository.token):
            # Who may not see a repository cannot tell it from one that is not there.
            return self._fail(404 if token else 401, "RepoNotFound", "Repository not found")
        revision = unquote(revision)
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            return self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return answer(repo, repository, commit)

    def _info(self, repo, repository, commit) -> None:
        siblings = [{"rfilename": path} for path in repository.commits[commit]]
        self._json({"_id": "0", "id": repo, "modelId": repo, "sha": commit, "tags": [], "siblings": siblings})

    def _tree(self, repo, repository, commit) -> None:
        self._json([_tree_entry(path, content) for path, content in repository.commits[commit].items()])

    def _file(self, repo, repository, commit, file, token) -> None:
        if repository.gated:
            return self._fail(403 if token else 401, "GatedRepo", f"Access to model {repo} is restricted")
        content = repository.commits[commit].get(file)
        if content is None:
            return self._fail(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not _is_large(file):
            return self._content(200, content, headers | {"ETag": f'"{_git_id(content)}"'}, self.hub.next_cut(file))
        digest = hashlib.sha256(content).hexdigest()
        headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        headers["Location"] = f"http://localhost:{self.hub.port}/storage/{digest}/{file}"
        return self._content(302, b"Found", headers)

    def _storage(self, digest: str, file: str) -> None:
        everything = [c for r in self.hub.repositories.values() for files in r.commits.values() for c in files.values()]
        content = next(c for c in everything if hashlib.sha256(c).hexdigest() == digest)
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        headers = {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        self._content(206 if begin else 200, content[begin:], headers, self.hub.next_cut(unquote(file)))

    def _json(self, value: object) -> None:
        self._content(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str | None, message: str, headers: dict[str, str] | None = None) -> None:
        coded = {} if code is None else {"X-Error-Code": code}
        self._content(status, message.encode(), coded | {"X-Error-Message": message} | (headers or {}))

    def _content(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True


def _is_large(file: str) -> bool:
    return file.endswith((".safetensors", ".bin", ".gguf"))


def _tree_entry(path: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": path, "size": len(content), "oid": _git_id(content)}
    if _is_large(path):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
