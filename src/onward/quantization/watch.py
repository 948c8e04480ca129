"""Record the Hessians X^T X of the inputs X [T, K] of linear layers during a forward pass."""

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
    """Sums Hessians of inputs by the path of the layer; an expert's path ends in its number."""

    def __init__(self) -> None:
        self._hessians: dict[Path, Tensor] = {}
        self._inputs: list[tuple[Tensor, Tensor]] = []
        self._tokens: dict[Path, int] = {}  # of experts

    def hessians(self) -> dict[Path, Tensor]:
        """The Hessians, without those of experts with fewer tokens than inputs: errors in some directions of such a
        Hessian don't count, and rounding would fit these tokens alone."""
        few = {path for path, count in self._tokens.items() if count < len(self._hessians[path])}
        return {path: hessian for path, hessian in self._hessians.items() if path not in few}

    def recorded(self, path: Path, part: Any) -> Any:
        """A replacement for the layer `part` that records its inputs here."""
        if isinstance(part, ExpertLinear):
            experts = _RecordedExperts(*part)
            experts.path, experts.recorder = path, self
            return experts
        return _RecordedLinear(part, path, self) if isinstance(part, Linear) else part

    def see(self, path: Path, x: Tensor) -> None:
        """Record x [..., K], the input of the layer at `path`; layers with the same input share a Hessian."""
        for seen, hessian in self._inputs:
            if seen is x:
                self._hessians[path] = hessian
                return
        flat = x.reshape(-1, x.shape[-1]).to(torch.float32)
        if path not in self._hessians:
            self._hessians[path] = flat.new_zeros(x.shape[-1], x.shape[-1])
        self._inputs.append((x, self._hessians[path].addmm_(flat.T, flat)))

    def see_of_expert(self, path: Path, expert: int, x: Tensor) -> None:
        """Record x [T, K], the input of one expert at `path`."""
        path = (*path, pytree.SequenceKey(expert))
        self.see(path, x)
        self._tokens[path] = self._tokens.get(path, 0) + len(x)

    def end_forward(self) -> None:
        self._inputs.clear()


class _RecordedLinear(NamedTuple):
    """A linear layer that records its inputs."""

    part: Linear
    path: Path
    recorder: InputRecorder

    def __call__(self, x: Tensor) -> Tensor:
        self.recorder.see(self.path, x)
        return self.part(x)


class _RecordedExperts(ExpertLinear):
    """The last layers of experts, which record the inputs of each expert's layers."""

    path: Path
    recorder: InputRecorder

    def sum_of(
        self, x: Tensor, chosen: Tensor, shares: Tensor, gate: ExpertLinear | None, up: ExpertLinear, **activation: Any
    ) -> Tensor:
        tokens, ids = x.reshape(-1, x.shape[-1]), chosen.reshape(-1, chosen.shape[-1])
        for expert in sorted(set(ids.flatten().tolist())):
            rows = tokens[(ids == expert).any(-1)]
            gated = None if gate is None else _product(gate, expert, rows)
            hidden = activated(gated, _product(up, expert, rows), **activation)
            self.recorder.see_of_expert(self.path, expert, hidden.to(x.dtype))
        return super().sum_of(x, chosen, shares, gate, up, **activation)


def _product(layers: ExpertLinear, expert: int, x: Tensor) -> Tensor:
    """x [T, K] through one expert's layer, float32 [T, N], recorded."""
    assert isinstance(layers, _RecordedExperts)
    layers.recorder.see_of_expert(layers.path, expert, x)
    bias = None if layers.bias is None else layers.bias[expert]
    return ops.linear(x, layers.matrices[expert], bias).to(torch.float32)


# Of a forward pass.
MAX_TOKENS = 4096


def decoder_of(model: Model) -> Decoder:
    """A model's decoder; a `RequestError` for a model that is not of a built-in family."""
    decoder = architecture_of(model)
    if not isinstance(decoder, Decoder):
        raise RequestError("a calibration runs a model layer by layer, and this one is not of a built-in family")
    return decoder


class Batch(NamedTuple):
    """Some of the texts: hidden states float [B, T, D], positions, further inputs of each layer, and a cache."""

    hidden: Tensor
    positions: Positions
    layer_inputs: Sequence[Tensor | None]
    cache: Any


class LayerwiseRunner:
    """Runs all texts, int32 [count, length], layer by layer in batches of rows. params: of the embeddings. batches: the
    inputs of the next layer."""

    def __init__(self, model: Model, ids: Tensor, params: Any) -> None:
        count, length = ids.shape
        self._decoder = decoder = decoder_of(model)
        self._places = list(decoder.places())
        parts = torch.split(ids, min(count, max(1, MAX_TOKENS // length)))
        caches = {size: model.new_cache(size, length) for size in {len(part) for part in parts}}
        starts = [torch.zeros(len(part), dtype=torch.int32, device=ids.device) for part in parts]
        self.batches = [
            Batch(*decoder.embedded(part, start, params), caches[len(part)])
            for part, start in zip(parts, starts, strict=True)
        ]

    def copy(self) -> "LayerwiseRunner":
        """An independent runner in the same state and caches: a layer reads only what it has written."""
        return copy(self)

    def advance(self, index: int, params: Any) -> None:
        """Run layer `index`, with its quantized params if later layers are to see its errors."""
        self.batches = [self._run(index, params, batch) for batch in self.batches]

    def advance_from(self, index: int, layers: Sequence[Any]) -> None:
        """Run all layers from `index` on. layers: the params of all."""
        for number in range(index, len(layers)):
            self.advance(number, layers[number])

    def hessians(self, index: int, params: Any) -> dict[tuple[Any, ...], Tensor]:
        """The Hessian of the inputs of each `Linear` of the layer, as `InputRecorder.hessians` returns them."""
        recorder = InputRecorder()
        recorded = map_marked(recorder.recorded, params)
        for batch in self.batches:
            self._run(index, recorded, batch)
            recorder.end_forward()
        return recorder.hessians()

    def hessian_of_head(self, params: Any) -> dict[tuple[Any, ...], Tensor]:
        """The same for the head, after the last layer."""
        recorder = InputRecorder()
        for batch in self.batches:
            recorder.see((), self._decoder.norm(params.norm, batch.hidden))
            recorder.end_forward()
        return recorder.hessians()

    def logprobs(self, params: Any) -> Iterator[Tensor]:
        """float32 [T, V] of each text, after the last layer."""
        for batch in self.batches:
            for text in batch.hidden:
                logits = self._decoder.logits(params, self._decoder.norm(params.norm, text))
                yield log_softmax(logits.to(torch.float32), -1)

    def _run(self, index: int, params: Any, batch: Batch) -> Batch:
        layer, place = self._decoder.layers[index], self._places[index]
        return batch._replace(
            hidden=layer(params, batch.hidden, batch.positions, batch.cache, place, batch.layer_inputs[index])
        )
