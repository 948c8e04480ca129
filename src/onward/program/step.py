"""What runs a step of a forward (`Executable`): its batch and its result; and the eager one."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from onward.ops.tap import check_taps, reading
from onward.program.graph import Forward


class SamplingKernel(Protocol):
    """A kernel that samples an id from each row of logits; a program may call it at its end.

    kernel: its name. Its arguments are rows, columns, logits, their dtype and stride, the tensors that `operands`
        returns for the offsets [B] of the tokens before the sampled ones, and the output ids int64 [B].
    most_ids: the maximum length of a row.
    """

    kernel: str
    most_ids: int

    def operands(self, offsets: Tensor) -> tuple[Tensor, ...]: ...


class ForwardBatch(NamedTuple):
    """The arguments of a forward. tokens: int32 [B, T]. offsets: int32 [B]. logits_at: int64 [R, N]; None for all.
    taps: the names of the taps to read (`onward.tap`)."""

    tokens: Tensor
    offsets: Tensor
    cache: Any
    logits_at: Tensor | None = None
    taps: tuple[str, ...] = ()


class StepResult(NamedTuple):
    """The result of a step.

    logits: float [B, T, V], or [R, N, V] at `logits_at`. ids: int64 [B], sampled from the logits in the same call; None
    if the caller has to sample, or the logit of one is not finite. cache: the cache with the step's tokens.
    taps: the values [B, T, ...] at the taps that were asked for.
    """

    logits: Tensor
    ids: Tensor | None
    cache: Any
    taps: Mapping[str, Tensor] = MappingProxyType({})


class Executable(Protocol):
    """Processes batches with a forward and its params, in one of the ways to run it."""

    def step(self, batch: ForwardBatch, sampler: SamplingKernel | None = None) -> StepResult:
        """Process a batch, without gradients.

        sampler: samples the ids at the positions `offsets + 1`, for T = 1 without `logits_at`. Only for sequences that
        a step without one has started: memory newly assigned to the `data` of a param takes effect in the next step
        without a sampler at the latest.
        """


class EagerExecutable:
    """Calls the forward. plain: the same forward, for batches with taps, if torch has compiled `forward`."""

    def __init__(self, forward: Forward, params: Any, plain: Forward | None = None) -> None:
        self._forward, self._params = forward, params
        self._plain = forward if plain is None else plain

    @torch.no_grad()
    def step(self, batch: ForwardBatch, sampler: SamplingKernel | None = None) -> StepResult:
        options = {} if batch.logits_at is None else {"logits_at": batch.logits_at}
        if batch.taps:
            return read_eagerly(partial(self._plain, *batch[:3], self._params, **options), batch)
        logits, cache = self._forward(*batch[:3], self._params, **options)
        return StepResult(logits, None, cache)


def read_eagerly(forward: Callable[[], tuple[Tensor, Any]], batch: ForwardBatch) -> StepResult:
    """Call a forward on its batch, and read its taps. Raises `RequestError` for an unknown tap."""
    with reading(batch.taps) as values:
        logits, cache = forward()
    check_taps(values, batch.taps, batch.tokens.shape)
    return StepResult(logits, None, cache, values)
