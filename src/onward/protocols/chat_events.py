"""Completions as chunks: what a stream sends of an answer while its texts grow.

What the chunks add up to is the answer of `answer_body`, whatever came in which step. A token costs a join and an
escape: everything else of a chunk is written once for each choice.
"""

import json
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

from onward.chat import MessageDelta
from onward.language_model import Completion, Piece
from onward.protocols.chat import (
    answer_head,
    chat_logprobs,
    delta_body,
    delta_of,
    finish_reason,
    text_logprobs,
    usage_of,
)
from onward.protocols.schema import ParsedBody
from onward.sampling import TokenLogprobs
from onward.tokenizer import Tokenizer
from onward.tokenizer.text_stream import TokenText, TokenTexts

_CHUNKS = {"chat.completion": "chat.completion.chunk", "text_completion": "text_completion"}


class ChunkStream:
    """The chunks of the answer to one body, each as JSON. `begin` comes first, `usage` last.

    A chunk has one choice. The first of a choice has its role, the last its finish_reason and no content.
    """

    def __init__(self, body: ParsedBody, tokenizer: Tokenizer, version: str) -> None:
        self._body, self._tokenizer = body, tokenizer
        head = as_json(answer_head(body, _CHUNKS[body.kind], body.seed, version))
        self._opening = f'{head[:-1]},"choices":['
        self._closing = '],"usage":null}' if body.include_usage else "]}"
        self._choices: dict[int, _ChatChoice | _TextChoice] = {}
        self._completions: dict[int, Completion] = {}

    def begin(self, at: int) -> list[str]:
        """The prompt numbered `at`, where the answer begins with it."""
        if self._body.echoes is None:
            return []
        chunks = []
        for number in range(self._body.requests[at].options.n):
            choice = self._choice(at, number)
            assert isinstance(choice, _TextChoice), "a chat has no echo"
            chunks.append(self._chunk(choice.echo(self._body.echoes[at])))
        return chunks

    def pieces(self, at: int, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        """The chunks of what a text of the request numbered `at` has brought since, each with how many of these pieces
        are told with it. Chunks of more pieces at once, or of fewer, add up to the same."""
        return [(told, self._chunk(chunk)) for told, chunk in self._choice(at, pieces[0].choice).grow(pieces)]

    def end(self, at: int, completion: Completion) -> list[str]:
        """What pieces have not brought, and how the texts have ended."""
        self._completions[at] = completion
        chunks = []
        for number, text in enumerate(completion.choices):
            choice = self._choice(at, number)
            chunks += [*choice.rest(text), choice.finish(finish_reason(text))]
        return [self._chunk(chunk) for chunk in chunks]

    def usage(self) -> list[str]:
        """The last chunk, where it was asked for. All requests have ended."""
        if not self._body.include_usage:
            return []
        usage = usage_of([self._completions[at] for at in range(len(self._body.requests))])
        return [f'{self._opening}],"usage":{as_json(usage)}}}']

    def _choice(self, at: int, choice: int) -> "_ChatChoice | _TextChoice":
        request = self._body.requests[at]
        number = at * request.options.n + choice
        if number not in self._choices:
            kind = _ChatChoice if self._body.kind == "chat.completion" else _TextChoice
            texts = None if request.options.logprobs is None else TokenTexts(request.prompt, self._tokenizer)
            self._choices[number] = kind(number, texts, self._body.return_token_ids)
        return self._choices[number]

    def _chunk(self, choice: str) -> str:
        return f"{self._opening}{choice}{self._closing}"


class _Choice:
    """What has been sent of one text.

    texts: of its tokens, where logprobs are asked for. with_ids: whether chunks have the ids of their tokens.
    """

    def __init__(self, number: int, texts: TokenTexts | None, with_ids: bool) -> None:
        self._number, self._texts, self._with_ids = number, texts, with_ids
        self._is_plain = texts is None and not with_ids
        self._tokens = 0  # sent
        self._waiting: list[tuple[int, TokenLogprobs]] = []  # tokens whose texts are not final

    def _details(self, pieces: Sequence[Piece], *, is_last: bool = False) -> dict[str, Any] | None:
        """What a chunk has beside the text of these tokens; None where that is nothing."""
        final = []
        for piece in pieces:
            if self._texts is not None:
                assert piece.logprobs is not None, "logprobs were asked for"
                final += self._texts.push(piece.token_id, piece.logprobs)
                self._waiting.append((piece.token_id, piece.logprobs))
        if is_last and self._texts is not None:
            final += self._texts.flush()
        told, self._waiting = self._waiting[: len(final)], self._waiting[len(final) :]
        logprobs = None
        if final:
            logprobs = self._logprobs(final, [id for id, _ in told], [entry for _, entry in told])
        ids = [piece.token_id for piece in pieces] if self._with_ids else []
        if logprobs is None and not ids:
            return None
        details = {"logprobs": logprobs} | ({"token_ids": ids} if self._with_ids else {})
        if self._with_ids and any(piece.drafted for piece in pieces):
            details["drafted"] = [piece.drafted for piece in pieces]
        return details

    def _logprobs(self, tokens: Sequence[TokenText], ids: list[int], entries: list[TokenLogprobs]) -> dict[str, Any]:
        raise NotImplementedError

    def _written(self, content: Mapping[str, Any], details: Mapping[str, Any] | None) -> str:
        choice = {"index": self._number, **content, "logprobs": None, **(details or {}), "finish_reason": None}
        return as_json(choice)

    def _untold(self, whole: Completion) -> list[Piece]:
        """The tokens of a text that have not come as pieces."""
        at = self._tokens
        entries = [None] * len(whole.token_ids) if whole.logprobs is None else whole.logprobs
        return [Piece("", *token) for token in zip(whole.token_ids[at:], entries[at:], strict=True)]


class _ChatChoice(_Choice):
    def __init__(self, number: int, texts: TokenTexts | None, with_ids: bool) -> None:
        super().__init__(number, texts, with_ids)
        self._has_role = False
        self._before = f'{{"index":{number},"delta":{{"content":'
        self._after = '},"logprobs":null,"finish_reason":null}'

    def grow(self, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        """The choices of chunks with these tokens, each with how many of them are told then. Reasoning and calls have
        chunks of their own."""
        deltas = [piece.message for piece in pieces if piece.message is not None]
        if len(pieces) > 1 and any(delta.reasoning or delta.tool_calls for delta in deltas):
            return [(at + 1, chunk) for at, piece in enumerate(pieces) for _, chunk in self.grow([piece])]
        self._tokens += len(pieces)
        delta = deltas[0] if len(deltas) == 1 else MessageDelta("".join([delta.content for delta in deltas]))
        if not self._is_plain:
            return [(len(pieces), chunk) for chunk in self._detailed(delta, self._details(pieces))]
        if not delta:
            return []
        if self._has_role and not (delta.reasoning or delta.tool_calls):
            return [(len(pieces), f"{self._before}{encode_basestring(delta.content)}{self._after}")]
        return [(len(pieces), self._written({"delta": self._delta(delta)}, None))]

    def rest(self, whole: Completion) -> list[str]:
        """The choices of chunks with what pieces have not brought: the messages of beams, waiting logprobs, a role."""
        untold = self._untold(whole)
        delta = MessageDelta()
        if whole.message is not None and not self._tokens:
            delta = delta_of(whole.message)
        chunks = self._detailed(delta, self._details(untold, is_last=True))
        if not chunks and not self._has_role:
            chunks = [self._written({"delta": self._delta(delta)}, None)]
        return chunks

    def finish(self, reason: str) -> str:
        return f'{{"index":{self._number},"delta":{{}},"logprobs":null,"finish_reason":"{reason}"}}'

    def _detailed(self, delta: MessageDelta, details: Mapping[str, Any] | None) -> list[str]:
        return [self._written({"delta": self._delta(delta)}, details)] if delta or details is not None else []

    def _delta(self, delta: MessageDelta) -> dict[str, Any]:
        role = {} if self._has_role else {"role": "assistant"}
        self._has_role = True
        return role | (delta_body(delta) or {"content": ""})

    def _logprobs(self, tokens: Sequence[TokenText], ids: list[int], entries: list[TokenLogprobs]) -> dict[str, Any]:
        return chat_logprobs(tokens, ids, entries)


class _TextChoice(_Choice):
    def __init__(self, number: int, texts: TokenTexts | None, with_ids: bool) -> None:
        super().__init__(number, texts, with_ids)
        self._characters = 0  # sent
        self._offset = 0  # of the next token in the text
        self._before = f'{{"index":{number},"text":'
        self._after = ',"logprobs":null,"finish_reason":null}'

    def echo(self, text: str) -> str:
        """The choice of a chunk with the prompt."""
        return f"{self._before}{encode_basestring(text)}{self._after}"

    def grow(self, pieces: Sequence[Piece]) -> list[tuple[int, str]]:
        """The choices of chunks with these tokens, each with how many of them are told then."""
        text = pieces[0].text if len(pieces) == 1 else "".join([piece.text for piece in pieces])
        self._tokens += len(pieces)
        self._characters += len(text)
        if self._is_plain:
            return [(len(pieces), f"{self._before}{encode_basestring(text)}{self._after}")] if text else []
        return [(len(pieces), chunk) for chunk in self._detailed(text, self._details(pieces))]

    def rest(self, whole: Completion) -> list[str]:
        """The choices of chunks with what pieces have not brought: texts of beams, and what was held back at a cut."""
        text = whole.text[self._characters :]
        return self._detailed(text, self._details(self._untold(whole), is_last=True))

    def finish(self, reason: str) -> str:
        return f'{{"index":{self._number},"text":"","logprobs":null,"finish_reason":"{reason}"}}'

    def _detailed(self, text: str, details: Mapping[str, Any] | None) -> list[str]:
        return [self._written({"text": text}, details)] if text or details is not None else []

    def _logprobs(self, tokens: Sequence[TokenText], ids: list[int], entries: list[TokenLogprobs]) -> dict[str, Any]:
        offset = self._offset
        self._offset += sum(len(token.text) for token in tokens)
        return text_logprobs(tokens, ids, entries, offset, with_content=self._with_ids)


def as_json(value: Any) -> str:
    """JSON for the wire, in UTF-8's own characters."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
