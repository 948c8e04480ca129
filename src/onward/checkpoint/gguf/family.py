"""The entries of the table of GGUF architectures (`onward.checkpoint.gguf.families`), and the GGUF names of weights."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# (the metadata below "{architecture}.", the config.json fields so far) -> more fields of config.json.
Fields = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]


class RowOrder(NamedTuple):
    """The positions of a weight's stock rows and columns among the stored ones: int64 [N], int64 [K]; None: unchanged.
    stored_rows: the number of stored rows if the weight is only some of them."""

    rows: Tensor | None = None
    columns: Tensor | None = None
    stored_rows: int | None = None


# (a stock name, the fields of config.json, the number of rows of the weight) -> its order.
Orders = Callable[[str, Mapping[str, Any], int], RowOrder]


class FusedTensor(NamedTuple):
    """A stock weight that the converter splits. by: joins the floats of the parts, by default along rows."""

    tensors: tuple[str, ...]
    by: Callable[[list[Tensor]], Tensor] = torch.cat


class TensorTransform(NamedTuple):
    """The float32 inverse of a change that the converter makes. of: whether it changes a weight of this stock name."""

    of: Callable[[str], bool]
    read: Callable[[Tensor], Tensor]


class GgufFamily(NamedTuple):
    """architecture: as in config.json. order: of weights that the converter reorders. config: fields that files omit.
    fixed: keys that `numbers` and `derived` do not read, and their only valid values. parts: fields for optional biases
    or norms, and either the end of their tensors' names or a test on all names. names, numbers: entries that override
    `WHOLE`, `LAYER` and `NUMBERS`; None: a field from `derived`. transforms: of weights that the converter changes.
    derived: fields that are computed from the metadata."""

    architecture: str
    order: Orders = lambda name, config, rows: RowOrder()
    config: Mapping[str, object] = {}
    fixed: Mapping[str, object] = {}
    parts: Mapping[str, str | Callable[[Collection[str]], bool]] = {}
    names: Mapping[str, str | FusedTensor] = {}
    numbers: Mapping[str, str | None] = {}
    transforms: Sequence[TensorTransform] = ()
    derived: Fields = lambda metadata, config: {}

    def stock_values(self, name: str, values: Tensor) -> Tensor:
        """The stock checkpoint's floats for those of the file."""
        for transform in self.transforms:
            values = transform.read(values.to(torch.float32)) if transform.of(name) else values
        return values


def pairs_to_halves(name: str, config: Mapping[str, Any], rows: int) -> RowOrder:
    """Undo the interleaving of the two rotated halves of query and key heads by the converter's LlamaModel."""
    if name.split(".")[-2] not in ("q_proj", "k_proj"):
        return RowOrder()
    return RowOrder(torch.arange(rows).view(-1, config["head_dim"] // 2, 2).transpose(1, 2).flatten())


def halves_to_pairs(name: str, config: Mapping[str, Any], rows: int) -> RowOrder:
    """The inverse, for the rotated part of heads, like the converter's Glm4Model for multimodal models."""
    if name.split(".")[-2] not in ("q_proj", "k_proj"):
        return RowOrder()
    of_head = torch.arange(config["head_dim"])
    rotated = int(config["head_dim"] * config["rope_parameters"].get("partial_rotary_factor", 1))
    of_head[:rotated] = of_head[:rotated].view(2, -1).T.flatten()
    return RowOrder((torch.arange(0, rows, config["head_dim"]).unsqueeze(1) + of_head).flatten())


def value_heads(name: str, config: Mapping[str, Any], rows: int) -> RowOrder:
    """The first value head of every key head comes first, then the second ones, and so on."""
    part = name.partition(".linear_attn.")[2].removesuffix(".weight")
    if not part:
        return RowOrder()
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if groups == heads or part == "norm":
        return RowOrder()
    of_heads = torch.arange(heads).view(heads // groups, groups).T.flatten()
    width = config["linear_value_head_dim"]
    of_features = (of_heads.unsqueeze(1) * width + torch.arange(width)).flatten()
    if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return RowOrder(of_heads)
    if part == "out_proj":
        return RowOrder(None, of_features)
    others = rows - heads * width  # queries and keys come first, if any
    return RowOrder(torch.cat((torch.arange(others), others + of_features)))


def beta_and_decay(name: str, config: Mapping[str, Any], rows: int) -> RowOrder:
    """Qwen3-Next stores the projections for beta and decay in one tensor, grouped by key head."""
    part = name.partition(".linear_attn.")[2]
    if part not in ("in_proj_b.weight", "in_proj_a.weight"):
        return RowOrder()
    groups = config["linear_num_key_heads"]
    width = config["linear_num_value_heads"] // groups
    return _of_key_heads(groups, (width, width), (0,) if part == "in_proj_b.weight" else (1,))


def fused_delta(name: str, config: Mapping[str, Any], rows: int) -> RowOrder:
    """Older Qwen3-Next files store queries, keys, values and z in one tensor too."""
    part = name.partition(".linear_attn.")[2]
    if part not in ("in_proj_qkv.weight", "in_proj_z.weight"):
        return beta_and_decay(name, config, rows)
    groups, keys = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
    return _of_key_heads(groups, (keys, keys, values, values), (3,) if part == "in_proj_z.weight" else (0, 1, 2))


def _of_key_heads(groups: int, widths: Sequence[int], parts: Sequence[int]) -> RowOrder:
    """The rows of these parts, part by part, in a tensor that is grouped by key head."""
    stored_rows = groups * sum(widths)
    rows = torch.split(torch.arange(stored_rows).view(groups, -1), list(widths), 1)
    return RowOrder(torch.cat([rows[part].flatten() for part in parts]), stored_rows=stored_rows)


def with_fused_experts_order(order: Orders) -> Orders:
    """The order if each expert has one matrix with the gate's rows above the up projection's."""

    def of_halves(name: str, config: Mapping[str, Any], rows: int) -> RowOrder:
        part = name.removesuffix(".weight").split(".")[-1]
        if ".experts." not in name or part not in ("gate_proj", "up_proj", "w1", "w3"):
            return order(name, config, rows)
        return RowOrder(torch.arange(rows) + (rows if part in ("up_proj", "w3") else 0), stored_rows=2 * rows)

    return of_halves


# The family's forward pass adds 1 to norm weights, and so does the converter.
NORMS = TensorTransform(lambda name: name.endswith("norm.weight"), read=lambda values: values - 1)
# The converter leaves the norm of Gated DeltaNet unchanged.
NORMS_EXCEPT_DELTA = NORMS._replace(of=lambda name: NORMS.of(name) and not name.endswith(".linear_attn.norm.weight"))
# Decay rates, -exp(A), instead of the logarithms A.
RATES = TensorTransform(lambda name: name.endswith(".A_log"), read=lambda values: (-values).log())


def keys_and_values(parts: list[Tensor]) -> Tensor:
    """Join the matrices [H, R, K] for keys and [H, V, R] for values of a latent: [H (K + V), R]."""
    keys, values = parts
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)


def blocks_of(columns: Tensor, weights: int) -> Tensor | None:
    """An order of columns as an order of blocks of `weights` columns; None if it splits blocks."""
    if len(columns) % weights:
        return None
    blocks = columns.view(-1, weights)
    whole = (blocks[:, 0] % weights == 0).all() and (blocks == blocks[:, :1] + torch.arange(weights)).all()
    return blocks[:, 0] // weights if whole else None


def _each(stock: str, gguf: str, *parts: str) -> dict[str, str]:
    return {stock.format(part): gguf.format(part) for part in parts}


_QKV, _FFN = ("q", "k", "v"), ("gate", "up", "down")
# A weight's stock name without "model." (or "backbone.") and ".weight" -> GGUF's; `model.layers.3.` becomes `blk.3.`.
# All experts share one tensor. An entry with a suffix in the stock name, or none, has the full GGUF name.
WHOLE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    **_each("self_attn.{}_proj", "attn_{}", *_QKV),
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    **_each("self_attn.{}_norm", "attn_{}_norm", "q", "k"),
    "self_attn.sinks": "attn_sinks.weight",
    "post_attention_layernorm": "ffn_norm",
    **_each("mlp.{}_proj", "ffn_{}", *_FFN),
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    **_each("mlp.experts.{}_proj", "ffn_{}_exps", *_FFN),
    **_each("mlp.shared_experts.{}_proj", "ffn_{}_shexp", *_FFN),
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
QWEN35 = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    **_each("mlp.shared_expert.{}_proj", "ffn_{}_shexp", *_FFN),
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
# Qwen3-Next, whose older files have fewer tensors.
QWEN3NEXT = {**QWEN35, "linear_attn.in_proj_a": "ssm_ba", "linear_attn.in_proj_b": "ssm_ba"}
FUSED_QWEN3NEXT = {**QWEN3NEXT, "linear_attn.in_proj_qkv": "ssm_in", "linear_attn.in_proj_z": "ssm_in"}
LATENT = {
    **_each("self_attn.{}_proj", "attn_{}", "q_a", "q_b", "kv_b"),
    **_each("self_attn.{}_layernorm", "attn_{}_norm", "q_a", "kv_a"),
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
}
CUT_LATENT: dict[str, str | FusedTensor] = {
    **LATENT,
    "self_attn.kv_b_proj": FusedTensor(("attn_k_b", "attn_v_b"), keys_and_values),
}
LFM2 = {
    "embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    **_each("self_attn.{}_layernorm", "attn_{}_norm", "q", "k"),
    **_each("conv.{}", "shortconv.{}", "conv", "in_proj", "out_proj"),
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
GRANITE_EXPERTS = {
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    **_each("block_sparse_moe.experts.{}_proj", "ffn_{}_exps", *_FFN),
}
_MAMBA = {
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    **_each("{}", "ssm_{}", "conv1d", "norm"),
    **_each("{}_proj", "ssm_{}", "in", "out"),
}
# Granite's shared expert.
SHARED_GRANITE: dict[str, str | FusedTensor] = {
    **GRANITE_EXPERTS,
    "shared_mlp.input_linear": FusedTensor(("ffn_gate_shexp", "ffn_up_shexp")),
    "shared_mlp.output_linear": "ffn_down_shexp",
}
GRANITE_HYBRID: dict[str, str | FusedTensor] = {
    **{f"mamba.{part}": tensor for part, tensor in _MAMBA.items()},
    "shared_mlp.input_linear": FusedTensor(("ffn_gate", "ffn_up")),
    "shared_mlp.output_linear": "ffn_down",
}
FALCON_H1 = {
    **{f"mamba.{part}": tensor for part, tensor in _MAMBA.items()},
    "final_layernorm": "output_norm",
    "pre_ff_layernorm.weight": "ffn_norm",  # the full GGUF name
    **_each("feed_forward.{}_proj", "ffn_{}", *_FFN),
}
_NEMOTRON_BLOCK = {
    **_MAMBA,
    **_each("{}_proj", "attn_{}", *_QKV),
    "o_proj": "attn_output",
    **_each("{}_proj", "ffn_{}", "up", "down"),
    "gate": "ffn_gate_inp",
    "gate.e_score_correction_bias": "exp_probs_b.bias",
    **_each("experts.{}_proj", "ffn_{}_exps", "up", "down"),
    **_each("shared_experts.{}_proj", "ffn_{}_shexp", "up", "down"),
    "fc1_latent_proj": "ffn_latent_down",
    "fc2_latent_proj": "ffn_latent_up",
}
NEMOTRON_H = {
    **{f"mixer.{part}": tensor for part, tensor in _NEMOTRON_BLOCK.items()},
    "embeddings": "token_embd",
    "norm_f": "output_norm",
    "norm": "attn_norm",
}
AFTER_ATTENTION = {"post_attention_layernorm": "post_attention_norm"}
AFTER_BOTH = {**AFTER_ATTENTION, "post_feedforward_layernorm": "post_ffw_norm"}
FOUR_NORMS = {**AFTER_BOTH, "pre_feedforward_layernorm": "ffn_norm"}
GEMMA4 = {
    **FOUR_NORMS,
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale.weight",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    **_each("{}_feedforward_layernorm_2", "{}_ffw_norm_2", "pre", "post"),
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    **_each("experts.{}_proj", "ffn_{}_exps", *_FFN),
}

_EXPERT = re.compile(r"((?:.+\.)?experts)\.(\d+)\.(.+)")


def with_fused_experts(family: GgufFamily) -> GgufFamily:
    """The family for files that store each expert's gate and up projection in one matrix."""
    halves = ("ffn_gate_exps", "ffn_up_exps")
    fused = {part: "ffn_gate_up_exps" for part, line in {**LAYER, **family.names}.items() if line in halves}
    return family._replace(names={**family.names, **fused}, order=with_fused_experts_order(family.order))


class GgufName(NamedTuple):
    """The tensors of a weight, its expert if they stack several, and `FusedTensor.by`."""

    tensors: tuple[str, ...]
    expert: int | None = None
    by: Callable[[list[Tensor]], Tensor] = torch.cat


def gguf_name(name: str, family: GgufFamily) -> GgufName:
    """Locate the weight of a stock name; without a table entry, it has its stock name."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        stem, kind = name, ""
    stem = stem.removeprefix("model.").removeprefix("backbone.")
    whole = family.names.get(stem, WHOLE.get(stem))
    if isinstance(whole, str):
        return GgufName((f"{whole}.{kind}",))
    layers, _, rest = stem.partition(".")
    number, _, part = rest.partition(".")
    match = _EXPERT.fullmatch(part)
    part = part if match is None else f"{match[1]}.{match[3]}"
    expert = None if match is None else int(match[2])
    line, end = family.names.get(f"{part}.{kind}"), ""
    if line is None:
        line, end = family.names.get(part, LAYER.get(part)), f".{kind}" if kind else ""
    if layers != "layers" or line is None:
        return GgufName((name,))
    joined = line if isinstance(line, FusedTensor) else FusedTensor((line,))
    return GgufName(tuple(f"blk.{number}.{tensor}{end}" for tensor in joined.tensors), expert, joined.by)
