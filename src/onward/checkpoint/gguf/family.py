"""What a line of the table of GGUF's architectures says (`onward.checkpoint.gguf.families`)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Makes fields of config.json out of (the metadata behind "{architecture}.", the fields that were read already).
Fields = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]


class RowOrder(NamedTuple):
    """Where the stock rows and columns of a weight lie among the stored ones: int64 [N], int64 [K]; None: as stored.
    stored_rows: how many there are where the weight is only some of them."""

    rows: Tensor | None = None
    columns: Tensor | None = None
    stored_rows: int | None = None


# (a stock name, the fields of config.json, how many rows the weight has) -> its order.
Orders = Callable[[str, Mapping[str, Any], int], RowOrder]


class FusedTensor(NamedTuple):
    """A stock weight that the converter cuts into several tensors. by: puts their floats together, shaped as they are
    stored; by default the rows of one lie below those of another."""

    tensors: tuple[str, ...]
    by: Callable[[list[Tensor]], Tensor] = torch.cat


class TensorTransform(NamedTuple):
    """What the converter computes of some weights, in float32. of: whether it does of the one of this stock name.
    read: undoes it."""

    of: Callable[[str], bool]
    read: Callable[[Tensor], Tensor]


class GgufFamily(NamedTuple):
    """architecture: the one of config.json. order: of weights that the converter reordered. config: fields that files
    leave unsaid. fixed: keys that `numbers` and `said` do not read, and the one value that they may have. parts: fields
    that say whether there are biases or norms, and how the tensors end that are there then, or what says so of the
    names of all. names, numbers: lines of `WHOLE`, `LAYER` and `NUMBERS` of its own; None: a field that `said` has.
    changes: of weights of which the converter computed others. said: what metadata say in a way of the family's own."""

    architecture: str
    order: Orders = lambda name, config, rows: RowOrder()
    config: Mapping[str, object] = {}
    fixed: Mapping[str, object] = {}
    parts: Mapping[str, str | Callable[[Collection[str]], bool]] = {}
    names: Mapping[str, str | FusedTensor] = {}
    numbers: Mapping[str, str | None] = {}
    changes: Sequence[TensorTransform] = ()
    said: Fields = lambda metadata, config: {}

    def stock_values(self, name: str, values: Tensor) -> Tensor:
        """The stock checkpoint's floats of what the file has."""
        for change in self.changes:
            values = change.read(values.to(torch.float32)) if change.of(name) else values
        return values


def pairs_to_halves(name: str, config: Mapping[str, Any], rows: int) -> RowOrder:
    """The two halves of each head of queries and keys, which RoPE rotates with each other, lie row by row together, as
    the converter's LlamaModel puts them and all that derive from it."""
    if name.split(".")[-2] not in ("q_proj", "k_proj"):
        return RowOrder()
    return RowOrder(torch.arange(rows).view(-1, config["head_dim"] // 2, 2).transpose(1, 2).flatten())


def halves_to_pairs(name: str, config: Mapping[str, Any], rows: int) -> RowOrder:
    """The other way round, as the converter's Glm4Model puts the part of heads that turns in models that see images."""
    if name.split(".")[-2] not in ("q_proj", "k_proj"):
        return RowOrder()
    of_head = torch.arange(config["head_dim"])
    turned = int(config["head_dim"] * config["rope_parameters"].get("partial_rotary_factor", 1))
    of_head[:turned] = of_head[:turned].view(2, -1).T.flatten()
    return RowOrder((torch.arange(0, rows, config["head_dim"]).unsqueeze(1) + of_head).flatten())


def value_heads(name: str, config: Mapping[str, Any], rows: int) -> RowOrder:
    """Of the value heads that share a key head the first of all groups come first, then the second, and so on."""
    part = name.partition(".linear_attn.")[2].removesuffix(".weight")
    if not part:
        return RowOrder()
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if groups == heads:
        return RowOrder()
    of_heads = torch.arange(heads).view(heads // groups, groups).T.flatten()
    width = config["linear_value_head_dim"]
    of_features = (of_heads.unsqueeze(1) * width + torch.arange(width)).flatten()
    if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return RowOrder(of_heads)
    if part == "out_proj":
        return RowOrder(None, of_features)
    if part == "norm":
        return RowOrder()
    others = rows - heads * width  # queries and keys come first, where there are some
    return RowOrder(torch.cat((torch.arange(others), others + of_features)))


def beta_and_decay(name: str, config: Mapping[str, Any], rows: int) -> RowOrder:
    """In Qwen3-Next's files one tensor has what makes beta and decay; those of a key head lie together."""
    part = name.partition(".linear_attn.")[2]
    if part not in ("in_proj_b.weight", "in_proj_a.weight"):
        return RowOrder()
    groups = config["linear_num_key_heads"]
    width = config["linear_num_value_heads"] // groups
    return _of_key_heads(groups, (width, width), (0,) if part == "in_proj_b.weight" else (1,))


def fused_delta(name: str, config: Mapping[str, Any], rows: int) -> RowOrder:
    """In older ones queries, keys, values and z are one tensor, too."""
    part = name.partition(".linear_attn.")[2]
    if part not in ("in_proj_qkv.weight", "in_proj_z.weight"):
        return beta_and_decay(name, config, rows)
    groups, keys = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
    return _of_key_heads(groups, (keys, keys, values, values), (3,) if part == "in_proj_z.weight" else (0, 1, 2))


def _of_key_heads(groups: int, widths: Sequence[int], parts: Sequence[int]) -> RowOrder:
    """The rows of these parts, part by part, of a tensor where the parts of a key head lie together."""
    stored_rows = groups * sum(widths)
    rows = torch.split(torch.arange(stored_rows).view(groups, -1), list(widths), 1)
    return RowOrder(torch.cat([rows[part].flatten() for part in parts]), stored_rows=stored_rows)


def of_fused_experts(order: Orders) -> Orders:
    """An order where of each expert one matrix has the rows of the gate and below them those of the other half."""

    def of_halves(name: str, config: Mapping[str, Any], rows: int) -> RowOrder:
        part = name.removesuffix(".weight").split(".")[-1]
        if ".experts." not in name or part not in ("gate_proj", "up_proj", "w1", "w3"):
            return order(name, config, rows)
        return RowOrder(torch.arange(rows) + (rows if part in ("up_proj", "w3") else 0), stored_rows=2 * rows)

    return of_halves


# The family's forward adds 1 to weights of norms, and the converter too.
NORMS = TensorTransform(lambda name: name.endswith("norm.weight"), read=lambda values: values - 1)
# The norm of Gated DeltaNet is as it was.
NORMS_BUT_OF_STATES = NORMS._replace(of=lambda name: NORMS.of(name) and not name.endswith(".linear_attn.norm.weight"))
# Rates of decay, -exp(A), in place of the logarithms A.
RATES = TensorTransform(lambda name: name.endswith(".A_log"), read=lambda values: (-values).log())


def keys_and_values(parts: list[Tensor]) -> Tensor:
    """The matrix [H (K + V), R] that makes keys and values of latents, out of one for keys, [H, R, K], and one for
    values, [H, V, R]."""
    keys, values = parts
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)


def blocks_of(columns: Tensor, weights: int) -> Tensor | None:
    """An order of columns as one of blocks of so many; None: it does not move whole blocks."""
    if len(columns) % weights:
        return None
    blocks = columns.view(-1, weights)
    whole = (blocks[:, 0] % weights == 0).all() and (blocks == blocks[:, :1] + torch.arange(weights)).all()
    return blocks[:, 0] // weights if whole else None
