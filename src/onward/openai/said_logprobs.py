"""Logprobs of what an answer says: the tokens of its content alone, not those of reasoning, calls and marks."""

from collections.abc import Sequence
from typing import Any

from onward.checkpoint import Tokenizer
from onward.completion import Completion, Piece
from onward.decoding import TokenLogprobs
from onward.decoding.text import TokenText, TokenTexts
from onward.openai.answer import logprob_entries
from onward.requests import Request


class SaidLogprobs:
    """Finds the tokens of one answer's content as they come.

    The answer is read a token at a time, as a message. A token is of the content where a character of it is, or where
    it is a part of one. Text that is held back, since it may begin a mark, is told when it is certain.
    """

    def __init__(self, request: Request, seed: int | None, tokenizer: Tokenizer) -> None:
        assert request.answer is not None, "the text of a chat is read as a message"
        self._parser = request.answer.parser(request.prompt, seed)
        self._marks = dict(request.answer.marks)
        self._texts = TokenTexts(request.prompt, tokenizer)
        self._coming: list[tuple[int, TokenLogprobs]] = []  # tokens whose texts are not final
        # Since the last content: texts, each with the entries of its tokens that were not told.
        self._read: list[tuple[str, list[dict[str, Any]]]] = []
        self.pushed = 0

    def push(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """The entries that are certain with these tokens."""
        told: list[dict[str, Any]] = []
        for piece in pieces:
            assert piece.logprobs is not None, "logprobs were asked for"
            self.pushed += 1
            self._coming.append((piece.token_id, piece.logprobs))
            told += self._settle(self._texts.push(piece.token_id, piece.logprobs))
        return told

    def rest(self, completion: Completion) -> list[dict[str, Any]]:
        """The entries of a text that has ended, but for those that were told."""
        entries = completion.logprobs or ()
        tokens = list(zip(completion.token_ids, entries, strict=True))[self.pushed :]
        told = self.push([Piece("", id, entry) for id, entry in tokens])
        told += self._settle(self._texts.flush())
        self._parser.finish()
        return told + self._said(self._parser.take().content)

    def _settle(self, final: Sequence[TokenText]) -> list[dict[str, Any]]:
        """Read tokens whose texts have become final."""
        told: list[dict[str, Any]] = []
        entries: list[dict[str, Any]] = []  # of the parts of a character, which is in the last of them
        for at, token in enumerate(final, 1):
            id, entry = self._coming.pop(0)
            entries += logprob_entries([token], [id], [entry])
            text = self._marks.get(id, token.text)
            if token.bytes and not text and at < len(final):
                continue
            self._parser.feed(text)
            self._read.append((text, entries))
            told += self._said(self._parser.take().content)
            entries = []
        return told

    def _said(self, content: str) -> list[dict[str, Any]]:
        """The entries of the tokens that have this content, which ends the text that was read but for what is held."""
        if not content:
            return []
        begin = "".join(text for text, _ in self._read).rfind(content)
        end, at = begin + len(content), 0
        told: list[dict[str, Any]] = []
        rest: list[tuple[str, list[dict[str, Any]]]] = []
        for text, entries in self._read:
            after = at + len(text)
            if at < end and after > begin:
                told += entries
                entries = []
            if after > end:
                rest.append((text[max(0, end - at) :], entries))
            at = after
        self._read = rest
        return told
