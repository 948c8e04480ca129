"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783); `onward.models.rope` has Llama 3.1's RoPE scaling."""

from collections.abc import Mapping
from typing import Any

from onward.models.config import DecoderConfig, common_fields
from onward.models.fields import flag

ARCHITECTURE = "LlamaForCausalLM"


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    fields = common_fields(config)
    bias = flag(config, "attention_bias")
    return DecoderConfig(
        **fields,
        windows=(None,) * fields["num_layers"],
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
    )
