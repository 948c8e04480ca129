"""What a checkpoint calls the parts of a model's params."""

from typing import Any

from torch.utils import _pytree as pytree

from onward.models import Architecture, Embedding, Linear, named_params
from onward.models.linear import is_marked


def part_names(architecture: Architecture) -> list[str | None]:
    """For each leaf of the params, marked matrices being leaves: the name of its module, or of its tensor.

    None for a leaf that is None. A tied head, whose weight has the embedding's name, is "lm_head".
    """
    leaves = pytree.tree_leaves(named_params(architecture), is_leaf=is_marked)
    tables = {leaf.weight for leaf in leaves if isinstance(leaf, Embedding)}

    def name_of(leaf: Any) -> str | None:
        if isinstance(leaf, Linear) and leaf.weight in tables:
            return "lm_head"
        return str(leaf.weight).removesuffix(".weight") if is_marked(leaf) else leaf

    return [name_of(leaf) for leaf in leaves]
