"""A protocol is one file with a class, and one line: the server, its document and batches then support it."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx2 as httpx
import pytest
from pydantic import BaseModel

import onward
from onward.errors import OnwardError
from onward.language_model import Completion, Piece
from onward.protocols import PROTOCOLS, BodyReader, ParsedBody, Protocol
from onward.protocols.body import AtMost
from onward.protocols.options import Length, OptionsBody, body_with_options
from onward.protocols.protocol import ModelContext, Prompts
from onward.server import create_app

_Options: Any = body_with_options("_Options", OptionsBody, without=("n", "beams"))


class ShoutBody(_Options):  # type: ignore[misc]
    """A body of /v1/shout."""

    text: Annotated[str, AtMost("stop_characters", "characters")]
    length: Length = None

    def field_of(self, option: str) -> str:
        return {"max_new_tokens": "length", "prompt": "text"}.get(option, option)


class Shouted(BaseModel):
    """A response of /v1/shout."""

    shouted: str


class ShoutEvents:
    """Each piece in capitals."""

    def begin(self, at: int) -> list[str]:
        return []

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        return [(len(pieces), f"data: {json.dumps(''.join(piece.text for piece in pieces).upper())}\n\n")]

    def end(self, at: int, completion: Completion) -> list[str]:
        return []

    def finish(self) -> list[str]:
        return ["data: null\n\n"]

    def error(self, error: OnwardError) -> list[str]:
        return []


class Shout(Protocol):
    path, summary, kind = "/v1/shout", "Generate text in capitals.", "shout"
    body, response = ShoutBody, Shouted

    def prompts(self, body: Any, context: ModelContext) -> Prompts:
        length = {} if body.length is None else {"max_new_tokens": body.length}
        return Prompts((context.lm.request(body.text, **{**context.options, **body.set_options(), **length}),))

    def answer(self, body: ParsedBody, completions: Sequence[Completion]) -> dict[str, Any]:
        return {"shouted": completions[0].text.upper()}

    def events(self, body: ParsedBody) -> ShoutEvents:
        return ShoutEvents()


@pytest.fixture(scope="module")
def lm() -> onward.LanguageModel:
    return onward.load("demo")


@pytest.fixture(autouse=True)
def line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROTOCOLS, Shout.path, Shout())  # type: ignore[arg-type]


@pytest.fixture
def client(lm: onward.LanguageModel) -> Iterator[Any]:
    import asyncio

    with onward.Engine(lm) as engine:
        app = create_app({"demo": engine})

        def post(body: dict[str, Any]) -> httpx.Response:
            async def ask() -> httpx.Response:
                transport = httpx.ASGITransport(app=app)
                async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as session:
                    return await session.post("/v1/shout", json=body)

            return asyncio.run(ask())

        post.document = app.routes.openapi()  # type: ignore[attr-defined]
        yield post


def test_a_new_protocol_is_served(client: Any, lm: onward.LanguageModel) -> None:
    expected = lm.generate("Once", max_new_tokens=8, seed=1, temperature=1).text.upper()
    body = {"text": "Once", "length": 8, "seed": 1, "temperature": 1}
    assert client(body).json() == {"shouted": expected}
    lines = client({**body, "stream": True}).text.split("\n")
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert "".join(data[:-1]) == expected


def test_errors_name_the_protocols_fields(client: Any) -> None:
    for body, param in [
        ({}, "text"),
        ({"text": 5}, "text"),
        ({"text": "x" * 1025}, "text"),
        ({"text": "x", "length": -1}, "length"),
        ({"text": "x", "length": 10**6}, "text"),
        ({"text": "x", "n": 2}, "n"),
        ({"text": "x", "top_p": 2}, "top_p"),
        ({"text": "x", "regex": "["}, "regex"),
    ]:
        answer = client(body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_new_protocol_is_in_the_openapi_document(client: Any) -> None:
    operation = client.document["paths"]["/v1/shout"]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/ShoutBody"
    }
    assert client.document["components"]["schemas"]["ShoutBody"]["properties"]["text"]["maxLength"] == 1024
    assert "Shouted" in client.document["components"]["schemas"]


def test_a_new_protocol_is_available_in_batches(lm: onward.LanguageModel, tmp_path: Path) -> None:
    body = BodyReader(lm, "demo").read("/v1/shout", {"text": "Once", "length": 4, "seed": 1})
    answer = body.protocol.answer(body, [lm.generate(body.requests[0])])
    assert answer["shouted"].isupper()
