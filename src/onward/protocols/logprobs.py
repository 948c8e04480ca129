"""Log-probabilities of tokens in OpenAI's format, and which of them belong to a message's content."""

import math
from collections.abc import Sequence
from typing import Any

from onward.language_model import Completion, Piece, Request
from onward.sampling import TokenLogprobs
from onward.tokenizer import Tokenizer
from onward.tokenizer.text_stream import TokenText, TokenTexts, token_texts

_MIN_LOGPROB = -9999.0  # OpenAI's value for minus infinity, which JSON doesn't have


def logprob_entries(
    tokens: Sequence[TokenText], ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any]]:
    """The tokens in a chat's logprobs. "id", "sampling_logprob" and "support" are extensions."""
    content = []
    for token, id, entry in zip(tokens, ids, entries, strict=True):
        if entry is None:  # the first token of a prompt
            content.append({**_with_bytes(token, id, 0.0), "logprob": None, "top_logprobs": []})
        else:
            top = [_with_bytes(other, *pair) for other, pair in zip(token.top, entry.top, strict=True)]
            content.append(_with_bytes(token, id, entry.chosen) | {"top_logprobs": top} | _of_sampling(entry))
    return content


def _with_bytes(token: TokenText, id: int, logprob: float) -> dict[str, Any]:
    return {"token": token.text, "logprob": finite(logprob), "bytes": list(token.bytes), "id": id}


def _of_sampling(entry: TokenLogprobs) -> dict[str, Any]:
    if entry.sampling is None:
        return {}
    return {"sampling_logprob": finite(entry.sampling), "support": entry.support}


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _MIN_LOGPROB


def prompt_logprobs(
    request: Request, completion: Completion, tokenizer: Tokenizer
) -> list[dict[str, dict[str, Any]] | None]:
    """The logprobs of a prompt in vLLM's format: for each token, itself and the top alternatives. rank: 1 for the
    likeliest; None for a token that is not among the listed ones."""
    prompt, entries = request.prompt, completion.prompt_logprobs
    assert entries is not None, "the body asks for them"
    listed: list[dict[str, dict[str, Any]] | None] = []
    for id, entry, token in zip(prompt, entries, token_texts(prompt, entries, (), tokenizer), strict=True):
        if entry is None:
            listed.append(None)
            continue
        own = {"logprob": finite(entry.chosen), "rank": None, "decoded_token": token.text}
        likeliest = {
            str(other): {"logprob": finite(logprob), "rank": rank, "decoded_token": text.text}
            for rank, ((other, logprob), text) in enumerate(zip(entry.top, token.top, strict=True), 1)
        }
        listed.append({str(id): own, **likeliest})
    return listed


class ContentLogprobs:
    """Selects the logprobs of a message's content while it is generated. The text is parsed token by token. A token
    belongs to the content if one of its characters does, or a part of one. Text that may be the start of a mark is held
    back until that is certain."""

    def __init__(self, request: Request, seed: int | None, tokenizer: Tokenizer) -> None:
        assert request.answer is not None, "a chat's text is parsed as a message"
        self._parser = request.answer.parser(request.prompt, seed)
        self._marks = dict(request.answer.marks)
        self._texts = TokenTexts(request.prompt, tokenizer)
        self._pending: list[tuple[int, TokenLogprobs]] = []  # tokens whose texts are not final
        # The texts since the last content, each with the unsent entries of its tokens.
        self._read: list[tuple[str, list[dict[str, Any]]]] = []
        self.pushed = 0

    def push(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """The entries of content that is certain after these tokens."""
        new: list[dict[str, Any]] = []
        for piece in pieces:
            assert piece.logprobs is not None, "logprobs were asked for"
            self.pushed += 1
            self._pending.append((piece.token_id, piece.logprobs))
            new += self._settle(self._texts.push(piece.token_id, piece.logprobs))
        return new

    def rest(self, completion: Completion) -> list[dict[str, Any]]:
        """The remaining entries of a finished text."""
        tokens = list(zip(completion.token_ids, completion.logprobs or (), strict=True))[self.pushed :]
        new = self.push([Piece("", id, entry) for id, entry in tokens])
        new += self._settle(self._texts.flush())
        self._parser.finish()
        return new + self._match(self._parser.take().content)

    def _settle(self, final: Sequence[TokenText]) -> list[dict[str, Any]]:
        """Parse tokens whose texts are final."""
        new: list[dict[str, Any]] = []
        entries: list[dict[str, Any]] = []  # of a character's tokens, whose text is in the last one
        for at, token in enumerate(final, 1):
            id, entry = self._pending.pop(0)
            entries += logprob_entries([token], [id], [entry])
            text = self._marks.get(id, token.text)
            if token.bytes and not text and at < len(final):
                continue
            self._parser.feed(text)
            self._read.append((text, entries))
            new += self._match(self._parser.take().content)
            entries = []
        return new

    def _match(self, content: str) -> list[dict[str, Any]]:
        """The entries of the tokens with this content: a suffix of the text read so far, apart from what is held
        back."""
        if not content:
            return []
        begin = "".join(text for text, _ in self._read).rfind(content)
        end, at = begin + len(content), 0
        new: list[dict[str, Any]] = []
        rest: list[tuple[str, list[dict[str, Any]]]] = []
        for text, entries in self._read:
            after = at + len(text)
            if at < end and after > begin:
                new += entries
                entries = []
            if after > end:
                rest.append((text[max(0, end - at) :], entries))
            at = after
        self._read = rest
        return new
