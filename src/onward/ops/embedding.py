"""Rows of a table, looked up by token id."""

from torch import Tensor
from torch.nn import functional as F

from onward.ops.packed import NativeWeight
from onward.ops.quantized import QuantizedWeight

Table = Tensor | NativeWeight | QuantizedWeight


def embedding(tokens: Tensor, table: Table) -> Tensor:
    """int [B, T] ids and a [V, D] table, stock, packed or quantized -> [B, T, D] in the table's dtype."""
    if isinstance(table, QuantizedWeight):
        return table.rows(tokens)
    return table.take(tokens) if isinstance(table, NativeWeight) else F.embedding(tokens, table)
