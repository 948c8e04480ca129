"""The smallest tokenizer that can write every text."""

from collections.abc import Sequence
from dataclasses import dataclass

BYTES = 256


@dataclass(frozen=True)
class ByteTokenizer:
    """A `Tokenizer` whose ids are the bytes of UTF-8, then a BOS and an EOS.

    A character outside ASCII is several tokens, and most sequences of ids are no valid UTF-8. A streaming detokenizer
    has to get both right.

    bos_id, eos_id: None for a tokenizer without one. add_bos: begin every encoded text with the BOS.
    """

    bos_id: int | None = BYTES
    eos_id: int | None = BYTES + 1
    add_bos: bool = False
    vocab_size: int = BYTES + 2

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The bytes of `text`, after a BOS where `add_bos` and `add_special_tokens`."""
        ids = list(text.encode("utf-8"))
        return [self.bos_id, *ids] if self.add_bos and add_special_tokens and self.bos_id is not None else ids

    def bytes_of(self, id: int) -> bytes:
        """The byte that an id stands for; empty for the others."""
        return bytes([id]) if id < BYTES else b""

    def token_bytes(self) -> list[bytes | None]:
        """The byte that each id stands for; None for the others."""
        return [bytes([token]) if token < BYTES else None for token in range(self.vocab_size)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out; bytes that are no UTF-8 become U+FFFD."""
        return bytes(token for token in ids if token < BYTES).decode("utf-8", errors="replace")
