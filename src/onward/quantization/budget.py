"""Choose 4 or 8 bits for each matrix, so that all together take no more than a budget.

The 4 bits are iq4_nl's, which errs less than int4 in as many bytes. What a matrix costs in them is measured: the KL
divergence of the model with this matrix alone in iq4_nl from the model as it is, over texts. Those whose costs are the
largest sum that the bytes of int8 leave room for get int8. That costs add up is an approximation (arXiv 2411.17525 has
it hold for small errors).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from torch.utils import _pytree as pytree

from onward.checkpoint.quantized import parameter_name
from onward.errors import RequestError
from onward.models import Embedding, ExpertLinear, Linear, Model, map_marked
from onward.ops.linear import weight_shape
from onward.ops.quantized_layout import data_shape
from onward.quantization.calibration import Calibration
from onward.quantization.params import Choice, ParamsQuantizer
from onward.quantization.stream import Stream, decoder_of

_NARROW, _WIDE = "iq4_nl", "int8"  # the formats chosen from
_TABLE, _HEAD = (pytree.GetAttrKey("embed_tokens"),), (pytree.GetAttrKey("lm_head"),)
# The room of a budget is divided into so many parts.
_STEPS = 4096
# The texts that are measured: the first of those that are calibrated with, as far as these.
MEASURED = Calibration(texts=4, length=128)


@dataclass(frozen=True)
class _Unit:
    """Matrices of one format: one of a layer, a tied pair, or those of a layer's experts.

    paths: of the marked parts, in the whole params. layer: the number of their layer; None outside the layers.
    """

    paths: tuple[tuple[Any, ...], ...]
    layer: int | None
    shapes: tuple[tuple[int, int], ...]

    def nbytes(self, format: str) -> int:
        sizes = (data_shape(format, shape) for shape in self.shapes)
        return sum(blocks * of_block for blocks, of_block in sizes)

    @property
    def weights(self) -> int:
        return sum(rows * inputs for rows, inputs in self.shapes)


@torch.no_grad()
def choose_formats(
    model: Model, ids: Tensor, bits: float, show_fraction: Callable[[float], None] = lambda fraction: None
) -> dict[str, Choice]:
    """The format of each matrix, by the name of its part, and what it costs in iq4_nl.

    Args:
        model: of a built-in family, in its stock weights.
        ids: texts to measure with, int32 [count, length].
        bits: the most bits a weight, on average over all matrices.
        show_fraction: is called with the fraction of the measurements that is done.

    Raises:
        RequestError: fewer bits than the matrices take at least, or a model of no built-in family.
    """
    units = _units(model)
    weights = sum(unit.weights for unit in units)
    narrow = sum(unit.nbytes(_NARROW) for unit in units)
    added = [unit.nbytes(_WIDE) - unit.nbytes(_NARROW) for unit in units]
    # Blocks are filled up, so a matrix of 32 inputs or fewer takes no more bytes in int8.
    least = narrow + sum(min(size, 0) for size in added)
    room = math.floor(bits * weights / 8 + 1e-6) - narrow
    if room < least - narrow:
        raise RequestError(
            f"matrices take {8 * least / weights:.4g} bits a weight of this model at least; got a budget of {bits:g}"
        )
    costs = []
    for cost in _costs(model, ids[: MEASURED.texts, : MEASURED.length], units):
        costs.append(cost)
        show_fraction(len(costs) / len(units))
    chosen = _dearest(costs, added, room)
    return {
        f"{parameter_name(path)}.weight": Choice(_WIDE if index in chosen else _NARROW, costs[index])
        for index, unit in enumerate(units)
        for path in unit.paths
    }


def _dearest(costs: Sequence[float], sizes: Sequence[int], room: int) -> set[int]:
    """Of things with costs and sizes those that fit and cost most together: a knapsack, by dynamic programming.

    A thing whose size is 0 or less is always chosen: it makes room.
    """
    if sum(sizes) <= room:
        return set(range(len(sizes)))
    chosen = {index for index, size in enumerate(sizes) if size <= 0}
    room -= sum(sizes[index] for index in chosen)
    step = max(1, math.ceil(room / _STEPS))
    needs = [math.ceil(max(size, 0) / step) for size in sizes]
    left = room // step
    best = torch.zeros(left + 1, dtype=torch.float64)  # the most cost in so much room
    taken = torch.zeros(len(sizes), left + 1, dtype=torch.bool)
    for index, (cost, need) in enumerate(zip(costs, needs, strict=True)):
        if need <= left:
            with_it = best[: left + 1 - need] + cost
            taken[index, need:] = with_it > best[need:]
            best[need:] = torch.maximum(with_it, best[need:].clone())
    for index in reversed(range(len(sizes))):
        if taken[index, left]:
            chosen.add(index)
            left -= needs[index]
    return chosen


def _units(model: Model) -> list[_Unit]:
    tied = decoder_of(model).tie_word_embeddings
    found: dict[tuple[Any, ...], list[tuple[tuple[Any, ...], Any]]] = {}

    def collect(path: tuple[Any, ...], part: Any) -> Any:
        if isinstance(part, ExpertLinear):
            found.setdefault(path[:-1], []).append((path, part))
        elif isinstance(part, Linear | Embedding):
            found.setdefault(_TABLE if tied and path == _HEAD else path, []).append((path, part))
        return part

    map_marked(collect, model.params)
    return [_unit(key, parts) for key, parts in found.items()]


def _unit(key: tuple[Any, ...], parts: Sequence[tuple[tuple[Any, ...], Any]]) -> _Unit:
    in_layers = key[0] == pytree.GetAttrKey("layers")
    shapes: list[tuple[int, int]] = []
    for _, part in parts if in_layers else parts[:1]:  # a tied pair is one matrix
        matrices = part.matrices if isinstance(part, ExpertLinear) else (part.weight,)
        shapes += [weight_shape(matrix) for matrix in matrices]
    return _Unit(tuple(path for path, _ in parts), key[1].idx if in_layers else None, tuple(shapes))


def _costs(model: Model, ids: Tensor, units: Sequence[_Unit]) -> Iterator[float]:
    """The KL divergence of each unit in iq4_nl, in nats a token. Units come in the order of their layers."""
    params = model.params
    behind = Stream(model, ids, params)
    behind.advance_from(0, params.layers)
    exact = list(behind.logprobs(params))
    before, reached = Stream(model, ids, params), 0
    for unit in units:
        small = _in_4_bits(params, unit)
        if unit.layer is not None:
            before.advance_from(reached, params.layers[: unit.layer])
            reached = unit.layer
            stream = before.copy()
            stream.advance_from(reached, small.layers)
        elif unit.paths == (_HEAD,):
            stream = behind
        else:
            stream = Stream(model, ids, small)
            stream.advance_from(0, small.layers)
        pairs = zip(stream.logprobs(small), exact, strict=True)
        yield sum(float(kl_div(got, want, reduction="sum", log_target=True)) for got, want in pairs) / ids.numel()


def _in_4_bits(params: Any, unit: _Unit) -> Any:
    """The params with one unit in iq4_nl."""
    quantizer = ParamsQuantizer(params, _NARROW)

    def convert(path: tuple[Any, ...], part: Any) -> Any:
        return quantizer.quantized(part, path) if path in unit.paths else part

    return map_marked(convert, params)
