"""Pack stock weights into the layouts that the kernels read: once, at load, tensor by tensor."""

from collections.abc import Callable
from typing import Any

from onward import ops
from onward.models.decoder import DecoderParams, LayerParams, Linear


def pack_params(params: DecoderParams, release: Callable[[], None] = lambda: None) -> DecoderParams:
    """The same weights with every matrix packed.

    A tied pair stays one weight. An untied embedding is not packed: its rows are looked up one by one. `release` is
    called after each layer, when its stock weights have been read for the last time.
    """
    layers = []
    for layer in params.layers:
        layers.append(pack_layer(layer))
        release()
    lm_head = ops.pack(params.lm_head)
    embed_tokens = params.embed_tokens
    if params.lm_head is embed_tokens and isinstance(lm_head, ops.NativeWeight):
        embed_tokens = lm_head
    release()
    return params._replace(layers=tuple(layers), lm_head=lm_head, embed_tokens=embed_tokens)


def pack_layer(layer: LayerParams) -> LayerParams:
    """The same layer with every matrix packed; packed ones stay as they are."""
    packed: dict[str, Any] = {
        name: Linear(ops.pack(part.weight), part.bias)
        for name, part in layer._asdict().items()
        if isinstance(part, Linear)
    }
    return layer._replace(**packed)
