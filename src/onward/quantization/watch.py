"""Watch what the linear layers of some params get while a forward runs: the Hessians X^T X of their inputs X [T, K]."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward import ops
from onward.models import ExpertLinear, Linear
from onward.ops.experts import activated

Path = tuple[Any, ...]


class Watch:
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
    watch: Watch

    def __call__(self, x: Tensor) -> Tensor:
        self.watch.see(self.path, x)
        return self.part(x)


class _WatchedExperts(ExpertLinear):
    """The last layers of experts, which show what each expert's layers get to a watch."""

    path: Path
    watch: Watch

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
