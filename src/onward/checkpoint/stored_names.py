"""Names of weights in files, and their names in Hugging Face's layout, where the two differ in a known way."""

import re
from collections.abc import Iterable, Mapping

from onward.errors import CheckpointError
from onward.models import Architecture
from onward.models.blocks import DecoderNames

# Modules that wrap another one to run it differently, and whose names appear in the names of its weights.
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
# Those of a file of weights: torch's DataParallel, and a model that peft unloaded its adapter from.
_PREFIXES = ("base_model.model.", "module.")
# The names that multimodal checkpoints had before transformers 4.52, and those of today.
_OLDER_NAMES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}


def names_of(architecture: Architecture | None) -> DecoderNames | None:
    """The names of a decoder's parts in its checkpoints; None for an architecture that is no `Decoder`, whose names
    are its own affair."""
    names = getattr(architecture, "names", None)
    return names if isinstance(names, DecoderNames) else None


def stock_names(stored: Iterable[str], architecture: Architecture | None) -> dict[str, str]:
    """Hugging Face's name -> the name in the file. With a decoder's architecture, names may have a wrapper's prefix
    ("module.", "_orig_mod."), and may lack the prefix of the base model ("model.") or have more before it; where the
    head is tied to the embedding, the file may have either. Else only older names of multimodal checkpoints change."""
    given = {_renamed(name): name for name in stored}
    names = names_of(architecture)
    if architecture is None or names is None:
        return given
    if not has_stock_names(given, names):
        given = _reached(given, names)
    return _tied(given, names) if architecture.tie_word_embeddings else given


def has_stock_names(stored: Iterable[str], names: DecoderNames) -> bool:
    """Whether the names are Hugging Face's: the first layer's weights show it."""
    return any(name.startswith(f"{names.layers}.0.") for name in stored)


def tied_twin(name: str, architecture: Architecture | None) -> str | None:
    """The other name of a weight of the embedding or of the head that is tied to it; None for other weights."""
    names = names_of(architecture)
    if architecture is None or names is None or not architecture.tie_word_embeddings:
        return None
    for own, other in ((names.embed_tokens, names.lm_head), (names.lm_head, names.embed_tokens)):
        if name.startswith(f"{own}."):
            return other + name.removeprefix(own)
    return None


def _reached(given: Mapping[str, str], names: DecoderNames) -> dict[str, str]:
    """The names with what is before the base model's names replaced, as the first layer's show it; else as they are."""
    plain = {_unwrapped(name): stored for name, stored in given.items()}
    if len(plain) != len(given):
        first, second = _twice(given)
        raise CheckpointError(f"both {first!r} and {second!r} are the same weight: keep one of them")
    if has_stock_names(plain, names):
        return plain
    base = names.layers.partition(".")[0] + "."  # "model."
    whole, inner = f"{names.layers}.0.", f"{names.layers}.0.".removeprefix(base)
    for anchor, prefix in ((whole, ""), (inner, base)):
        found = next((name for name in plain if f".{name}".find(f".{anchor}") >= 0), None)
        if found is not None:
            before = found[: f".{found}".find(f".{anchor}")]
            return {_moved(name, before, prefix, names): stored for name, stored in plain.items()}
    return dict(given)


def _moved(name: str, before: str, prefix: str, names: DecoderNames) -> str:
    if not name.startswith(before):
        return name
    rest = name.removeprefix(before)
    return rest if rest.startswith(f"{names.lm_head}.") else prefix + rest


def _tied(given: dict[str, str], names: DecoderNames) -> dict[str, str]:
    """A tied head under the embedding's name, where the file has no embedding."""
    head, embedding = f"{names.lm_head}.", f"{names.embed_tokens}."
    if any(name.startswith(embedding) for name in given):
        return given
    return {
        embedding + name.removeprefix(head) if name.startswith(head) else name: stored for name, stored in given.items()
    }


def _unwrapped(name: str) -> str:
    name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _twice(names: Iterable[str]) -> tuple[str, str]:
    """Two names that are one without their wrappers."""
    seen: dict[str, str] = {}
    for name in names:
        if (plain := _unwrapped(name)) in seen:
            return seen[plain], name
        seen[plain] = name
    raise AssertionError("no name is there twice")


def _renamed(name: str) -> str:
    """The name of today for a name that multimodal checkpoints had before transformers 4.52."""
    for old, new in _OLDER_NAMES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


# What older libraries saved beside the weights: frequencies, angles and masks, which config.json determines.
_BUFFERS = re.compile(
    r".*\brotary_emb\.(?:inv_freq|original_inv_freq|cos_cached|sin_cached)|.*\.(?:attn|self_attn)\.masked_bias"
)
# Scales by which queries, keys and values become FP8, in the names of compressed-tensors, of ModelOpt, of Quark and of
# vLLM. Onward's cache holds them in floats, and transformers leaves these scales out likewise.
_CACHE_SCALES = re.compile(
    r".*\.(?:"
    r"(?:[qkv]|kv|qk|prob)_(?:scale|zero_point)"
    r"|(?:[qkv]_proj|qkv_proj|kv_proj)\.(?:output_scale|output_zero_point|kv_scale|[qkv]_scale|[qkv]_zero_point)"
    r"|(?:prob|[qkv])_output_scale"
    r")"
)


def is_buffer(name: str) -> bool:
    """Whether it is no weight, and follows from config.json."""
    return _BUFFERS.fullmatch(name) is not None


def is_cache_scale(name: str) -> bool:
    """Whether it is a scale of a cache in FP8."""
    return _CACHE_SCALES.fullmatch(name) is not None
