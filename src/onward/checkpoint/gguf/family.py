"""The entries of the table of GGUF architectures (`onward.checkpoint.gguf.families`)."""

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
