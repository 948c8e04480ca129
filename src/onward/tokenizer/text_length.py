"""How many tokens a text takes at least, by its length alone.

Every id of a text stands for a bounded number of its characters: at most as many as the longest token has. That holds
for BPE vocabularies, if no step drops characters or fuses any number of them:

    normalizer      none, or steps that replace texts by others of the same length or more. NFC and NFKC compose at
                    most four characters into one, and leave ASCII as it is
    pre-tokenizer   none, or steps that keep all characters
    model           BPE that has an id for every byte, or one unknown id for each unknown character
    added tokens    without `lstrip` and `rstrip`, which absorb any number of spaces

Other tokenizers, such as WordPiece and Unigram, have no such bound.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import tokenizers

_KEEPS = {"ByteLevel", "Metaspace", "Digits"}
_GROWS = {"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"}
# The longest canonical decomposition of a character.
_MOST_COMPOSED = 4


class TokenLength(NamedTuple):
    """The maximum number of characters of a text that one id stands for: of an ASCII text, and of any."""

    ascii: int
    any: int

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of ids of a text."""
        return -(-len(text) // (self.ascii if text.isascii() else self.any))

    @classmethod
    def of(cls, inner: tokenizers.Tokenizer, byte_letters: tuple[str, ...]) -> "TokenLength | None":
        """None for a tokenizer without a bound. byte_letters: each byte in a byte-level vocabulary."""
        normalizers = list(steps_of(inner.normalizer, "normalizers"))
        pre_tokenizers = list(steps_of(inner.pre_tokenizer, "pretokenizers"))
        added = inner.get_added_tokens_decoder().values()
        composes = any(step["type"] in ("NFC", "NFKC") for step in normalizers)
        is_bounded = (
            all(map(_never_shrinks, normalizers))
            and all(map(_keeps_all, pre_tokenizers))
            and not any(token.lstrip or token.rstrip for token in added)
            and _has_all(inner, [*normalizers, *pre_tokenizers], byte_letters)
        )
        if not is_bounded:
            return None
        normalize = inner.normalizer.normalize_str if inner.normalizer is not None else str
        texts = [text for token in added for text in (token.content, normalize(token.content))]
        longest = max(map(len, [*inner.get_vocab(with_added_tokens=True), *texts]), default=1)
        return cls(longest, longest * (_MOST_COMPOSED if composes else 1))


def steps_of(component: Any, inner: str) -> Iterator[dict[str, Any]]:
    """The settings of a normalizer, pre-tokenizer or decoder, or of each in a sequence of them. inner: the field of a
    sequence that lists them."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        fields = waiting.pop()
        if fields["type"] == "Sequence":
            waiting += fields[inner]
        else:
            yield fields


def _never_shrinks(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] != "Replace":
        return normalizer["type"] in _GROWS or normalizer["type"] in ("NFC", "NFKC")
    replaced = normalizer["pattern"].get("String")
    return replaced is not None and len(replaced) <= len(normalizer["content"])


def _keeps_all(pre_tokenizer: dict[str, Any]) -> bool:
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in _KEEPS


def _has_all(inner: tokenizers.Tokenizer, steps: list[dict[str, Any]], byte_letters: tuple[str, ...]) -> bool:
    """Whether no character is dropped or fused with others because the vocabulary lacks it."""
    model = inner.model
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if any(step["type"] == "ByteLevel" for step in steps):
        return all(model.token_to_id(letter) is not None for letter in byte_letters)
    if model.byte_fallback:
        return all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    return model.unk_token is not None and model.token_to_id(model.unk_token) is not None and not model.fuse_unk
