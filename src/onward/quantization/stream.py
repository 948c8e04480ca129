"""Run a decoder layer by layer over texts, and watch what its layers get.

Shapes: B texts at a time, T tokens of each, D hidden_size, K inputs of a layer.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from onward.errors import RequestError
from onward.models import Model, architecture_of, map_marked
from onward.models.blocks import Decoder, Positions
from onward.quantization.watch import Watch

# The most tokens of a forward.
MOST_TOKENS = 4096


def decoder_of(model: Model) -> Decoder:
    """The decoder that a model runs; a `RequestError` for a model of no built-in family."""
    decoder = architecture_of(model)
    if not isinstance(decoder, Decoder):
        raise RequestError("a calibration runs a model layer by layer, and this one is of no built-in family")
    return decoder


class Batch(NamedTuple):
    """Some of the texts: their hidden states float [B, T, D], where the tokens stand, what each layer is given beside
    them, and a cache to run them in."""

    hidden: Tensor
    positions: Positions
    given: Sequence[Tensor | None]
    cache: Any


class Stream:
    """The hidden states of all texts before some layer, some rows at a time.

    ids: int32 [count, length]. params: whose embeddings look them up. batches: of the layer that is next.
    """

    def __init__(self, model: Model, ids: Tensor, params: Any) -> None:
        count, length = ids.shape
        self._decoder = decoder = decoder_of(model)
        self._places = list(decoder.places())
        parts = torch.split(ids, min(count, max(1, MOST_TOKENS // length)))
        caches = {size: model.new_cache(size, length) for size in {len(part) for part in parts}}
        starts = [torch.zeros(len(part), dtype=torch.int32, device=ids.device) for part in parts]
        self.batches = [
            Batch(*decoder.embedded(part, start, params), caches[len(part)])
            for part, start in zip(parts, starts, strict=True)
        ]

    def copy(self) -> "Stream":
        """Another that goes on from here; both run in the same caches, of which a layer reads what it has written."""
        return copy(self)

    def advance(self, index: int, params: Any) -> None:
        """Run layer `index`. Quantized, it gives the next one what that will get."""
        self.batches = [self._run(index, params, batch) for batch in self.batches]

    def advance_from(self, index: int, layers: Sequence[Any]) -> None:
        """Run all layers from `index` on. layers: the params of all."""
        for number in range(index, len(layers)):
            self.advance(number, layers[number])

    def hessians(self, index: int, params: Any) -> dict[tuple[Any, ...], Tensor]:
        """The Hessian of the inputs of each `Linear` of the layer, by its path. Those of the same input share one.

        Of experts by the path and the expert's number, of those that got tokens enough (`Watch.hessians`).
        """
        watch = Watch()
        watched = map_marked(watch.watched, params)
        for batch in self.batches:
            self._run(index, watched, batch)
            watch.end_forward()
        return watch.hessians()

    def hessian_of_head(self, params: Any) -> dict[tuple[Any, ...], Tensor]:
        """The same of the head, behind the last layer."""
        watch = Watch()
        for batch in self.batches:
            watch.see((), self._decoder.norm(params.norm, batch.hidden))
            watch.end_forward()
        return watch.hessians()

    def logprobs(self, params: Any) -> Iterator[Tensor]:
        """float32 [T, V] of each text, behind the last layer."""
        for batch in self.batches:
            for text in batch.hidden:
                logits = self._decoder.logits(params, self._decoder.norm(params.norm, text))
                yield log_softmax(logits.to(torch.float32), -1)

    def _run(self, index: int, params: Any, batch: Batch) -> Batch:
        layer, place = self._decoder.layers[index], self._places[index]
        return batch._replace(
            hidden=layer(params, batch.hidden, batch.positions, batch.cache, place, batch.given[index])
        )
