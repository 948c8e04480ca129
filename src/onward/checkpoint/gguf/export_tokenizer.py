"""The GGUF keys for a checkpoint's tokenizer, chat templates, end-of-text tokens and sampling settings."""

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

# transformers' defaults for generation_config.json; llama.cpp's differ.
_SAMPLING_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}


def texts_metadata(checkpoint: CheckpointFolder, vocab_size: int) -> dict[str, Any]:
    """The keys "tokenizer.…" and "general.sampling.…". vocab_size: the model's, which may exceed the tokenizer's."""
    tokenizer, ends = checkpoint.tokenizer, checkpoint.eos
    check_vocabulary(checkpoint.path, vocab_size, tokenizer, ends)
    sampling = _sampling(checkpoint.generation_config)
    if tokenizer is None:
        return {"tokenizer.ggml.model": "none"} | _ends(ends) | sampling  # llama.cpp requires the key
    metadata = tokenizer_metadata(tokenizer, vocab_size)
    tokens = metadata["tokenizer.ggml.tokens"]
    # Templates may use these besides the BOS and EOS.
    texts = {name: token_text(checkpoint.tokenizer_config.get(f"{name}_token")) for name in ("unk", "pad")}
    ids = {name: tokens.index(text) for name, text in texts.items() if text in tokens}
    ids |= {} if tokenizer.bos_id is None else {"bos": tokenizer.bos_id}
    metadata |= {f"tokenizer.ggml.{SPECIAL[name]}_token_id": id for name, id in ids.items()}
    return metadata | _ends(ends, tokenizer.eos_id, known_ends(tokens)) | _templates(checkpoint) | sampling


def _ends(ends: Sequence[int], named: int | None = None, known: Collection[int] = ()) -> dict[str, int]:
    """The keys for end-of-text ids. named: the tokenizer's EOS. known: ids whose text already marks them as ends."""
    first = ends[:1] if named is None else [named]
    ids = [*first, *(id for id in dict.fromkeys(ends) if id not in (*first, *known))]
    if len(ids) > len(NAMED_ENDS):
        raise RequestError(
            f"the end-of-text ids are {', '.join(map(str, ids))}, and GGUF has keys for {len(NAMED_ENDS)}: remove "
            "unneeded ones from eos_token_id in generation_config.json or config.json"
        )
    return {f"tokenizer.ggml.{name}_token_id": id for name, id in zip(NAMED_ENDS, ids, strict=False)}


def _templates(checkpoint: CheckpointFolder) -> dict[str, Any]:
    source, *tools = (None,) if checkpoint.chat_template is None else checkpoint.chat_template.sources
    metadata = {} if source is None else {TEMPLATE: source}
    return metadata | ({f"{TEMPLATE}s": ["tool_use"], f"{TEMPLATE}.tool_use": tools[0]} if tools else {})


def _sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling settings of a generation_config.json; empty for greedy or beam search."""
    if generation.get("do_sample") is not True or generation.get("num_beams") not in (None, 1):
        return {}
    own = {name: generation[name] for name in _SAMPLING_DEFAULTS if is_finite(generation.get(name))}
    values = {name: type(_SAMPLING_DEFAULTS[name])(value) for name, value in (_SAMPLING_DEFAULTS | own).items()}
    return {f"general.sampling.{SAMPLING[name]}": value for name, value in values.items()}


# GPT-2's expression, which `ByteLevel` applies itself.
_BYTE_LEVEL = SPLITTINGS["gpt-2"].expressions


def tokenizer_metadata(tokenizer: JsonTokenizer, vocab_size: int) -> dict[str, Any]:
    """The tokenizer's keys without special ids. vocab_size: the model's, which may exceed the tokenizer's."""
    parts = json.loads(tokenizer.to_json())
    model = parts["model"]
    if model.get("type") != "BPE" or "ByteLevel" not in json.dumps(parts.get("decoder")):
        raise RequestError(f"only byte-level BPE tokenizers can be written as GGUF. {OTHER_WAY}")
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
    for token in added:
        if ways := [way for way in ("lstrip", "rstrip", "single_word") if token.get(way)]:
            raise RequestError(
                f"tokenizer.json: GGUF cannot express {' and '.join(ways)} of the added token {token['content']!r}"
            )


def _adds_bos(tokenizer: JsonTokenizer) -> bool:
    """Whether the tokenizer adds a BOS; warns if it adds other tokens too."""
    around = tokenizer.encode("")
    adds_bos = around[:1] == [tokenizer.bos_id]
    if others := around[adds_bos:]:
        warn(
            f"the tokenizer adds {' '.join(str(tokenizer.tokens()[id]) for id in others)} to each text, which GGUF "
            "cannot express, so the file's tokenizer does not; chat templates are unaffected"
        )
    return adds_bos


def _splitting(parts: Mapping[str, Any]) -> str:
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
    # Names do not cover NFC: llama.cpp never normalizes, and Hugging Face tokenizers do as the model's authors did.
    if normalizer.get("normalizers", [normalizer]) not in ([], [{"type": "NFC"}]):
        raise RequestError(
            f"tokenizer.json: normalizer is {str(normalizer)[:200]}, and GGUF supports only NFC for byte-level BPE"
        )
    for name, splitting in SPLITTINGS.items():
        if (splitting.expressions, splitting.whole_words) == (expressions, whole_words):
            return name
    raise RequestError(
        f"the tokenizer splits text by {' and '.join(expressions) or 'nothing'}, for which Onward knows no GGUF name; "
        f"known are {', '.join(SPLITTINGS)}"
    )
