"""A tokenizer.json of BPE over pieces and bytes (Gemma 2 and 3, Llama 2, Mistral v0.1) -> GGUF's kind "llama".

Such files were made of sentencepiece's models, which have a score for each piece: in a text the best pair of neighbours
that make a piece is joined, the leftmost of equal ones. tokenizer.json has the pairs in order in place of scores.
Where all pairs of one piece lie together, and every pair of pieces that makes a piece is there, the pieces' order is
that of the scores, and nothing else of a score matters.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from onward.checkpoint.gguf.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, merges_of
from onward.errors import RequestError

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_TO_MARKS = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PREFIX = {"type": "Prepend", "prepend": "▁"}
_TO_TEXT = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_Pair = tuple[str, str]


def pieces_metadata(
    parts: Mapping[str, Any], tokens: list[str], types: list[int], merges: Sequence[str]
) -> dict[str, Any]:
    """The keys of the kind.

    Args:
        parts: of tokenizer.json.
        tokens: of all ids.
        types: of all ids, but those of bytes and of the unknown token.
        merges: "left right", best first.

    Raises:
        RequestError: the tokenizer does what a file of the kind cannot say, or scores cannot say its merges.
    """
    prefix = _has_prefix(parts)
    check_added(parts["added_tokens"], prefix)
    ids = {text: id for id, text in reversed(list(enumerate(tokens)))}
    unknown = parts["model"].get("unk_token")
    types = [
        BYTE if kind == NORMAL and _BYTE.fullmatch(text) else UNKNOWN if kind == CONTROL and text == unknown else kind
        for text, kind in zip(tokens, types, strict=True)
    ]
    _check_bytes(ids)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    scores = _scores(tokens, types, pairs)
    derived = list(merges_of(ids, scores, types))
    if unlisted := set(derived) - set(pairs):
        left, right = min(unlisted)
        raise RequestError(
            f"the tokenizer never merges {left!r} and {right!r} to the piece {left + right!r}, and so {len(unlisted)} "
            "pairs in all: with the scores that GGUF has in place of merges, every pair that makes a piece is merged"
        )
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    if unknown in ids:
        metadata["tokenizer.ggml.unknown_token_id"] = ids[unknown]
    # llama.cpp looks at no merges in a file of this kind; Onward does: two pairs that make one piece may overlap.
    return metadata if derived == pairs else metadata | {"tokenizer.ggml.merges": list(merges)}


def _has_prefix(parts: Mapping[str, Any]) -> bool:
    """Whether a text gets a space in front; raises unless spaces become marks and back as they do in GGUF."""
    normalizer, cutter, decoder = (parts.get(name) or {} for name in ("normalizer", "pre_tokenizer", "decoder"))
    steps = normalizer.get("normalizers", [normalizer])
    prefix: bool = steps[:1] == [_PREFIX]
    back = [*_TO_TEXT, *([_STRIP] if prefix else [])]
    # A cut at spaces cuts nothing once they are marks.
    cuts = cutter and not (cutter.get("type") == "Split" and cutter.get("pattern") == {"String": " "})
    model = parts["model"]
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    given = {name: model[name] for name in options if model.get(name)}
    for what, found, right in (
        ("normalizer", steps[prefix:], [_TO_MARKS]),
        ("pre_tokenizer", cutter if cuts else {}, {}),
        ("decoder", decoder.get("decoders", [decoder]), back),
        ("model", given, {}),
    ):
        if found != right:
            raise RequestError(
                f"tokenizer.json: {what} is {str(found)[:200]}, and GGUF can only say {right or 'none'} of a BPE of "
                "pieces and bytes"
            )
    return prefix


def check_added(added: Sequence[Mapping[str, Any]], prefix: bool | None = None) -> None:
    """Raise for added tokens that take spaces with them, or are looked for in the text after spaces became marks.

    prefix: whether a text gets such a mark in front; None: there are no marks.
    """
    for token in added:
        ways = [way for way in ("lstrip", "rstrip", "single_word") if token.get(way)]
        if token.get("normalized") and prefix is not None and (prefix or " " in token["content"]):
            ways.append("normalized")
        if ways:
            raise RequestError(
                f"tokenizer.json: the added token {token['content']!r} has {' and '.join(ways)}, which GGUF cannot say"
            )


def _check_bytes(ids: Mapping[str, int]) -> None:
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in ids and not (byte < 128 and chr(byte) in ids)]
    if missing:
        raise RequestError(f"the tokenizer has no token for the byte <0x{missing[0]:02X}>, and llama.cpp needs all 256")


def _scores(tokens: Sequence[str], types: Sequence[int], pairs: Sequence[_Pair]) -> list[float]:
    """-1 for the pieces that are merged first, -2 for the next …; pieces whose pairs lie among each other's have one
    score (they had one in sentencepiece's model: runs of spaces and of line ends, say, of which llama.cpp takes the
    leftmost first). Pieces that no pair makes come last."""
    last = {left + right: rank for rank, (left, right) in enumerate(pairs)}
    classes: list[list[str]] = []
    reached = -1
    for rank, (left, right) in enumerate(pairs):
        if rank > reached:
            classes.append([])
        classes[-1].append(left + right)
        reached = max(reached, last[left + right])
    kinds = dict(zip(tokens, types, strict=True))
    for pieces in map(set, classes):
        if len(pieces) > 1 and (plain := sorted(piece for piece in pieces if kinds.get(piece) == NORMAL)):
            raise RequestError(
                f"the merges that make {plain[0]!r} and {min(pieces - {plain[0]})!r}, {len(pieces)} pieces in all, lie "
                "among each other: no scores of pieces, which GGUF has in place of merges, say that order"
            )
    scores = {piece: -1.0 - place for place, pieces in enumerate(classes) for piece in pieces}
    return [scores.get(text, -1.0 - len(classes)) for text in tokens]
