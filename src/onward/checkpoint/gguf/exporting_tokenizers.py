"""A tokenizer.json -> the keys "tokenizer.…" of a GGUF file."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from onward.checkpoint.gguf.exporting_families import OTHER_WAY
from onward.checkpoint.gguf.split_texts import SPLITTINGS
from onward.checkpoint.gguf.vocabulary import CONTROL, NORMAL, UNUSED, USER
from onward.checkpoint.tokenizer import JsonTokenizer
from onward.errors import RequestError, warn

# GPT-2's expression, which `ByteLevel` applies by itself.
_BYTE_LEVEL = SPLITTINGS["gpt-2"].expressions


def tokenizer_metadata(tokenizer: JsonTokenizer, vocab_size: int) -> dict[str, Any]:
    """The keys but those of special ids. vocab_size: of the model, which may have more ids than the tokenizer.

    Raises:
        RequestError: the tokenizer is no byte-level BPE that cuts texts by a rule which GGUF names.
    """
    parts = json.loads(tokenizer.to_json())
    model = parts["model"]
    if model.get("type") != "BPE" or "ByteLevel" not in json.dumps(parts.get("decoder")):
        raise RequestError(f"the tokenizer is no byte-level BPE, and others are not written as GGUF. {OTHER_WAY}")
    _check_added(parts["added_tokens"])
    added = {token["id"]: CONTROL if token["special"] else USER for token in parts["added_tokens"]}
    tokens, types = [], []
    for id, text in enumerate([*tokenizer.tokens(), *([None] * (vocab_size - tokenizer.vocab_size))]):
        tokens.append(f"[PAD{id}]" if text is None else text)
        types.append(UNUSED if text is None else added.get(id, NORMAL))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _splitting(parts),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.add_bos_token": _adds_bos(tokenizer),
    }


def _check_added(added: Sequence[Mapping[str, Any]]) -> None:
    """Raise for added tokens that take spaces with them, or that only whole words are."""
    for token in added:
        if ways := [way for way in ("lstrip", "rstrip", "single_word") if token.get(way)]:
            raise RequestError(
                f"tokenizer.json: the added token {token['content']!r} has {' and '.join(ways)}, which GGUF cannot say"
            )


def _adds_bos(tokenizer: JsonTokenizer) -> bool:
    """Whether a text begins with the BOS; warns where it gets other tokens, too."""
    around = tokenizer.encode("")
    adds_bos = around[:1] == [tokenizer.bos_id]
    if others := around[adds_bos:]:
        warn(
            f"the tokenizer puts {' '.join(str(tokenizer.tokens()[id]) for id in others)} around each text, which GGUF "
            "cannot say: the file's does not; what a chat template writes is the same"
        )
    return adds_bos


def _splitting(parts: Mapping[str, Any]) -> str:
    """GGUF's name of how the tokenizer cuts texts."""
    cutter = parts.get("pre_tokenizer") or {}
    expressions: tuple[str, ...] = ()
    for step in cutter.get("pretokenizers", [cutter]):
        if step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            expressions += (step["pattern"].get("Regex", ""),)
        elif step.get("type") == "Digits" and step.get("individual_digits"):
            expressions += (r"\p{N}",)
        elif step.get("type") == "ByteLevel" and not step.get("add_prefix_space"):
            expressions += _BYTE_LEVEL if step.get("use_regex", True) else ()
        else:
            expressions += (repr(step),)
    whole_words = bool(parts["model"].get("ignore_merges"))
    normalizer = parts.get("normalizer") or {"type": "Sequence", "normalizers": []}
    # A name says nothing of NFC: llama.cpp never normalizes, and readers of the Hugging Face layout do as the model's
    # makers did.
    if normalizer.get("normalizers", [normalizer]) not in ([], [{"type": "NFC"}]):
        raise RequestError(
            f"tokenizer.json: normalizer is {str(normalizer)[:200]}, and GGUF has none of byte-level BPE but NFC"
        )
    for name, splitting in SPLITTINGS.items():
        if (splitting.expressions, splitting.whole_words) == (expressions, whole_words):
            return name
    raise RequestError(
        f"the tokenizer cuts texts by {' and '.join(expressions) or 'nothing'}, for which GGUF has no name that Onward "
        f"knows; it knows {', '.join(SPLITTINGS)}"
    )
