"""Responses with choices, and their streams as chunks: OpenAI's chat completions and completions.

The chunks add up to the response, however tokens are batched into steps. A token costs a join and an escape: the rest
of a chunk is formatted once per choice.
"""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from json.encoder import encode_basestring
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

from onward import __version__
from onward.errors import OnwardError
from onward.language_model import Completion, Piece
from onward.protocols.body import error_fields
from onward.protocols.protocol import ParsedBody, Protocol
from onward.sampling import TokenLogprobs
from onward.tokenizer.text_stream import TokenText, TokenTexts


class Usage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"]
    logprobs: dict[str, Any] | None
    receipt: dict[str, Any] | None = None


class ChoicesResponse(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    seed: int | None
    usage: Usage


def finish_reason(text: Completion) -> str:
    """OpenAI's finish reason: "tool_calls" if there are calls to run. A stop string that cuts off the last call leaves
    nothing to run: "stop"."""
    if text.finish_reason != "stop":  # including time limits, for which OpenAI has no other reason
        return "length"
    if text.message is None or not text.message.tool_calls:
        return "stop"
    is_cut = isinstance(text.stopped_by, str) and not text.message.tool_calls[-1].is_whole
    return "stop" if is_cut else "tool_calls"


def _usage(completions: Sequence[Completion]) -> dict[str, Any]:
    prompt = sum(completion.prompt_tokens for completion in completions)
    texts = [text for completion in completions for text in completion.choices]
    new = sum(len(text.token_ids) for text in texts)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(completion.cached_tokens for completion in completions)},
    }
    details = {}
    if reasoning := sum(text.reasoning_tokens or 0 for text in texts):
        details["reasoning_tokens"] = reasoning
    if drafts := [text.speculation for text in texts if text.speculation]:
        details["accepted_prediction_tokens"] = accepted = sum(draft.accepted for draft in drafts)
        details["rejected_prediction_tokens"] = sum(draft.drafted for draft in drafts) - accepted
    usage |= {"completion_tokens_details": details} if details else {}
    return usage | weights_version(completions)


def weights_version(completions: Sequence[Completion]) -> dict[str, int]:
    """The field of usage with the number of the newest weights that computed a token, unless that is 0."""
    runs = (run for completion in completions for text in completion.choices for run in text.weights_versions)
    newest = max((version for _, version in runs), default=0)
    return {"weights_version": newest} if newest else {}


def _versions(text: Completion) -> list[int]:
    """The version of the weights of each token."""
    starts = [*(first for first, _ in text.weights_versions), len(text.token_ids)]
    runs = zip(pairwise(starts), text.weights_versions, strict=True)
    return [version for (first, end), (_, version) in runs for _ in range(first, end)]


class ChoiceStream:
    """One choice as JSON, in parts. texts: of its tokens, if logprobs are asked for. with_ids: whether the parts have
    token ids."""

    opening: str  # JSON before the content
    closing: str  # and after it
    empty: str  # the last chunk's content

    def __init__(self, number: int, texts: TokenTexts | None, with_ids: bool) -> None:
        self._number, self._texts, self._with_ids = number, texts, with_ids
        self._is_plain = texts is None and not with_ids
        self._tokens = 0  # sent
        self._pending: list[tuple[int, TokenLogprobs]] = []  # tokens whose texts are not final
        self._before = f'{{"index":{number},{self.opening}'
        self._after = f'{self.closing},"logprobs":null,"finish_reason":null}}'

    def joined(self, pieces: Sequence[Piece]) -> Any:
        """The content of pieces."""
        raise NotImplementedError

    def unsent(self, completion: Completion) -> Any:
        """The content that was not sent as pieces."""
        raise NotImplementedError

    def plain(self, content: Any) -> str | None:
        """The text of content that is nothing else."""
        raise NotImplementedError

    def fields(self, content: Any) -> dict[str, Any]:
        raise NotImplementedError

    def logprobs(self, tokens: Sequence[TokenText], ids: list[int], entries: list[TokenLogprobs]) -> dict[str, Any]:
        raise NotImplementedError

    def push(self, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        """The parts for new pieces, each with the number of pieces complete after it."""
        content = self.joined(pieces)
        self._tokens += len(pieces)
        details = None if self._is_plain else self._details(pieces)
        return [(len(pieces), part) for part in self._parts(content, details)]

    def rest(self, completion: Completion) -> list[str]:
        """The parts for what was not sent as pieces."""
        content = self.unsent(completion)
        entries = [None] * len(completion.token_ids) if completion.logprobs is None else completion.logprobs
        tokens = list(zip(completion.token_ids, entries, _versions(completion), strict=True))[self._tokens :]
        pieces = [Piece("", id, entry, weights_version=version) for id, entry, version in tokens]
        return self._parts(content, self._details(pieces, is_last=True))

    def finish(self, reason: str, fields: Mapping[str, Any]) -> str:
        rest = "".join(f',"{name}":{as_json(value)}' for name, value in fields.items())
        return f'{{"index":{self._number},{self.empty},"logprobs":null,"finish_reason":"{reason}"{rest}}}'

    def text(self, text: str) -> str:
        """A part with a text alone."""
        return f"{self._before}{encode_basestring(text)}{self._after}"

    def _parts(self, content: Any, details: Mapping[str, Any] | None) -> list[str]:
        if details is None:
            if not content:
                return []
            if (text := self.plain(content)) is not None:
                return [self.text(text)]
        details = {"logprobs": None, **(details or {}), "finish_reason": None}
        return [as_json({"index": self._number, **self.fields(content), **details})]

    def _details(self, pieces: Sequence[Piece], *, is_last: bool = False) -> dict[str, Any] | None:
        """The fields of a part with these pieces besides the content; None if there are none."""
        final: list[TokenText] = []
        if self._texts is not None:
            for piece in pieces:
                assert piece.logprobs is not None, "logprobs were asked for"
                final += self._texts.push(piece.token_id, piece.logprobs)
                self._pending.append((piece.token_id, piece.logprobs))
            final += self._texts.flush() if is_last else ()
        ids = [piece.token_id for piece in pieces] if self._with_ids else []
        if not final and not ids:
            return None
        entries, self._pending = self._pending[: len(final)], self._pending[len(final) :]
        columns = [id for id, _ in entries], [entry for _, entry in entries]
        details: dict[str, Any] = {"logprobs": self.logprobs(final, *columns) if final else None}
        if self._with_ids:
            details["token_ids"] = ids
            if any(piece.drafted for piece in pieces):
                details["drafted"] = [piece.drafted for piece in pieces]
            if any(piece.weights_version for piece in pieces):
                details["weights_versions"] = [piece.weights_version for piece in pieces]
        return details


class ChunkEvents:
    """The chunks of one response as server-sent events. A chunk has one choice. The first of a choice has its role; the
    last has its finish_reason and no content."""

    def __init__(self, protocol: "ChoicesProtocol", body: ParsedBody) -> None:
        self._protocol, self._body = protocol, body
        head = as_json(protocol.head(body, protocol.chunk_kind, body.seed))
        self._opening = f'data: {head[:-1]},"choices":['
        self._closing = '],"usage":null}\n\n' if body.values.include_usage else "]}\n\n"
        self._choices: dict[int, ChoiceStream] = {}
        self._completions: dict[int, Completion] = {}

    def begin(self, at: int) -> list[str]:
        """The prompt of request `at`, if the response echoes it."""
        if self._body.echoes is None:
            return []
        numbers = range(self._body.requests[at].options.n)
        return [self._chunk(self._choice(at, number).text(self._body.echoes[at])) for number in numbers]

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        return [(count, self._chunk(part)) for count, part in self._choice(at, pieces[0].choice).push(pieces)]

    def end(self, at: int, completion: Completion) -> list[str]:
        """The chunks for the remaining content of request `at`, and the finish reasons."""
        self._completions[at] = completion
        parts = []
        for number, text in enumerate(completion.choices):
            choice = self._choice(at, number)
            reason = self._protocol.finish_reason(self._body, text)
            parts += [*choice.rest(text), choice.finish(reason, self._body.receipt(text))]
        return list(map(self._chunk, parts))

    def finish(self) -> list[str]:
        """The usage, if the body asks for it, and the end mark."""
        done = ["data: [DONE]\n\n"]
        if not self._body.values.include_usage:
            return done
        usage = _usage([self._completions[at] for at in range(len(self._body.requests))])
        return [f'{self._opening}],"usage":{as_json(usage)}}}\n\n', *done]

    def error(self, error: OnwardError) -> list[str]:
        return [f"data: {as_json({'error': error_fields(error)})}\n\n"]

    def _choice(self, at: int, choice: int) -> ChoiceStream:
        request = self._body.requests[at]
        number = at * request.options.n + choice
        if number not in self._choices:
            texts = None if request.options.logprobs is None else TokenTexts(request.prompt, self._body.tokenizer)
            stream = self._protocol.stream_of(self._body)
            self._choices[number] = stream(number, texts, self._body.values.return_token_ids)
        return self._choices[number]

    def _chunk(self, choice: str) -> str:
        return f"{self._opening}{choice}{self._closing}"


class ChoicesProtocol(Protocol):
    """A protocol whose responses have choices. prefix: of ids. chunk_kind: type of the chunk objects."""

    prefix: ClassVar[str]
    chunk_kind: ClassVar[str]

    @abstractmethod
    def choice(self, body: ParsedBody, at: int, completion: Completion, text: Completion) -> dict[str, Any]:
        """Return the content of a choice. text: the choice, of the `completion` of request `at`."""

    def finish_reason(self, body: ParsedBody, text: Completion) -> str:
        """Return why a choice ended."""
        return finish_reason(text)

    @abstractmethod
    def stream_of(self, body: ParsedBody) -> type[ChoiceStream]:
        """Return the class of the streams of choices."""

    def answer(self, body: ParsedBody, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the response. "seed" is that of the first completion: the same body with it gives the same
        response."""
        choices: list[dict[str, Any]] = []
        for at, completion in enumerate(completions):
            for text in completion.choices:
                choice = {"index": len(choices), **self.choice(body, at, completion, text)}
                if body.values.return_token_ids:
                    choice["token_ids"] = text.token_ids
                    if any(versions := _versions(text)):
                        choice["weights_versions"] = versions
                choices.append(choice | {"finish_reason": self.finish_reason(body, text), **body.receipt(text)})
        head = self.head(body, self.kind, completions[0].seed)
        return {**head, "choices": choices, "usage": _usage(completions)}

    def events(self, body: ParsedBody) -> ChunkEvents:
        return ChunkEvents(self, body)

    def head(self, body: ParsedBody, kind: str, seed: int | None) -> dict[str, Any]:
        """Return the fields common to a response and its chunks. kind: the object type."""
        return {
            "id": f"{self.prefix}-{body.key.text}",
            "object": kind,
            "created": body.key.created,
            "model": body.model,
            "system_fingerprint": f"onward-{__version__}",
            "seed": seed,
        }


def as_json(value: Any) -> str:
    """Compact JSON, with non-ASCII characters unescaped."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
