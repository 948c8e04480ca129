"""From stock weights to the layouts that decoding walks: done once, at load, tensor by tensor."""

from collections.abc import Callable
from typing import Any

from onward import ops
from onward.models.decoder import DecoderParams, LayerParams, Linear


def pack_params(params: DecoderParams, release: Callable[[], None] = lambda: None) -> DecoderParams:
    """The same weights with every matrix packed.

    A tied embedding stays as it is, for its rows are looked up one by one; the head has a packed copy of it.
    `release` is called after each layer, when its stock weights have been read for the last time.
    """
    layers = []
    for layer in params.layers:
        layers.append(pack_layer(layer))
        release()
    lm_head = ops.pack(params.lm_head)
    release()
    return params._replace(layers=tuple(layers), lm_head=lm_head)


def pack_layer(layer: LayerParams) -> LayerParams:
    """The same layer with every matrix packed; those that are packed already stay as they are."""
    packed: dict[str, Any] = {
        name: Linear(ops.pack(part.weight), part.bias)
        for name, part in layer._asdict().items()
        if isinstance(part, Linear)
    }
    return layer._replace(**packed)
