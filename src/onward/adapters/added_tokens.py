"""Adapters with tokens of their own: tables of more rows than the model's, which take the place of its embedding and
head."""

from dataclasses import replace
from typing import Any

import torch

from onward.adapters.peft_folder import Adapter
from onward.errors import CheckpointError, RequestError
from onward.models import Architecture, Embedding, Linear
from onward.models.blocks import Decoder


def grown(architecture: Architecture, adapter: Adapter) -> Architecture:
    """The architecture with the adapter's tokens; the same where it adds none.

    A tied head is untied where the adapter's embedding and head differ: one of them was trained alone.

    Raises:
        CheckpointError: only one of the embedding and the head has more rows. RequestError: the model is no decoder of
        the common blocks.
    """
    names = _tables(architecture)
    rows = {name: len(adapter.replaced[name]) for name in names if name in adapter.replaced}
    count = max(rows.values(), default=0)
    if count <= architecture.vocab_size:
        return architecture
    needed = names[:1] if architecture.tie_word_embeddings else names
    if wrong := [name for name in needed if rows.get(name) != count]:
        raise CheckpointError(
            f"the adapter's vocabulary has {count} tokens, and its {wrong[0]} has {rows.get(wrong[0], 0)} rows: "
            "save the embedding and the head with it (save_embedding_layers=True)"
        )
    if not isinstance(architecture, Decoder):
        raise RequestError("an adapter adds tokens to decoders of the common blocks alone: merge it with peft")
    tied = architecture.tie_word_embeddings and not _differ(adapter, names)
    return replace(architecture, vocab_size=count, tie_word_embeddings=tied)


def with_added_tokens(architecture: Architecture, params: Any, adapter: Adapter) -> tuple[Any, Adapter]:
    """The params with the adapter's larger tables, and what is left of the adapter; both as they are without such."""
    if grown(architecture, adapter) is architecture:
        return params, adapter
    tables = [adapter.replaced[name] for name in _tables(architecture) if name in adapter.replaced]
    dtype, device = params.embed_tokens.weight.dtype, params.embed_tokens.weight.device
    placed = [table.to(dtype=dtype, device=device) for table in tables]
    if any(table.dim() != 2 or table.shape[1] != architecture.hidden_size for table in tables):
        raise CheckpointError(f"the adapter's tables must have {architecture.hidden_size} columns")
    tied = grown(architecture, adapter).tie_word_embeddings
    head = Linear(placed[0]) if tied else params.lm_head._replace(weight=placed[1])
    rest = {name: tensor for name, tensor in adapter.replaced.items() if name not in _tables(architecture)}
    return params._replace(embed_tokens=Embedding(placed[0]), lm_head=head), replace(adapter, replaced=rest)


def _differ(adapter: Adapter, names: tuple[str, str]) -> bool:
    """Whether the adapter has both tables, and they are not one."""
    embedding, head = (adapter.replaced.get(name) for name in names)
    return embedding is not None and head is not None and not torch.equal(embedding, head)


def _tables(architecture: Architecture) -> tuple[str, str]:
    """The names of the embedding and of the head."""
    names = architecture.names if isinstance(architecture, Decoder) else None
    if names is None:
        return "model.embed_tokens.weight", "lm_head.weight"
    return f"{names.embed_tokens}.weight", f"{names.lm_head}.weight"
