"""The endpoints of files and batches: OpenAI's /v1/files and /v1/batches."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, Any, Literal, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from onward.protocols import BodyError
from onward.protocols.body import Validation, validated
from onward.server.client import max_body, owner_of, too_large
from onward.server.errors import WholeResponse, rendered
from onward.server.files.batches import Batches
from onward.server.files.records import MAX_SECONDS, BatchBody, BatchObject, StoredBatch, seconds_of
from onward.server.files.store import FileObject, FileStore, StoredFile
from onward.server.files.upload import SCHEMA, MultipartReader, Part, UploadForm
from onward.server.gate import access_of
from onward.server.generate import BodyRoute, described, errors, read_logged
from onward.server.service import Service, parsed
from onward.util.lanes import Lane
from onward.util.text import brief

_Result = TypeVar("_Result")

_PART = 256 * 2**10  # bytes that are written to a file, or read from it, at once


class FileDeleted(BaseModel):
    """The response to the deletion of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class _Page(BaseModel):
    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(_Page):
    """A page of files."""

    data: list[FileObject]


class BatchList(_Page):
    """A page of batches."""

    data: list[BatchObject]


_NOT_FOUND = {404: "There is no such file or batch with this API key."}
_UPLOAD = {
    400: "The form is invalid.",
    404: "The server has no files.",
    408: "The file did not arrive in time.",
    413: "The file is too large, or there is no space for it.",
    415: "Content-Type is not multipart/form-data.",
    503: "The server takes no files.",
}


def _documented(descriptions: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """The documentation of error responses."""
    return errors() | {status: described(text) for status, text in descriptions.items()}


def _query(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": dict(schema)}


def _page_parameters(most: int, *others: dict[str, Any]) -> dict[str, Any]:
    limit = {"type": "integer", "minimum": 1, "maximum": most}
    return {"parameters": [_query("after", {"type": "string"}), _query("limit", limit), *others]}


_MAX_FILE_PAGE, _MAX_BATCH_PAGE, _BATCH_PAGE = 10_000, 100, 20
_FILE_PAGE = _page_parameters(
    _MAX_FILE_PAGE,
    _query("order", {"type": "string", "enum": ["asc", "desc"]}),
    _query("purpose", {"type": "string"}),
)


class FileRoutes:
    """The endpoints. What reads or writes the disk runs in threads."""

    def __init__(self, service: Service, files: FileStore, batches: Batches) -> None:
        self._settings, self._files, self._batches = service.settings, files, batches
        self._lane = Lane("files", 2)

    def router(self) -> APIRouter:
        routes, bodies = APIRouter(), APIRouter(route_class=BodyRoute)
        form = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": SCHEMA}}}}
        content: dict[int | str, Any] = {200: {"content": {"application/octet-stream": {}}}}
        found, listed = _documented(_NOT_FOUND), _documented({400: "The query is invalid.", **_NOT_FOUND})
        uploads: Any = {
            "responses": _documented(_UPLOAD),
            "openapi_extra": form,
            "summary": "Upload a file of requests.",
        }
        routes.post("/files", response_model=FileObject, **uploads)(self.upload)
        routes.get("/files", response_model=FileList, responses=listed, openapi_extra=_FILE_PAGE)(self.list_files)
        routes.get("/files/{id}", response_model=FileObject, responses=found)(self.file)
        routes.delete("/files/{id}", response_model=FileDeleted, responses=found)(self.delete)
        routes.get("/files/{id}/content", response_class=Response, responses=content | found)(self.content)
        pages: Any = {"responses": listed, "openapi_extra": _page_parameters(_MAX_BATCH_PAGE)}
        routes.get("/batches", response_model=BatchList, **pages)(self.list_batches)
        routes.get("/batches/{id}", response_model=BatchObject, responses=found)(self.batch)
        cancelled = _documented({**_NOT_FOUND, 409: "The batch has ended.", 503: "The server shuts down."})
        routes.post("/batches/{id}/cancel", response_model=BatchObject, responses=cancelled)(self.cancel)
        created = errors(400, 408, 413, 415, 429, 503) | found
        bodies.post("/batches", response_model=BatchObject, responses=created, summary="Run the requests of a file.")(
            self.create
        )
        routes.include_router(bodies)
        return routes

    async def upload(self, request: Request) -> Response:
        owner, settings = self._owner(request), self._settings
        upload = UploadForm(self._files, owner, settings)
        length = request.headers.get("content-length", "0")
        self._files.check_space(owner, int(length[:20]) if length.isdigit() else 0)
        request.scope["onward.memory"].add_body(2 * _PART)
        reader = MultipartReader(request.headers.get("content-type", ""))
        loop, received = asyncio.get_running_loop(), 0
        started = loop.time()
        try:
            # It may take its time, but be no slower than the largest other body.
            async with asyncio.timeout(settings.body_seconds) as timer:
                async for chunk in request.stream():
                    received += len(chunk)
                    if received > max_body(request.url.path, settings):
                        raise too_large(settings.max_file)
                    for event in reader.feed(chunk):
                        if isinstance(event, Part):
                            upload.begin(event)
                        else:
                            upload.add(event)
                    if len(upload.buffer) >= _PART:
                        await self._run(request, upload.flush)
                    timer.reschedule(started + settings.body_seconds * (1 + received / settings.max_body))
            reader.finish()
            file = await self._run(request, upload.commit)
        except TimeoutError:
            message = f"the file arrived too slowly: {received} bytes in {loop.time() - started:.0f} s"
            raise BodyError(message, code="request_timeout", status=408) from None
        finally:
            upload.discard()
        access_of(request.scope).fields |= {"file": file.id, "bytes": file.bytes}
        return self._answer(rendered(_public(file, FileObject)))

    async def list_files(self, request: Request) -> Response:
        def page(owner: str) -> dict[str, Any]:
            query = _Query(request, ("after", "limit", "order", "purpose"))
            purpose, order = query.text("purpose"), query.text("order") or "desc"
            if order not in ("asc", "desc"):
                raise BodyError(f"order must be 'asc' or 'desc'; got {brief(order)}", "order")
            files = [file for file in self._files.listed(owner) if purpose in (None, file.purpose)]
            files = files if order == "asc" else files[::-1]
            return query.page(files, FileObject, _MAX_FILE_PAGE, _MAX_FILE_PAGE)

        return await self._respond(request, page)

    async def file(self, request: Request, id: str) -> Response:
        return await self._respond(request, lambda owner: _public(self._files.find(owner, id), FileObject))

    async def delete(self, request: Request, id: str) -> Response:
        def delete(owner: str) -> dict[str, Any]:
            self._files.delete(owner, id)
            return FileDeleted(id=id).model_dump()

        access_of(request.scope).fields["file"] = id
        return await self._respond(request, delete)

    async def content(self, request: Request, id: str) -> Response:
        def opened() -> tuple[StoredFile, IO[bytes]]:
            file = self._files.find(self._owner(request), id)
            try:
                return file, self._files.path(file.id).open("rb")
            except FileNotFoundError:  # it has been deleted just now
                return self._files.find(self._owner(request), id), self._files.path(id).open("rb")

        file, content = await self._run(request, opened)
        access_of(request.scope).fields |= {"file": file.id, "bytes": file.bytes}
        return _Content(file, content, self._settings.stalled_seconds, partial(self._run, request))

    async def create(self, request: Request, body: BatchBody) -> Response:
        raw = await read_logged(request, self._settings)

        def create(owner: str) -> dict[str, Any]:
            valid = validated(BatchBody, parsed(raw), Validation(self._settings.body_limits))
            expires = valid.output_expires_after
            output_seconds = MAX_SECONDS if expires is None else expires.seconds
            fields = valid.model_dump(exclude={"output_expires_after"})
            batch = self._batches.create(owner, fields, seconds_of(valid.completion_window), output_seconds)
            access_of(request.scope).fields["batch"] = batch.id
            return _public(batch, BatchObject)

        return await self._respond(request, create)

    async def list_batches(self, request: Request) -> Response:
        def page(owner: str) -> dict[str, Any]:
            query = _Query(request, ("after", "limit"))
            return query.page(self._batches.listed(owner)[::-1], BatchObject, _MAX_BATCH_PAGE, _BATCH_PAGE)

        return await self._respond(request, page)

    async def batch(self, request: Request, id: str) -> Response:
        return await self._respond(request, lambda owner: _public(self._batches.find(owner, id), BatchObject))

    async def cancel(self, request: Request, id: str) -> Response:
        access_of(request.scope).fields["batch"] = id
        return await self._respond(request, lambda owner: _public(self._batches.cancel(owner, id), BatchObject))

    def _owner(self, request: Request) -> str:
        """The owner of what a request makes and finds. Raises `BodyError`: there are no files."""
        if not self._files.is_open:
            raise BodyError("this server has no files: its ASGI lifespan has not run", None, "unknown_url", 404)
        return owner_of(request.scope["onward.client"])

    async def _run(self, request: Request, function: Callable[[], _Result]) -> _Result:
        return await asyncio.wrap_future(self._lane.submit(function, request.scope["onward.client"]))

    async def _respond(self, request: Request, make: Callable[[str], dict[str, Any]]) -> Response:
        """Make a response in a thread. make: gets the owner."""
        owner = self._owner(request)
        return self._answer(await self._run(request, lambda: rendered(make(owner))))

    def _answer(self, content: bytes) -> Response:
        return WholeResponse(content, self._settings.stalled_seconds)


def _public(record: StoredFile | StoredBatch, kind: type[BaseModel]) -> dict[str, Any]:
    """The fields that clients see."""
    return record.model_dump(include=set(kind.model_fields))


class _Query:
    """The query of a request. Raises `BodyError`: it has other parameters than these."""

    def __init__(self, request: Request, names: Sequence[str]) -> None:
        self._values = request.query_params
        for name in self._values:
            if name not in names:
                known = ", ".join(names)
                raise BodyError(f"no parameter {brief(name)}; there are {known}", name[:64], "unknown_parameter")

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def page(
        self, records: Sequence[StoredFile | StoredBatch], kind: type[BaseModel], most: int, usual: int
    ) -> dict[str, Any]:
        """A page of records. Raises `BodyError`: limit or after is invalid."""
        limit, after = self.text("limit") or str(usual), self.text("after")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= most):
            raise BodyError(f"limit must be a whole number from 1 to {most}; got {brief(limit)}", "limit")
        ids = [record.id for record in records]
        if after is not None and after not in ids:
            raise BodyError(f"after must be the id of an entry; got {brief(after)}", "after")
        first = 0 if after is None else ids.index(after) + 1
        last = first + int(limit)
        page = ids[first:last]
        return {
            "object": "list",
            "data": [_public(record, kind) for record in records[first:last]],
            "first_id": page[0] if page else None,
            "last_id": page[-1] if page else None,
            "has_more": last < len(ids),
        }


class _Content(Response):
    """The content of a file, in parts as the client reads it. seconds: for which a part may stay unread. run: runs a
    function in a thread."""

    media_type = "application/octet-stream"

    def __init__(
        self, file: StoredFile, content: IO[bytes], seconds: float, run: Callable[[Callable[[], bytes]], Any]
    ) -> None:
        headers = {
            "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='', errors='replace')}",
            "content-length": str(file.bytes),
            "x-content-type-options": "nosniff",
        }
        super().__init__(headers=headers)
        self._content, self._seconds, self._read = content, seconds, run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._content as content:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                while part := await self._read(partial(content.read, _PART)):
                    async with asyncio.timeout(self._seconds):
                        await send({"type": "http.response.body", "body": part, "more_body": True})
            except TimeoutError:
                return
            await send({"type": "http.response.body", "body": b""})
