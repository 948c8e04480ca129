"""Completions as chunks: the messages of a stream while its texts grow.

The chunks add up to the `answer_body`, however tokens are batched into steps. A token costs a join and an escape: the
rest of a chunk is formatted once per choice.
"""

import json
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

from onward.chat import MessageDelta
from onward.errors import OnwardError
from onward.language_model import Completion, Piece
from onward.protocols.answers import (
    answer_body,
    answer_head,
    chat_logprobs,
    delta_body,
    delta_of,
    finish_reason,
    text_logprobs,
    usage_of,
)
from onward.protocols.errors import error_fields
from onward.protocols.protocol import ParsedBody, Protocol
from onward.sampling import TokenLogprobs
from onward.tokenizer import Tokenizer
from onward.tokenizer.text_stream import TokenText, TokenTexts

_CHUNKS = {"chat.completion": "chat.completion.chunk", "text_completion": "text_completion"}


class ChunkStream:
    """The chunks of the response to one body, each as JSON. Call `begin` first and `usage` last. A chunk has one
    choice. The first of a choice has its role; the last has its finish_reason and no content."""

    def __init__(self, body: ParsedBody, tokenizer: Tokenizer, version: str) -> None:
        self._body, self._tokenizer = body, tokenizer
        head = as_json(answer_head(body, _CHUNKS[body.kind], body.seed, version))
        self._opening = f'{head[:-1]},"choices":['
        self._closing = '],"usage":null}' if body.values.include_usage else "]}"
        self._choices: dict[int, _ChatChoice | _TextChoice] = {}
        self._completions: dict[int, Completion] = {}

    def begin(self, at: int) -> list[str]:
        """The prompt of request `at`, if the response echoes it."""
        if self._body.echoes is None:
            return []
        chunks = []
        for number in range(self._body.requests[at].options.n):
            choice = self._choice(at, number)
            assert isinstance(choice, _TextChoice), "chats have no echo"
            chunks.append(self._chunk(choice.echo(self._body.echoes[at])))
        return chunks

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        """The chunks for new pieces of one sequence of request `at`, each with the number of pieces complete after it.
        Chunks add up to the same text however pieces are batched."""
        return [(count, self._chunk(chunk)) for count, chunk in self._choice(at, pieces[0].choice).push(pieces)]

    def end(self, at: int, completion: Completion) -> list[str]:
        """The chunks for the remaining content of request `at`, and the finish reasons."""
        self._completions[at] = completion
        chunks = []
        for number, text in enumerate(completion.choices):
            choice = self._choice(at, number)
            chunks += [*choice.rest(text), choice.finish(finish_reason(text))]
        return [self._chunk(chunk) for chunk in chunks]

    def usage(self) -> list[str]:
        """The last chunk, if the body asks for it. All requests have ended."""
        if not self._body.values.include_usage:
            return []
        usage = usage_of([self._completions[at] for at in range(len(self._body.requests))])
        return [f'{self._opening}],"usage":{as_json(usage)}}}']

    def _choice(self, at: int, choice: int) -> "_ChatChoice | _TextChoice":
        request = self._body.requests[at]
        number = at * request.options.n + choice
        if number not in self._choices:
            kind = _ChatChoice if self._body.kind == "chat.completion" else _TextChoice
            texts = None if request.options.logprobs is None else TokenTexts(request.prompt, self._tokenizer)
            self._choices[number] = kind(number, texts, self._body.values.return_token_ids)
        return self._choices[number]

    def _chunk(self, choice: str) -> str:
        return f"{self._opening}{choice}{self._closing}"


class ChunkEvents:
    """Chunks as server-sent events."""

    per_piece = False

    def __init__(self, body: ParsedBody, tokenizer: Tokenizer, version: str) -> None:
        self._chunks = ChunkStream(body, tokenizer, version)

    def begin(self, at: int) -> list[str]:
        return list(map(_event, self._chunks.begin(at)))

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        return [(count, _event(chunk)) for count, chunk in self._chunks.pieces(at, pieces)]

    def end(self, at: int, completion: Completion) -> list[str]:
        return list(map(_event, self._chunks.end(at, completion)))

    def finish(self) -> list[str]:
        return list(map(_event, [*self._chunks.usage(), "[DONE]"]))

    def error(self, error: OnwardError) -> list[str]:
        return [_event(as_json({"error": error_fields(error)}))]


class ChunkedProtocol(Protocol):
    """A protocol whose responses have choices, and whose streams are chunks of them."""

    def answer(
        self, body: ParsedBody, completions: Sequence[Completion], tokenizer: Tokenizer, version: str
    ) -> dict[str, Any]:
        return answer_body(body, completions, tokenizer, version)

    def events(self, body: ParsedBody, tokenizer: Tokenizer, version: str) -> ChunkEvents:
        return ChunkEvents(body, tokenizer, version)


def _event(chunk: str) -> str:
    return f"data: {chunk}\n\n"


class _Choice:
    """The state of one choice. texts: of its tokens, if logprobs are asked for. with_ids: whether chunks have token
    ids."""

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

    def finish(self, reason: str) -> str:
        return f'{{"index":{self._number},{self.empty},"logprobs":null,"finish_reason":"{reason}"}}'

    def _details(self, pieces: Sequence[Piece], *, is_last: bool = False) -> dict[str, Any] | None:
        """The fields of a chunk with these pieces besides the content; None if there are none."""
        final = []
        for piece in pieces:
            if self._texts is not None:
                assert piece.logprobs is not None, "logprobs were asked for"
                final += self._texts.push(piece.token_id, piece.logprobs)
                self._pending.append((piece.token_id, piece.logprobs))
        if is_last and self._texts is not None:
            final += self._texts.flush()
        entries, self._pending = self._pending[: len(final)], self._pending[len(final) :]
        logprobs = None
        if final:
            logprobs = self._logprobs(final, [id for id, _ in entries], [entry for _, entry in entries])
        ids = [piece.token_id for piece in pieces] if self._with_ids else []
        if logprobs is None and not ids:
            return None
        details = {"logprobs": logprobs} | ({"token_ids": ids} if self._with_ids else {})
        if self._with_ids and any(piece.drafted for piece in pieces):
            details["drafted"] = [piece.drafted for piece in pieces]
        return details

    def _detailed(self, content: Any, details: Mapping[str, Any] | None) -> list[str]:
        return [self._json(content, details)] if content or details is not None else []

    def _json(self, content: Any, details: Mapping[str, Any] | None) -> str:
        fields = {"logprobs": None, **(details or {}), "finish_reason": None}
        return as_json({"index": self._number, **self._content(content), **fields})

    def _content(self, content: Any) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, tokens: Sequence[TokenText], ids: list[int], entries: list[TokenLogprobs]) -> dict[str, Any]:
        raise NotImplementedError

    def _unsent(self, completion: Completion) -> list[Piece]:
        """The tokens of a completion that were not sent as pieces."""
        entries = [None] * len(completion.token_ids) if completion.logprobs is None else completion.logprobs
        tokens = zip(completion.token_ids, entries, strict=True)
        return [Piece("", *token) for token in list(tokens)[self._tokens :]]


class _ChatChoice(_Choice):
    opening, closing, empty = '"delta":{"content":', "}", '"delta":{}'
    _has_role = False

    def push(self, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        """The choices for new pieces, each with the number of pieces complete after it. Reasoning and tool calls have
        chunks of their own."""
        deltas = [piece.message for piece in pieces if piece.message is not None]
        if len(pieces) > 1 and any(delta.reasoning or delta.tool_calls for delta in deltas):
            return [(at + 1, chunk) for at, piece in enumerate(pieces) for _, chunk in self.push([piece])]
        self._tokens += len(pieces)
        delta = deltas[0] if len(deltas) == 1 else MessageDelta("".join([delta.content for delta in deltas]))
        if not self._is_plain:
            return [(len(pieces), chunk) for chunk in self._detailed(delta, self._details(pieces))]
        if not delta:
            return []
        if self._has_role and not (delta.reasoning or delta.tool_calls):
            return [(len(pieces), f"{self._before}{encode_basestring(delta.content)}{self._after}")]
        return [(len(pieces), self._json(delta, None))]

    def rest(self, completion: Completion) -> list[str]:
        """The choices for what was not sent as pieces: messages of beam search, pending logprobs, the role."""
        delta = MessageDelta()
        if completion.message is not None and not self._tokens:
            delta = delta_of(completion.message)
        chunks = self._detailed(delta, self._details(self._unsent(completion), is_last=True))
        return chunks if chunks or self._has_role else [self._json(delta, None)]

    def _content(self, delta: MessageDelta) -> dict[str, Any]:
        role = {} if self._has_role else {"role": "assistant"}
        self._has_role = True
        return {"delta": role | (delta_body(delta) or {"content": ""})}

    def _logprobs(self, tokens: Sequence[TokenText], ids: list[int], entries: list[TokenLogprobs]) -> dict[str, Any]:
        return chat_logprobs(tokens, ids, entries)


class _TextChoice(_Choice):
    opening, closing, empty = '"text":', "", '"text":""'
    _characters = 0  # sent
    _offset = 0  # of the next token in the text

    def echo(self, prompt: str) -> str:
        return f"{self._before}{encode_basestring(prompt)}{self._after}"

    def push(self, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        """The choices for new pieces, each with the number of pieces complete after it."""
        text = pieces[0].text if len(pieces) == 1 else "".join([piece.text for piece in pieces])
        self._tokens += len(pieces)
        self._characters += len(text)
        if self._is_plain:
            return [(len(pieces), f"{self._before}{encode_basestring(text)}{self._after}")] if text else []
        return [(len(pieces), chunk) for chunk in self._detailed(text, self._details(pieces))]

    def rest(self, completion: Completion) -> list[str]:
        """The choices for what was not sent as pieces: texts of beam search, and text held back at a cut."""
        text = completion.text[self._characters :]
        return self._detailed(text, self._details(self._unsent(completion), is_last=True))

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, tokens: Sequence[TokenText], ids: list[int], entries: list[TokenLogprobs]) -> dict[str, Any]:
        offset = self._offset
        self._offset += sum(len(token.text) for token in tokens)
        return text_logprobs(tokens, ids, entries, offset, with_content=self._with_ids)


def as_json(value: Any) -> str:
    """Compact JSON, with non-ASCII characters unescaped."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
