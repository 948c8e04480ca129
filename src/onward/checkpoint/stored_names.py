"""Names of weights in files, and their Hugging Face names, for layouts that differ in a known way."""

import re
from collections.abc import Iterable, Mapping

from onward.errors import CheckpointError
from onward.models import Architecture
from onward.models.blocks import DecoderNames

# Modules that wrap another module, and whose names appear in the names of its weights.
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
# Prefixes from peft, after its adapter was unloaded, and from torch's DataParallel.
_PREFIXES = ("base_model.model.", "module.")
# Names in multimodal checkpoints before transformers 4.52 -> current names.
_OLDER_NAMES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}


def names_of(architecture: Architecture | None) -> DecoderNames | None:
    """The names of a decoder's parts in its checkpoints; None for an architecture that is not a `Decoder`."""
    names = getattr(architecture, "names", None)
    return names if isinstance(names, DecoderNames) else None


def stock_names(stored: Iterable[str], architecture: Architecture | None) -> dict[str, str]:
    """Hugging Face's name -> the name in the file. For a decoder, names may have a wrapper's prefix ("module.",
    "_orig_mod."), lack the base model's prefix ("model.") or have more before it; and a head that is tied to the
    embedding may be stored under either name. For others, only the old names of multimodal checkpoints change."""
    by_name = {}
    for name in stored:
        new = next((new + name.removeprefix(old) for old, new in _OLDER_NAMES.items() if name.startswith(old)), name)
        by_name[new] = name
    names = names_of(architecture)
    if architecture is None or names is None:
        return by_name
    if not has_stock_names(by_name, names):
        by_name = _with_base_prefix(by_name, names)
    return _with_tied_head(by_name, names) if architecture.tie_word_embeddings else by_name


def has_stock_names(stored: Iterable[str], names: DecoderNames) -> bool:
    """Whether the names are Hugging Face's, judging by the first layer's weights."""
    return any(name.startswith(f"{names.layers}.0.") for name in stored)


def tied_twin(name: str, architecture: Architecture | None) -> str | None:
    """The other name of a tied embedding or head weight; None for other weights."""
    names = names_of(architecture)
    if architecture is None or names is None or not architecture.tie_word_embeddings:
        return None
    for own, other in ((names.embed_tokens, names.lm_head), (names.lm_head, names.embed_tokens)):
        if name.startswith(f"{own}."):
            return other + name.removeprefix(own)
    return None


def _with_base_prefix(by_name: Mapping[str, str], names: DecoderNames) -> dict[str, str]:
    """Replace whatever precedes the base model's names, judging by the first layer's; unchanged if there is none."""
    plain: dict[str, str] = {}
    for name, stored in by_name.items():
        if (unwrapped := _unwrapped(name)) in plain:
            raise CheckpointError(f"both {plain[unwrapped]!r} and {stored!r} are the same weight: keep one of them")
        plain[unwrapped] = stored
    if has_stock_names(plain, names):
        return plain
    base = names.layers.partition(".")[0] + "."  # "model."
    whole = f"{names.layers}.0."
    for anchor, prefix in ((whole, ""), (whole.removeprefix(base), base)):
        for name in plain:
            if (at := f".{name}".find(f".{anchor}")) >= 0:
                return {_moved(each, name[:at], prefix, names): stored for each, stored in plain.items()}
    return dict(by_name)


def _moved(name: str, before: str, prefix: str, names: DecoderNames) -> str:
    if not name.startswith(before):
        return name
    rest = name.removeprefix(before)
    return rest if rest.startswith(f"{names.lm_head}.") else prefix + rest


def _with_tied_head(by_name: dict[str, str], names: DecoderNames) -> dict[str, str]:
    """Rename the head to the embedding that it is tied to, if the file has no embedding."""
    head, embedding = f"{names.lm_head}.", f"{names.embed_tokens}."
    if any(name.startswith(embedding) for name in by_name):
        return by_name
    return {re.sub(f"^{re.escape(head)}", embedding, name): stored for name, stored in by_name.items()}


def _unwrapped(name: str) -> str:
    name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


# Buffers that older libraries saved beside the weights: frequencies, angles and masks, all determined by config.json.
_BUFFERS = re.compile(
    r".*\brotary_emb\.(?:inv_freq|original_inv_freq|cos_cached|sin_cached)|.*\.(?:attn|self_attn)\.masked_bias"
)
# FP8 scales of compressed-tensors, ModelOpt, Quark and vLLM, ignored as in transformers: the KV cache holds floats.
_CACHE_SCALES = re.compile(
    r".*\.(?:"
    r"(?:[qkv]|kv|qk|prob)_(?:scale|zero_point)"
    r"|(?:[qkv]_proj|qkv_proj|kv_proj)\.(?:output_scale|output_zero_point|kv_scale|[qkv]_scale|[qkv]_zero_point)"
    r"|(?:prob|[qkv])_output_scale"
    r")"
)


def is_buffer(name: str) -> bool:
    """Whether this is not a weight but a buffer that config.json determines."""
    return _BUFFERS.fullmatch(name) is not None


def is_cache_scale(name: str) -> bool:
    return _CACHE_SCALES.fullmatch(name) is not None
