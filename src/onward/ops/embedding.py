"""Rows of a table, looked up by token id."""

from torch import Tensor
from torch.nn import functional as F

from onward.ops.quantized import QuantizedWeight


def embedding(tokens: Tensor, table: Tensor | QuantizedWeight) -> Tensor:
    """int [B, T] ids and a [V, D] table, stock or quantized -> [B, T, D] in the table's dtype."""
    return table.rows(tokens) if isinstance(table, QuantizedWeight) else F.embedding(tokens, table)
