"""Watch what the linear layers of some params get while a forward runs: the Hessians X^T X of their inputs X [T, K]."""

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from torch.utils import _pytree as pytree

from onward import ops
from onward.errors import RequestError
from onward.models import ExpertLinear, Linear, Model, architecture_of, map_marked
from onward.models.blocks import Decoder, Positions
from onward.ops.experts import activated

Path = tuple[Any, ...]


class InputRecorder:
    """Sums the Hessians of inputs, by the paths of their layers; an expert's path ends in its number."""

    def __init__(self) -> None:
        self._hessians: dict[Path, Tensor] = {}
        self._inputs: list[tuple[Tensor, Tensor]] = []
        self._tokens: dict[Path, int] = {}  # that an expert got

    def hessians(self) -> dict[Path, Tensor]:
        """Those of experts that got fewer tokens than they have inputs are left out: such a Hessian has directions in
        which no error counts, and what is rounded for it fits these tokens alone."""
        few = {path for path, count in self._tokens.items() if count < len(self._hessians[path])}
        return {path: hessian for path, hessian in self._hessians.items() if path not in few}

    def watched(self, path: Path, part: Any) -> Any:
        """A layer in the place of `part`, which shows its inputs to this watch."""
        if isinstance(part, ExpertLinear):
            experts = _WatchedExperts(*part)
            experts.path, experts.watch = path, self
            return experts
        return _WatchedLinear(part, path, self) if isinstance(part, Linear) else part

    def see(self, path: Path, x: Tensor) -> None:
        """x [..., K] is the input of the layer at `path`."""
        for seen, hessian in self._inputs:
            if seen is x:
                self._hessians[path] = hessian
                return
        self._inputs.append((x, self._added(path, x)))

    def see_of_expert(self, path: Path, expert: int, x: Tensor) -> None:
        """x [T, K] is the input of one expert at `path`."""
        path = (*path, pytree.SequenceKey(expert))
        self.see(path, x)
        self._tokens[path] = self._tokens.get(path, 0) + len(x)

    def _added(self, path: Path, x: Tensor) -> Tensor:
        """The Hessian of `path`, after x [..., K]."""
        flat = x.reshape(-1, x.shape[-1]).to(torch.float32)
        if path not in self._hessians:
            self._hessians[path] = flat.new_zeros(x.shape[-1], x.shape[-1])
        return self._hessians[path].addmm_(flat.T, flat)

    def end_forward(self) -> None:
        self._inputs.clear()


class _WatchedLinear(NamedTuple):
    """A linear layer that shows its inputs to a watch."""

    part: Linear
    path: Path
    watch: InputRecorder

    def __call__(self, x: Tensor) -> Tensor:
        self.watch.see(self.path, x)
        return self.part(x)


class _WatchedExperts(ExpertLinear):
    """The last layers of experts, which show what each expert's layers get to a watch."""

    path: Path
    watch: InputRecorder

    def sum_of(
        self, x: Tensor, chosen: Tensor, shares: Tensor, gate: ExpertLinear | None, up: ExpertLinear, **activation: Any
    ) -> Tensor:
        tokens, ids = x.reshape(-1, x.shape[-1]), chosen.reshape(-1, chosen.shape[-1])
        for expert in sorted(set(ids.flatten().tolist())):
            rows = tokens[(ids == expert).any(-1)]
            of_gate = None if gate is None else _product(gate, expert, rows)
            hidden = activated(of_gate, _product(up, expert, rows), **activation)
            self.watch.see_of_expert(self.path, expert, hidden.to(x.dtype))
        return super().sum_of(x, chosen, shares, gate, up, **activation)


def _product(layers: ExpertLinear, expert: int, x: Tensor) -> Tensor:
    """float32 [T, N] of x [T, K] through one expert's layer, which sees it."""
    assert isinstance(layers, _WatchedExperts)
    layers.watch.see_of_expert(layers.path, expert, x)
    bias = None if layers.bias is None else layers.bias[expert]
    return ops.linear(x, layers.matrices[expert], bias).to(torch.float32)


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


class LayerwiseRunner:
    """The hidden states of all texts, int32 [count, length], before some layer, some rows at a time. params: whose
    embeddings look them up. batches: of the layer that is next."""

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

    def copy(self) -> "LayerwiseRunner":
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

        Of experts by the path and the expert's number, of those that got tokens enough (`InputRecorder.hessians`).
        """
        watch = InputRecorder()
        watched = map_marked(watch.watched, params)
        for batch in self.batches:
            self._run(index, watched, batch)
            watch.end_forward()
        return watch.hessians()

    def hessian_of_head(self, params: Any) -> dict[tuple[Any, ...], Tensor]:
        """The same of the head, behind the last layer."""
        watch = InputRecorder()
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
