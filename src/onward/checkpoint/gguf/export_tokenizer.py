"""What a checkpoint says of texts -> the keys of a GGUF file: tokenizer, templates, how texts end and are sampled."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from onward.checkpoint.checkpoint import CheckpointFolder
from onward.checkpoint.gguf.checkpoint import TEMPLATE
from onward.checkpoint.gguf.export import OTHER_WAY
from onward.checkpoint.gguf.keys import SAMPLING
from onward.checkpoint.gguf.pretokenizer import SPLITTINGS
from onward.checkpoint.gguf.vocabulary import CONTROL, NAMED_ENDS, NORMAL, SPECIAL, UNUSED, USER, known_ends
from onward.errors import RequestError, warn
from onward.tokenizer.tokenizer import JsonTokenizer, check_vocabulary, token_text
from onward.util.checks import is_finite

# transformers' values of what a generation_config.json leaves out; llama.cpp has others.
_UNSAID = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}


def texts_metadata(checkpoint: CheckpointFolder, vocab_size: int) -> dict[str, Any]:
    """The keys "tokenizer.…" and "general.sampling.…". vocab_size: of the model, which may have more ids."""
    tokenizer, ends = checkpoint.tokenizer, checkpoint.eos
    check_vocabulary(checkpoint.path, vocab_size, tokenizer, ends)
    sampling = _sampling(checkpoint.generation_config)
    if tokenizer is None:
        # llama.cpp loads no file that does not say it.
        return {"tokenizer.ggml.model": "none"} | _ends(ends) | sampling
    metadata = tokenizer_metadata(tokenizer, vocab_size)
    tokens = metadata["tokenizer.ggml.tokens"]
    # Beside the BOS and the EOS, templates may name these.
    texts = {name: token_text(checkpoint.tokenizer_config.get(f"{name}_token")) for name in ("unk", "pad")}
    ids = {name: tokens.index(text) for name, text in texts.items() if text in tokens}
    ids |= {} if tokenizer.bos_id is None else {"bos": tokenizer.bos_id}
    metadata |= {f"tokenizer.ggml.{SPECIAL[name]}_token_id": id for name, id in ids.items()}
    return metadata | _ends(ends, tokenizer.eos_id, known_ends(tokens)) | _templates(checkpoint) | sampling


def _ends(ends: Sequence[int], named: int | None = None, known: Collection[int] = ()) -> dict[str, int]:
    """The ids that end texts. named: the tokenizer's EOS. known: those that end them by what they are called."""
    first = ends[:1] if named is None else [named]
    ids = [*first, *(id for id in dict.fromkeys(ends) if id not in (*first, *known))]
    if len(ids) > len(NAMED_ENDS):
        raise RequestError(
            f"texts end with the ids {', '.join(map(str, ids))}, and GGUF has keys for {len(NAMED_ENDS)}: take those "
            "that are not needed out of eos_token_id in generation_config.json or config.json"
        )
    return {f"tokenizer.ggml.{name}_token_id": id for name, id in zip(NAMED_ENDS, ids, strict=False)}


def _templates(checkpoint: CheckpointFolder) -> dict[str, Any]:
    """The chat template, and the one for tools."""
    source, *tools = (None,) if checkpoint.chat_template is None else checkpoint.chat_template.sources
    metadata = {} if source is None else {TEMPLATE: source}
    return metadata | ({f"{TEMPLATE}s": ["tool_use"], f"{TEMPLATE}.tool_use": tools[0]} if tools else {})


def _sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """What a generation_config.json advises; nothing where it takes the likeliest token or beams."""
    if generation.get("do_sample") is not True or generation.get("num_beams") not in (None, 1):
        return {}
    said = _UNSAID | {name: generation[name] for name in _UNSAID if is_finite(generation.get(name))}
    kinds = {name: type(usual) for name, usual in _UNSAID.items()}
    return {f"general.sampling.{SAMPLING[name]}": kinds[name](value) for name, value in said.items()}


# GPT-2's expression, which `ByteLevel` applies by itself.
_BYTE_LEVEL = SPLITTINGS["gpt-2"].expressions


def tokenizer_metadata(tokenizer: JsonTokenizer, vocab_size: int) -> dict[str, Any]:
    """The keys but those of special ids. vocab_size: of the model, which may have more ids than the tokenizer."""
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
