"""GPTQ (Frantar et al., arXiv 2210.17323), as AutoGPTQ and GPTQModel store it.

Tensors of a module: qweight int32 [K * b / 32, N], the first input in the lowest bits; qzeros int32 [K / g, N * b /
32], which hold zero - 1 in b bits, so that all ones are 0 (in the format "gptq_v2", zero itself); scales [K / g, N];
g_idx int32 [K], the group of each input if inputs are ordered by activation. The weight is (q - zero) * scale.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.formats import repack
from onward.checkpoint.formats.bits import unpacked
from onward.checkpoint.formats.settings import Fields, Overrides, Read, Shape, compiled, group_size, words
from onward.ops import QuantizedWeight

_TENSORS = {"qweight", "qzeros", "scales", "g_idx"}
_IGNORED = """
desc_act sym static_groups act_group_aware lm_head true_sequential mse damp_percent damp_auto_increment tokenizer
dataset model_name_or_path model_file_base_name model_seqlen block_name_to_quantize module_name_preceding_first_block
batch_size pad_token_id max_input_length cache_block_outputs use_cuda_fp16 use_exllama disable_exllama exllama_config
parallel_packing device pack_impl v2 v2_alpha v2_memory_device gptaq gptaq_alpha hyb_act offload_to_disk
offload_to_disk_path calibration_data failsafe fallback gc_mode quantizer method nsamples seqlen
"""
FIELDS = Fields(
    read=words("bits group_size checkpoint_format format pack_dtype dynamic"),
    # g_idx holds the order of inputs, and symmetric zero points are stored like others.
    ignored=words(_IGNORED),
    refused={"is_marlin_format": (), "adapter": (), "rotation": ()},
)


@dataclass(frozen=True)
class Gptq:
    """bits: 2, 3, 4 or 8. group: inputs that share a scale; None for all. zero_offset: added to stored zeros."""

    bits: int
    group: int | None
    zero_offset: int

    def parts(self, names: set[str]) -> set[str]:
        return names & _TENSORS if "qweight" in names else set()

    def weight(self, read: Read, names: set[str], shape: Shape) -> Tensor:
        codes, zeros, scales, groups = self._parts(read, names, shape)
        return ((codes.float() - zeros.float()[groups]) * scales.float()[groups]).T

    def as_quantized(self, read: Read, names: set[str], shape: Shape, dtype: torch.dtype) -> QuantizedWeight | None:
        codes, zeros, scales, groups = self._parts(read, names, shape)
        return repack.integers_of_groups(codes.T, scales.T, zeros.T, groups, dtype)

    def _parts(self, read: Read, names: set[str], shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes [K, N], zeros and scales [K / g, N], and the group of each input, int64 [K]."""
        codes = unpacked(read("qweight"), self.bits, 0)
        zeros = (unpacked(read("qzeros"), self.bits, 1) + self.zero_offset) & (2**self.bits - 1)
        scales = read("scales")
        group = self.group or shape[1]
        if "g_idx" not in names and len(scales) != -(-shape[1] // group):
            raise ValueError(f"{shape[1]} inputs in groups of {group} (group_size) do not match {len(scales)} scales")
        groups = read("g_idx").long() if "g_idx" in names else torch.arange(shape[1]) // group
        fits = codes.shape == (shape[1], shape[0]) and zeros.shape == scales.shape and groups.shape == (shape[1],)
        if not fits or int(groups.max()) >= len(scales) or int(groups.min()) < 0:
            raise ValueError(
                f"the shapes do not match: qweight {list(codes.shape[::-1])}, qzeros {list(zeros.shape)}, scales "
                f"{list(scales.shape)}, groups {list(groups.shape)} up to {int(groups.max())}"
            )
        return codes, zeros, scales, groups


def read_method(settings: Mapping[str, Any]) -> Gptq:
    FIELDS.check(settings)
    bits = settings.get("bits", 4)
    if type(bits) is not int or bits not in (2, 3, 4, 8):
        raise ValueError(f"GPTQ supports 2, 3, 4 and 8 bits; got {bits!r}")
    if settings.get("pack_dtype") not in (None, "int32"):
        raise ValueError(f"GPTQ must be packed into int32; got pack_dtype {settings['pack_dtype']!r}")
    version = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"GPTQ supports the formats 'gptq' and 'gptq_v2'; got {version!r}")
    return Gptq(bits, group_size(settings, "group_size"), 1 if version == "gptq" else 0)


def read_overrides(settings: Mapping[str, Any]) -> Overrides:
    """GPTQModel's "dynamic": settings for module names that match an expression; "-:" leaves modules in floats."""
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise ValueError(f"dynamic must map regular expressions to settings; got {dynamic!r}")
    rules: list[tuple[re.Pattern[str], Mapping[str, Any]]] = []
    for text, own in dynamic.items():
        own = {} if own is None or text.startswith("-:") else own
        if not isinstance(own, Mapping):
            raise ValueError(f"dynamic: {text!r} must have an object of settings; got {own!r}")
        rules.append((compiled("dynamic", text.removeprefix("-:").removeprefix("+:")), own))
        read_method({**settings, **own})
    return lambda module: next((own for pattern, own in rules if pattern.match(module)), {})
