"""A model that predicts a script, for deterministic tests of loops, drafters and samplers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.models import Cache, Model
from onward.models.contract import take_positions

EMPTY = -1


def poison(cache: Cache) -> Cache:
    """Fill every tensor of a cache in place with NaN (-1 for integer dtypes), and return the cache. A model that reads
    an entry at or past a row's offset then has NaN logits; one that keeps the contract decodes as with a new cache."""
    for leaf in pytree.tree_leaves(cache):
        if isinstance(leaf, Tensor):
            leaf.fill_(float("nan") if leaf.is_floating_point() else EMPTY)
    return cache


# The prediction after a row's tokens, the last of which is at position p. A function maps all of the row's tokens to
# the next id, or to logits float [V]. A list of N ids predicts ids[p % N], so that a prompt of one token is answered
# with the list itself. The forward asks at every position: also within a prompt, in padding and in ended rows.
Script = Callable[[list[int]], int | Tensor] | Sequence[int]

# The logit of the scripted id; all others are 0. At temperature 1 another id is sampled once in 10^13 / V draws.
CERTAIN = 30.0


class ContractError(AssertionError):
    """The caller of a scripted model broke the contract of `onward.models.model`."""


class ScriptedCall(NamedTuple):
    """One call of a forward: tokens [B, T], offsets [B] and, if passed, logits_at [B, N]."""

    tokens: list[list[int]]
    offsets: list[int]
    logits_at: list[list[int]] | None


class ScriptedCache(NamedTuple):
    """A cache of the tokens themselves: int32 [B, S], -1 for none."""

    tokens: Tensor

    @classmethod
    def new(cls, batch: int, max_len: int) -> "ScriptedCache":
        return cls(torch.full((batch, max_len), EMPTY, dtype=torch.int32))

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def max_len(self) -> int:
        return self.tokens.shape[1]


@final
@dataclass(frozen=True)
class ScriptedModel(Model):
    """A `Model` that follows a script. calls: the calls of its forward so far, in order."""

    calls: list[ScriptedCall] = field(default_factory=list)


def scripted_model(script: Script, *, vocab_size: int = 32, max_seq_len: int | None = None) -> ScriptedModel:
    """A model whose next token is `script`'s, with a cache of the tokens themselves.

    The forward knows only the past that its cache holds below a row's offset, and clears everything past the tokens of
    each call. So it raises `ContractError` if a loop loses a cache, miscounts an offset or trusts a stale entry, and
    for tokens that do not fit the cache or the vocabulary.

    Args:
        script: see `Script`.
        vocab_size: V of the logits.
        max_seq_len: the model's maximum number of positions.
    """
    if not callable(script) and not script:
        raise ValueError("a script needs at least one id")
    calls: list[ScriptedCall] = []

    def forward(
        tokens: Tensor, offsets: Tensor, cache: ScriptedCache, params: object, *, logits_at: Tensor | None = None
    ) -> tuple[Tensor, ScriptedCache]:
        _check_call(tokens, offsets, cache, vocab_size)
        calls.append(ScriptedCall(tokens.tolist(), offsets.tolist(), None if logits_at is None else logits_at.tolist()))
        logits = torch.stack(
            [_row_logits(script, vocab_size, row, tokens, offset, cache) for row, offset in enumerate(offsets.tolist())]
        )
        return (logits if logits_at is None else take_positions(logits, logits_at)), cache

    return ScriptedModel(
        forward=forward,
        params=(),
        new_cache=ScriptedCache.new,
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        compiles=False,  # its checks read the values of tensors
        calls=calls,
    )


def _check_call(tokens: Tensor, offsets: Tensor, cache: ScriptedCache, vocab_size: int) -> None:
    batch = cache.batch
    if tokens.dtype != torch.int32 or tokens.dim() != 2 or tokens.shape[0] != batch:
        raise ContractError(f"tokens must be int32 [{batch}, T]; got {tokens.dtype} {list(tokens.shape)}")
    if offsets.dtype != torch.int32 or offsets.shape != (batch,):
        raise ContractError(f"offsets must be int32 [{batch}]; got {offsets.dtype} {list(offsets.shape)}")
    if bool(((tokens < 0) | (tokens >= vocab_size)).any()):
        raise ContractError(f"ids must be from 0 to {vocab_size - 1}; got {tokens.tolist()}")
    end = int(offsets.max()) + tokens.shape[1]
    if int(offsets.min()) < 0 or end > cache.max_len:
        raise ContractError(
            f"offsets {offsets.tolist()} and {tokens.shape[1]} tokens do not fit a cache of {cache.max_len} positions"
        )
    for row, offset in enumerate(offsets.tolist()):
        if EMPTY in (past := cache.tokens[row, :offset].tolist()):
            raise ContractError(f"row {row} has offset {offset}, but nothing was written at {past.index(EMPTY)}")


def _row_logits(script: Script, vocab_size: int, row: int, tokens: Tensor, offset: int, cache: ScriptedCache) -> Tensor:
    """Write a row's tokens into its cache, and return the logits after each of them: float32 [T, V]."""
    row_cache = cache.tokens[row]
    end = offset + tokens.shape[1]
    row_cache[offset:end] = tokens[row]
    row_cache[end:] = EMPTY
    history: list[int] = row_cache[:end].tolist()
    return torch.stack([_next_logits(script, vocab_size, history[: at + 1]) for at in range(offset, end)])


def _next_logits(script: Script, vocab_size: int, history: list[int]) -> Tensor:
    following = script(history) if callable(script) else script[(len(history) - 1) % len(script)]
    if isinstance(following, Tensor):
        return following.to(torch.float32)
    logits = torch.zeros(vocab_size)
    logits[following] = CERTAIN
    return logits


BYTES = 256


@dataclass(frozen=True)
class ByteTokenizer:
    """A `Tokenizer` whose ids are the bytes of UTF-8, then a BOS and an EOS. As in real ones, a character may take
    several tokens, and ids may be invalid UTF-8.

    bos_id, eos_id: None for a tokenizer without one. add_bos: begin every encoded text with the BOS.
    """

    bos_id: int | None = BYTES
    eos_id: int | None = BYTES + 1
    add_bos: bool = False
    vocab_size: int = BYTES + 2

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The bytes of `text`, after a BOS if `add_bos` and `add_special_tokens`."""
        ids = list(text.encode("utf-8"))
        return [self.bos_id, *ids] if self.add_bos and add_special_tokens and self.bos_id is not None else ids

    def bytes_of(self, id: int) -> bytes:
        """The byte of an id; empty for the BOS and EOS."""
        return bytes([id]) if id < BYTES else b""

    def token_bytes(self) -> list[bytes | None]:
        """The byte of each id; None for the BOS and EOS."""
        return [bytes([token]) if token < BYTES else None for token in range(self.vocab_size)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens; invalid UTF-8 becomes U+FFFD."""
        return bytes(token for token in ids if token < BYTES).decode("utf-8", errors="replace")
