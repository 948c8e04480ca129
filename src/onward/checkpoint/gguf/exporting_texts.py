"""What a checkpoint says of texts -> the keys of a GGUF file: tokenizer, templates, how texts end and are sampled."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from onward.checkpoint.folder import CheckpointFolder
from onward.checkpoint.gguf.ends import known_ends
from onward.checkpoint.gguf.exporting_tokenizers import tokenizer_metadata
from onward.checkpoint.gguf.keys import SAMPLING
from onward.checkpoint.gguf.model import TEMPLATE
from onward.checkpoint.gguf.vocabulary import NAMED_ENDS, SPECIAL
from onward.checkpoint.tokenizer import check_vocabulary, token_text
from onward.checks import is_finite
from onward.errors import RequestError

# transformers' values of what a generation_config.json leaves out; llama.cpp has others.
_UNSAID = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}


def texts_metadata(checkpoint: CheckpointFolder, vocab_size: int) -> dict[str, Any]:
    """The keys "tokenizer.…" and "general.sampling.…".

    Args:
        vocab_size: of the model, which may have more ids than the tokenizer.

    Raises:
        RequestError: the checkpoint says what no key does. CheckpointError, ConfigError: the tokenizer, or the ids that
            end texts, are of another model.
    """
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
