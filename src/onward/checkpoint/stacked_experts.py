"""Checkpoints that store the experts of a layer in one tensor: read under per-expert names, and written for
architectures that transformers reads in no other form.

Onward names each expert's matrix, `experts.3.gate_proj.weight` [I, D], `up_proj` and `down_proj` [D, I], and the
biases of all experts, `experts.gate_proj.bias` [E, I]. Files may instead have gate and up in one tensor:

    experts.gate_up_proj         [E, 2 I, D], gate above up; experts.down_proj [E, D, I] (Qwen3.5)
    experts.gate_up_proj         [E, D, 2 I], gate and up interleaved; experts.down_proj [E, I, D] (gpt-oss)
    experts.gate_up_proj_bias    [E, 2 I], gate and up interleaved; experts.down_proj_bias [E, D] (gpt-oss)
    experts.gate_up_proj_blocks  uint8 [E, 2 I, D / 32, 16] with experts.gate_up_proj_scales uint8 [E, 2 I, D / 32]:
                                 MXFP4, rows of gate and up interleaved; experts.down_proj_blocks and _scales (gpt-oss)
    input_linear.weight          [E, 2 I, D], gate above up; output_linear.weight [E, D, I] (Granite, without experts.)

Shapes: E experts, D width of the stream, I inner width of an expert.
"""

import re
from collections.abc import Container, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

_NAME = re.compile(r"(.+\.experts)\.(?:(\d+)\.)?(gate_proj|up_proj|down_proj)\.(weight|bias)")
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
    match = _NAME.fullmatch(name)
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
    matches = {name: _NAME.fullmatch(name) for name in weights}
    written = {name: weight for name, weight in weights.items() if matches[name] is None}
    for stem in dict.fromkeys(match[1] for match in matches.values() if match is not None):
        written |= _stacked(weights, stem, architecture)
    return written


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
