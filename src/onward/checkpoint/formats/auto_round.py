"""AutoRound (Cheng et al., arXiv 2309.05516): weights packed like GPTQ's or AWQ's, with per-module settings.

packing_format selects the layout: "auto_round:auto_gptq" (and "auto_round:gptq") stores zero - 1, "auto_round" and
"auto_round:gptqmodel" store zero, "auto_round:auto_awq" packs like AWQ.
"""

import re
from collections.abc import Mapping
from typing import Any

from onward.checkpoint.formats import awq, gptq
from onward.checkpoint.formats.settings import Fields, Overrides, compiled, words

_IGNORED = """
sym autoround_version auto_round_version block_name_to_quantize to_quant_block_names iters lr minmax_lr nsamples seqlen
batch_size enable_quanted_input dataset enable_minmax_tuning low_gpu_mem_usage gradient_accumulate_steps scale_dtype amp
quant_nontext_module quant_lm_head act_data_type act_group_size act_sym act_dynamic enable_norm_bias_tuning
enable_alg_ext tuning_mode damp_percent desc_act true_sequential quant_block_list supported_types super_group_size
enable_opt_rtn disable_opt_rtn is_mllm
"""
FIELDS = Fields(
    read=words("bits group_size packing_format data_type extra_config act_bits super_bits"),
    ignored=words(_IGNORED),
    refused={"rotation_config": (), "transform_config": (), "hadamard_config": ()},
)
_GPTQ_FORMATS = {
    **dict.fromkeys(("auto_round:auto_gptq", "auto_round:gptq", "auto_gptq"), "gptq"),
    **dict.fromkeys(("auto_round:gptqmodel", "auto_round"), "gptq_v2"),
}
_AWQ_FORMATS = ("auto_round:auto_awq", "auto_round:awq", "auto_awq")
# Settings of a module that affect how its tensors are read.
_MODULE_SETTINGS = ("bits", "group_size", "data_type", "act_bits", "super_bits")


def read_method(settings: Mapping[str, Any]) -> gptq.Gptq | awq.Awq:
    FIELDS.check(settings)
    data_type, packing = settings.get("data_type") or "int", settings.get("packing_format") or "auto_round:auto_gptq"
    if data_type != "int":
        raise ValueError(f"only AutoRound with data_type 'int' is supported; got {data_type!r}")
    if (settings.get("act_bits") or 16) < 16 or settings.get("super_bits"):
        raise ValueError(f"only weight-only AutoRound is supported; got act_bits {settings.get('act_bits')!r}")
    own = {"bits": settings.get("bits") or 4, "group_size": settings.get("group_size")}
    if packing in _GPTQ_FORMATS:
        return gptq.read_method(own | {"checkpoint_format": _GPTQ_FORMATS[packing]})
    if packing in _AWQ_FORMATS:
        return awq.read_method(own)
    formats = ", ".join([*_GPTQ_FORMATS, *_AWQ_FORMATS])
    raise ValueError(f"AutoRound supports the packing_formats {formats}; got {packing!r}")


def read_overrides(settings: Mapping[str, Any]) -> Overrides:
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
        read_method({**settings, **own})

    def settings_of(module: str) -> Mapping[str, Any]:
        matching = (name for name, pattern in patterns.items() if name in quantized and pattern.search(module))
        return quantized.get(module if module in quantized else next(matching, module), {})

    return settings_of
