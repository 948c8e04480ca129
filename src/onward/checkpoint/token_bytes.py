"""The bytes of single tokens, which may be a part of a character."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def own_bytes(inner: tokenizers.Tokenizer) -> Callable[[str], bytes | None]:
    """A function of a token as the vocabulary spells it: the bytes that it adds to every text.

    They follow from the decoder: a byte-level one writes every token as bytes, byte fallback those of the form <0xE2>.
    None for a token whose text depends on those before it, such as one that loses its space at the start of a text; it
    holds whole characters, so `decode` has its bytes.
    """
    kinds = set(_kinds(inner.decoder))
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse", "Sequence"}:
        return byte_level
    return _byte_fallback if "ByteFallback" in kinds else lambda token: None


def _kinds(decoder: Any) -> Iterator[str]:
    """The types of a decoder of the tokenizers library, and of those in it."""
    if decoder is None:
        return
    waiting = [json.loads(decoder.__getstate__())]
    while waiting:
        fields = waiting.pop()
        yield fields["type"]
        waiting += fields.get("decoders", [])


def byte_level(token: str) -> bytes:
    """The bytes that the ByteLevel decoder writes: a token with a character that stands for no byte is text."""
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> bytes | None:
    match = _BYTE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match is not None else None


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's `bytes_to_unicode`): printable
    characters of Latin-1 for themselves, and 256 + n for the n-th of the others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_characters()
# Each byte's character: LETTERS[0x20] is "Ġ".
LETTERS = tuple(sorted(_BYTES, key=_BYTES.__getitem__))
