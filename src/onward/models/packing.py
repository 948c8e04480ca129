"""Pack stock weights into the layouts that the kernels read: once, at load, tensor by tensor."""

from collections.abc import Callable
from typing import Any

from onward import ops
from onward.models.latent_linear import LatentLinear
from onward.models.linear import Embedding, ExpertLinear, Linear, Router, ShortConv, map_marked


def pack_params(params: Any, release: Callable[[], None] = lambda: None) -> Any:
    """The same weights with every matrix packed.

    A tied pair stays one weight. An untied embedding is not packed: its rows are looked up one by one. `release` is
    called after each of the params' layers and at the end, when stock weights have been read for the last time.

    Args:
        params: of any kind with a tuple `layers`, in which `Linear` and `Embedding` mark the matrices.
    """
    layers = []
    for layer in params.layers:
        layers.append(pack_layer(layer))
        release()
    rest = params._replace(layers=())
    packed: dict[int, ops.Weight] = {}

    def pack_linear(path: tuple[Any, ...], part: Any) -> Any:
        if not isinstance(part, Linear):
            return part
        weight = packed[id(part.weight)] = ops.pack(part.weight)
        return part._replace(weight=weight)

    def share_tied(path: tuple[Any, ...], part: Any) -> Any:
        return Embedding(packed.get(id(part.weight), part.weight)) if isinstance(part, Embedding) else part

    rest = map_marked(share_tied, map_marked(pack_linear, rest))
    release()
    return rest._replace(layers=tuple(layers))


def pack_layer(layer: Any) -> Any:
    """The same layer with every matrix packed; packed ones stay as they are."""
    mixed = _mixed_experts(layer)
    return map_marked(lambda path, part: _packed(_in_floats(part) if path[:-1] in mixed else part), layer)


def _mixed_experts(layer: Any) -> set[tuple[Any, ...]]:
    """Where the experts lie whose matrices, of gate, up and down, are not of one format: no product takes those."""
    formats: dict[tuple[Any, ...], set[Any]] = {}

    def collect(path: tuple[Any, ...], part: Any) -> Any:
        if isinstance(part, ExpertLinear) and isinstance(part.weight, tuple):
            formats.setdefault(path[:-1], set()).update(_format(weight) for weight in part.matrices)
        return part

    map_marked(collect, layer)
    return {path for path, found in formats.items() if found != {None} and (len(found) > 1 or "ordered" in found)}


def _format(weight: ops.Weight) -> str | None:
    """The format of an expert's matrix; None of floats; "ordered" where its inputs are in an order of their own."""
    if not isinstance(weight, ops.QuantizedWeight):
        return None
    return weight.format if weight.order is None else "ordered"


def _in_floats(part: ExpertLinear) -> ExpertLinear:
    return part._replace(
        weight=tuple(
            weight.dequantize() if isinstance(weight, ops.QuantizedWeight) else weight for weight in part.matrices
        )
    )


def stack_params(params: Any) -> Any:
    """The same weights with those of experts stacked, as the definitions take them where there are no kernels."""
    return map_marked(
        lambda path, part: part._replace(weight=part.together) if isinstance(part, ExpertLinear) else part, params
    )


def _packed(part: Any) -> Any:
    if isinstance(part, Linear | Router):
        return part._replace(weight=ops.pack(part.weight))
    if isinstance(part, ShortConv):
        return part._replace(weight=part.by_tap.contiguous())
    if isinstance(part, LatentLinear):
        return part.packed()
    return part._replace(weight=ops.pack_experts(part.weight)) if isinstance(part, ExpertLinear) else part
