"""DeepSeek-V2 (arXiv 2405.04434): DeepSeek-V3 with experts chosen by softmax, of V2-Lite without groups."""

from collections.abc import Mapping
from typing import Any

from onward.models.blocks import Decoder
from onward.models.config import only
from onward.models.expert_fields import num_dense_layers
from onward.models.families.deepseek_v3 import LATENT, deepseek_experts, latent_attention
from onward.models.fields import Overlaid

ARCHITECTURES = ("DeepseekV2ForCausalLM",)


def read_config(config: Mapping[str, Any]) -> Decoder:
    for name, value in {"scoring_func": "softmax", "moe_layer_freq": 1}.items():
        only(config, name, value)
    only(config, "topk_method", "greedy", "group_limited_greedy")
    for name in ("norm_topk_prob", "mlp_bias"):
        only(config, name, False)
    fields, attention = latent_attention(config, LATENT)
    if config.get("topk_method") != "group_limited_greedy":
        config = Overlaid({"n_group": 1, "topk_group": 1}, config)
    experts = deepseek_experts(
        config, fields, count=64, inner=1407, scale=1.0, chosen=6, shared=2,
        score="softmax", choice_bias=False, normalize=False, group_best=1,
    )  # fmt: skip
    first = num_dense_layers(config, 0)
    return fields.decoder(
        fields.layer(attention, fields.feed_forward() if i < first else experts) for i in range(fields.num_layers)
    )
