"""Integers packed into int32, as GPTQ (Frantar et al., arXiv 2210.17323), AWQ (Lin et al., arXiv 2306.00978) and
AutoRound (Cheng et al., arXiv 2309.05516) store them. The weight is (q - zero) * scale; the tensors of a module:

    GPTQ   qweight int32 [K * b / 32, N], the first input in the lowest bits; qzeros int32 [K / g, N * b / 32], which
           hold zero - 1 in b bits, so that all ones are 0 (in the format "gptq_v2", zero itself); scales [K / g, N];
           g_idx int32 [K], the group of each input if inputs are ordered by activation
    AWQ    qweight int32 [K, N / 8], qzeros int32 [K / g, N / 8], scales float16 [K / g, N], as AutoAWQ's "gemm";
           outputs are packed in the order 0, 2, 4, 6, 1, 3, 5, 7

AutoRound packs like one of them, and has per-module settings. Its packing_format selects the layout:
"auto_round:auto_gptq" (and "auto_round:gptq") stores zero - 1, "auto_round" and "auto_round:gptqmodel" store zero,
"auto_round:auto_awq" packs like AWQ.
"""

import re
from collections.abc import Mapping, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onward.checkpoint.formats.settings import Fields, Overrides, QuantizationMethod, Read, compiled, group_size, words
from onward.checkpoint.formats.stored import Integers, Shape, unpacked

_TENSORS = {"qweight", "qzeros", "scales"}
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


def read_method(settings: Mapping[str, Any]) -> QuantizationMethod:
    FIELDS.check(settings)
    bits = settings.get("bits", 4)
    if type(bits) is not int or bits not in (2, 3, 4, 8):
        raise ValueError(f"GPTQ supports 2, 3, 4 and 8 bits; got {bits!r}")
    if settings.get("pack_dtype") not in (None, "int32"):
        raise ValueError(f"GPTQ must be packed into int32; got pack_dtype {settings['pack_dtype']!r}")
    version = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"GPTQ supports the formats 'gptq' and 'gptq_v2'; got {version!r}")
    decode = partial(_gptq, bits, group_size(settings, "group_size"), 1 if version == "gptq" else 0)
    return QuantizationMethod(_TENSORS | {"g_idx"}, {"qweight"}, decode)


def _gptq(bits: int, group: int | None, zero_offset: int, read: Read, names: Set[str], shape: Shape) -> Integers:
    """group: inputs that share a scale; None for all. zero_offset: added to stored zeros."""
    codes = unpacked(read("qweight"), bits, 0)
    zeros = (unpacked(read("qzeros"), bits, 1) + zero_offset) & (2**bits - 1)
    scales, group = read("scales"), group or shape[1]
    if "g_idx" not in names and len(scales) != -(-shape[1] // group):
        raise ValueError(f"{shape[1]} inputs in groups of {group} (group_size) do not match {len(scales)} scales")
    groups = read("g_idx").long() if "g_idx" in names else torch.arange(shape[1]) // group
    fits = codes.shape == (shape[1], shape[0]) and zeros.shape == scales.shape and groups.shape == (shape[1],)
    if not fits or int(groups.max()) >= len(scales) or int(groups.min()) < 0:
        raise ValueError(
            f"the shapes do not match: qweight {list(codes.shape[::-1])}, qzeros {list(zeros.shape)}, scales "
            f"{list(scales.shape)}, groups {list(groups.shape)} up to {int(groups.max())}"
        )
    return Integers(codes.T, scales.T, zeros.T, groups)


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


# ── AWQ ───────────────────────────────────────────────────────────────────────────────────────────────────────

AWQ_FIELDS = Fields(
    read=words("bits w_bit group_size q_group_size version format"),
    # qzeros holds the zero points, also for symmetric weights. transformers writes GPTQ's fields too.
    ignored=words("zero_point do_fuse fuse_max_seq_len modules_to_fuse") | (FIELDS.ignored - {"desc_act"}),
    refused={"desc_act": ()},
)
# Output c of eight is in the field _PLACES[c].
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


def read_awq(settings: Mapping[str, Any]) -> QuantizationMethod:
    AWQ_FIELDS.check(settings)
    bits = settings.get("bits", settings.get("w_bit", 4))
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if settings.get("backend") == "llm-awq":
        version = "llm-awq"
    if bits != 4 or version != "gemm":
        raise ValueError(f"AWQ supports 4 bits in version 'gemm'; got bits {bits!r}, version {version!r}")
    group = group_size(settings, "group_size" if settings.get("group_size") is not None else "q_group_size")
    return QuantizationMethod(_TENSORS, {"qweight"}, partial(_awq, group))


def _awq(group: int | None, read: Read, names: Set[str], shape: Shape) -> Integers:
    group = group or shape[1]
    codes, zeros = (_in_order(read(name)) for name in ("qweight", "qzeros"))
    scales = read("scales")
    fits = zeros.shape == scales.shape and len(scales) == -(-shape[1] // group)
    if not fits or codes.shape != (shape[1], shape[0]):
        sizes = f"qzeros {list(zeros.shape)}, scales {list(scales.shape)}"
        raise ValueError(f"the shapes do not match: qweight {list(codes.shape[::-1])}, {sizes}")
    return Integers(codes.T, scales.T, zeros.T, group)


def _in_order(packed: Tensor) -> Tensor:
    fields = unpacked(packed, 4, 1)
    order = torch.tensor(_PLACES).repeat(fields.shape[1] // 8) + torch.arange(fields.shape[1]) // 8 * 8
    return fields[:, order]


# ── AutoRound ─────────────────────────────────────────────────────────────────────────────────────────────────

_AUTO_ROUND_IGNORED = """
sym autoround_version auto_round_version block_name_to_quantize to_quant_block_names iters lr minmax_lr nsamples seqlen
batch_size enable_quanted_input dataset enable_minmax_tuning low_gpu_mem_usage gradient_accumulate_steps scale_dtype amp
quant_nontext_module quant_lm_head act_data_type act_group_size act_sym act_dynamic enable_norm_bias_tuning
enable_alg_ext tuning_mode damp_percent desc_act true_sequential quant_block_list supported_types super_group_size
enable_opt_rtn disable_opt_rtn is_mllm
"""
AUTO_ROUND_FIELDS = Fields(
    read=words("bits group_size packing_format data_type extra_config act_bits super_bits"),
    ignored=words(_AUTO_ROUND_IGNORED),
    refused={"rotation_config": (), "transform_config": (), "hadamard_config": ()},
)
_GPTQ_FORMATS = {
    **dict.fromkeys(("auto_round:auto_gptq", "auto_round:gptq", "auto_gptq"), "gptq"),
    **dict.fromkeys(("auto_round:gptqmodel", "auto_round"), "gptq_v2"),
}
_AWQ_FORMATS = ("auto_round:auto_awq", "auto_round:awq", "auto_awq")
# Settings of a module that affect how its tensors are read.
_MODULE_SETTINGS = ("bits", "group_size", "data_type", "act_bits", "super_bits")


def read_auto_round(settings: Mapping[str, Any]) -> QuantizationMethod:
    AUTO_ROUND_FIELDS.check(settings)
    data_type, packing = settings.get("data_type") or "int", settings.get("packing_format") or "auto_round:auto_gptq"
    if data_type != "int":
        raise ValueError(f"only AutoRound with data_type 'int' is supported; got {data_type!r}")
    if (settings.get("act_bits") or 16) < 16 or settings.get("super_bits"):
        raise ValueError(f"only weight-only AutoRound is supported; got act_bits {settings.get('act_bits')!r}")
    own = {"bits": settings.get("bits") or 4, "group_size": settings.get("group_size")}
    if packing in _GPTQ_FORMATS:
        return read_method(own | {"checkpoint_format": _GPTQ_FORMATS[packing]})
    if packing in _AWQ_FORMATS:
        return read_awq(own)
    formats = ", ".join([*_GPTQ_FORMATS, *_AWQ_FORMATS])
    raise ValueError(f"AutoRound supports the packing_formats {formats}; got {packing!r}")


def read_auto_round_overrides(settings: Mapping[str, Any]) -> Overrides:
    """AutoRound's "extra_config": settings by module name or regular expression. Modules of 16 bits are floats."""
    extra = settings.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(own, Mapping) for own in extra.values()):
        raise ValueError(f"extra_config must map names of modules to settings; got {extra!r}")
    special = [name for name in extra if re.search(r"[*+?^$()\[\]{}|\\]", name)]
    patterns = {name: compiled("extra_config", name) for name in special}
    quantized = {
        name: {field: own[field] for field in _MODULE_SETTINGS if own.get(field) is not None}
        for name, own in extra.items()
        if (own.get("bits") or 4) < 16
    }
    for own in quantized.values():
        read_auto_round({**settings, **own})

    def settings_of(module: str) -> Mapping[str, Any]:
        matching = (name for name, pattern in patterns.items() if name in quantized and pattern.search(module))
        return quantized.get(module if module in quantized else next(matching, module), {})

    return settings_of
