"""/v1/embeddings in OpenAI's format, and /v1/rerank in the common format of Jina, Cohere and vLLM."""

import base64
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, FailFast, Field, WithJsonSchema

from onward.language_model import Completion, Request
from onward.language_model.embedding import EmbeddingReader
from onward.protocols.body import AtMost, Body, BodyError
from onward.protocols.completions import PROMPTS, listed_prompts
from onward.protocols.protocol import GenerateBody, ModelContext, ParsedBody, Prompts, Protocol, ResponseEvents


class EmbeddingsBody(GenerateBody):
    """A body of /v1/embeddings. prompt_name, prompt, normalize: as in `LanguageModel.embed`."""

    input: Annotated[list[str | list[int]], BeforeValidator(listed_prompts), WithJsonSchema(PROMPTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, Field(ge=1)] = None
    user: str | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    normalize: bool | None = None

    def field_of(self, option: str) -> str:
        return "input" if option == "prompt" and self.prompt is None else option


class Embedding(BaseModel):
    """An embedding: numbers, or the base64 of float32 in little-endian order."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """The tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    """A response of /v1/embeddings."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Document(Body):
    """A document as an object."""

    text: str


class RerankBody(GenerateBody):
    """A body of /v1/rerank. instruction, template: as in `LanguageModel.rerank`."""

    query: str
    documents: Annotated[list[str | Document], FailFast(), Field(min_length=1), AtMost("texts", "documents")]
    top_n: Annotated[int | None, Field(ge=1)] = None
    return_documents: bool | None = None
    instruction: str | None = None
    template: str | None = None

    def field_of(self, option: str) -> str:
        return "documents" if option == "prompt" else option


class Ranked(BaseModel):
    """A document, by its index in the body, with its relevance from 0 to 1."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class Ranking(BaseModel):
    """A response of /v1/rerank: the most relevant documents, best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


class _Embedded(Protocol):
    """An endpoint whose results are made of the values at the last norm."""

    @abstractmethod
    def requests(self, body: Any, reader: EmbeddingReader, adapter: str | None) -> list[Request]:
        """The requests of a valid body."""

    def prompts(self, body: GenerateBody, context: ModelContext) -> Prompts:
        if body.stream:
            raise BodyError("stream is not supported: remove it, or use false", "stream", "unsupported_value")
        return Prompts(tuple(self.requests(body, context.lm._embedding_reader, context.options.get("adapter"))))

    def events(self, body: ParsedBody) -> ResponseEvents:
        raise AssertionError("a body with stream is refused")


class EmbeddingsProtocol(_Embedded):
    """/v1/embeddings."""

    path, kind, summary = "/v1/embeddings", "list", "Embed texts."
    body, response = EmbeddingsBody, Embeddings

    def requests(self, body: EmbeddingsBody, reader: EmbeddingReader, adapter: str | None) -> list[Request]:
        return reader.texts(
            body.input,
            dimensions=body.dimensions,
            normalize=body.normalize is not False,
            prompt=body.prompt,
            prompt_name=body.prompt_name,
            adapter=adapter,
        )

    def answer(self, body: ParsedBody, completions: Sequence[Completion]) -> dict[str, Any]:
        as_text = body.values.encoding_format == "base64"
        data = []
        for index, completion in enumerate(completions):
            assert completion.embedding is not None, "its request asks for one"
            numbers = completion.embedding.numpy().astype("<f4")
            encoded = base64.b64encode(numbers.tobytes()).decode() if as_text else numbers.tolist()
            data.append({"object": "embedding", "index": index, "embedding": encoded})
        return {"object": "list", "data": data, "model": body.model, "usage": _usage(body.requests)}


class RerankProtocol(_Embedded):
    """/v1/rerank."""

    path, kind, summary = "/v1/rerank", "rerank", "Rank documents by their relevance to a query."
    body, response = RerankBody, Ranking

    def requests(self, body: RerankBody, reader: EmbeddingReader, adapter: str | None) -> list[Request]:
        return reader.pairs(
            body.query, _documents(body), instruction=body.instruction, template=body.template, adapter=adapter
        )

    def answer(self, body: ParsedBody, completions: Sequence[Completion]) -> dict[str, Any]:
        values: RerankBody = body.values
        scores = [0.0 if completion.embedding is None else float(completion.embedding) for completion in completions]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: values.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
        if values.return_documents is not False:
            texts = _documents(values)
            results = [{**each, "document": {"text": texts[each["index"]]}} for each in results]
        return {
            "id": f"rerank-{body.key.text}",
            "model": body.model,
            "results": results,
            "usage": _usage(body.requests),
        }


def _documents(body: RerankBody) -> list[str]:
    return [each if isinstance(each, str) else each.text for each in body.documents]


def _usage(requests: Sequence[Request]) -> dict[str, int]:
    tokens = sum(len(request.prompt) for request in requests)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
