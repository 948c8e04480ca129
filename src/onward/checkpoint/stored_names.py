"""Names of weights in files, and their Hugging Face names, for layouts that differ in a known way.

Onward names each expert's matrix, `experts.3.gate_proj.weight` [I, D], `up_proj` and `down_proj` [D, I], and the
biases of all experts, `experts.gate_proj.bias` [E, I]. Files may instead have all experts of a layer in one tensor, and
transformers reads some architectures in no other form:

    experts.gate_up_proj         [E, 2 I, D], gate above up; experts.down_proj [E, D, I] (Qwen3.5)
    experts.gate_up_proj         [E, D, 2 I], gate and up interleaved; experts.down_proj [E, I, D] (gpt-oss)
    experts.gate_up_proj_bias    [E, 2 I], gate and up interleaved; experts.down_proj_bias [E, D] (gpt-oss)
    experts.gate_up_proj_blocks  uint8 [E, 2 I, D / 32, 16] with experts.gate_up_proj_scales uint8 [E, 2 I, D / 32]:
                                 MXFP4, rows of gate and up interleaved; experts.down_proj_blocks and _scales (gpt-oss)
    input_linear.weight          [E, 2 I, D], gate above up; output_linear.weight [E, D, I] (Granite, without experts.)

Shapes: E experts, D width of the stream, I inner width of an expert.
"""

import re
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

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


# ── experts in one tensor ─────────────────────────────────────────────────────────────────────────────────────

_OF_EXPERTS = re.compile(r"(.+\.experts)\.(?:(\d+)\.)?(gate_proj|up_proj|down_proj)\.(weight|bias)")
# Architectures whose experts transformers reads only in one tensor.
_OF_ONE_TENSOR = (
    *("GptOssForCausalLM", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    *("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", "GraniteMoeHybridForCausalLM"),
)


class StackedPart(NamedTuple):
    """The location of an expert's weight, or of all experts' biases (expert None). tensors: one of floats, or blocks
    and scales. interleaved: gate and up rows alternate. transposed: inputs come before outputs."""

    tensors: tuple[str, ...]
    expert: int | None
    part: str
    interleaved: bool
    transposed: bool

    def of(self, tensor: Tensor) -> Tensor:
        """A view of this part in one of its tensors; IndexError if there is no such expert."""
        outputs = 1 if self.expert is None else 0
        own = tensor if self.expert is None else tensor[self.expert]
        own = own.transpose(-1, -2) if self.transposed else own
        if self.part == "down_proj":
            return own
        half = self.part == "up_proj"
        if self.interleaved:
            return own[:, half::2] if outputs else own[half::2]
        return own.chunk(2, dim=outputs)[half]

    def count(self, tensor: Tensor) -> int:
        return (1 if self.expert is None else len(tensor)) * (1 if self.part == "down_proj" else 2)


def stacked_part(name: str, stored: Container[str]) -> StackedPart | None:
    """Locate the weight of a stock name among stored tensors; None if no tensor of all experts holds it."""
    match = _OF_EXPERTS.fullmatch(name)
    if match is None:
        return None
    stem, expert, part, kind = match.groups()
    if (kind == "weight") != (expert is not None):
        return None
    whole = f"{stem}.down_proj" if part == "down_proj" else f"{stem}.gate_up_proj"
    bias, packed = f"{whole}_bias", (f"{whole}_blocks", f"{whole}_scales")
    if kind == "bias":
        return StackedPart((bias,), None, part, True, False) if bias in stored else None
    if packed[0] in stored:
        return StackedPart(packed, int(expert), part, True, False)
    granite = _granite_name(stem, "output" if part == "down_proj" else "input")
    if granite in stored:
        return StackedPart((granite,), int(expert), part, False, False)
    # Only gpt-oss has biases, and its floats are transposed.
    like_gpt_oss = any(f"{stem}.{each}_bias" in stored for each in ("gate_up_proj", "down_proj"))
    return StackedPart((whole,), int(expert), part, like_gpt_oss, like_gpt_oss) if whole in stored else None


def with_stacked_experts(weights: Mapping[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """Weights by stock name, with the experts of a layer copied into one tensor if transformers requires it."""
    if architecture not in _OF_ONE_TENSOR:
        return dict(weights)
    matches = {name: _OF_EXPERTS.fullmatch(name) for name in weights}
    stacked = {name: weight for name, weight in weights.items() if matches[name] is None}
    for stem in dict.fromkeys(match[1] for match in matches.values() if match is not None):
        stacked |= _stacked(weights, stem, architecture)
    return stacked


def _stacked(weights: Mapping[str, Tensor], stem: str, architecture: str) -> dict[str, Tensor]:
    count = sum(f"{stem}.{expert}.down_proj.weight" in weights for expert in range(len(weights)))
    gate, up, down = (
        torch.stack([weights[f"{stem}.{expert}.{part}.weight"] for expert in range(count)])
        for part in ("gate_proj", "up_proj", "down_proj")
    )
    above = torch.cat([gate, up], dim=1)
    if architecture.startswith("Granite"):
        return {_granite_name(stem, "input"): above, _granite_name(stem, "output"): down}
    if architecture != "GptOssForCausalLM":
        return {f"{stem}.gate_up_proj": above, f"{stem}.down_proj": down}
    biases = torch.stack([weights[f"{stem}.{part}.bias"] for part in ("gate_proj", "up_proj")], dim=2).flatten(1)
    return {
        f"{stem}.gate_up_proj": torch.stack([gate, up], dim=2).flatten(1, 2).mT,
        f"{stem}.gate_up_proj_bias": biases,
        f"{stem}.down_proj": down.mT,
        f"{stem}.down_proj_bias": weights[f"{stem}.down_proj.bias"],
    }


def _granite_name(stem: str, end: str) -> str:
    return f"{stem.removesuffix('experts')}{end}_linear.weight"
