"""CUDA graphs: the kernels of one step, recorded once and replayed in one call."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from onward.errors import one_line
from onward.program.graph import Forward
from onward.program.step import EagerExecutable, ForwardBatch, SamplingKernel, StepResult
from onward.program.trace import TraceError
from onward.util.process import renew_in_forks

_WARM_UP = 3
_MAX_TOKENS = 16  # per row; steps with more tokens run eagerly
_MAX_GRAPHS = 64  # the most recently used ones are kept
_capturing = threading.Lock()  # a capture begins with a synchronization, which would end another thread's


@dataclass(eq=False)
class _CapturedGraph:
    """A graph and the memory that it reads and writes."""

    replay: Callable[[], None]
    tokens: Tensor
    offsets: Tensor
    logits_at: Tensor | None
    logits: Tensor


class CudaGraphExecutable:
    """An `Executable` that captures a graph for every shape of tokens and every cache.

    A graph contains addresses, so it belongs to the cache tensors it was captured with, or to later ones of the same
    layout at the same addresses. Prompts (T above `_MAX_TOKENS`) run eagerly: kernels take longer than launches there,
    and a graph for every length would cost more than it saves.
    capture: records the kernels that a function launches; returns a function that replays them, and their output
        tensor. Tests without a GPU pass their own.
    """

    def __init__(
        self,
        forward: Forward,
        params: Any,
        capture: Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]] | None = None,
    ) -> None:
        self._eager = EagerExecutable(forward, params)
        self._capture = capture or GraphCapture()
        self._graphs: dict[Any, _CapturedGraph] = {}  # the last used is last
        self._lock = threading.Lock()
        renew_in_forks(self)

    def renew(self) -> None:
        self._lock = threading.Lock()

    @torch.no_grad()
    def step(self, batch: ForwardBatch, sampler: SamplingKernel | None = None) -> StepResult:
        tokens, offsets, cache, logits_at, taps = batch
        if taps or tokens.shape[1] > _MAX_TOKENS:
            return self._eager.step(batch)
        leaves = [leaf for leaf in pytree.tree_leaves(cache) if isinstance(leaf, Tensor)]
        logits_shape = None if logits_at is None else logits_at.shape
        layouts = tuple((leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves)
        key = (tokens.shape, logits_shape, layouts)
        with self._lock:
            graph = self._graphs.pop(key, None) or self._new_graph(batch)
            self._graphs[key] = graph
            if len(self._graphs) > _MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            graph.tokens.copy_(tokens)
            graph.offsets.copy_(offsets)
            if graph.logits_at is not None and logits_at is not None:
                graph.logits_at.copy_(logits_at)
            graph.replay()
            return StepResult(graph.logits.clone(), None, cache)

    def _new_graph(self, batch: ForwardBatch) -> _CapturedGraph:
        logits_at = None if batch.logits_at is None else batch.logits_at.clone()
        own = ForwardBatch(batch.tokens.clone(), batch.offsets.clone(), batch.cache, logits_at)

        def step() -> Tensor:
            logits, _, returned, _ = self._eager.step(own)
            before, after = pytree.tree_leaves(own.cache), pytree.tree_leaves(returned)
            if len(before) != len(after) or any(
                isinstance(old, Tensor) and old.data_ptr() != new.data_ptr()
                for old, new in zip(before, after, strict=True)
            ):
                raise TraceError("a forward in a CUDA graph must write its cache in place and return that cache")
            return logits

        # The warm-up runs only write cache positions that this call writes anyway.
        try:
            replay, logits = self._capture(step)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the forward synchronizes with the device, or reads a value
            # The end of a failed capture raises an error of its own, which says nothing.
            cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            raise TraceError(f"the forward cannot be captured as a CUDA graph: {one_line(cause)}") from error
        return _CapturedGraph(replay, own.tokens, own.offsets, own.logits_at, logits)


class GraphCapture:
    """Records the kernels that a function launches; returns a function that replays them, and their output tensor.

    Its graphs share the memory of their intermediate results: they run one after the other, and the output is copied
    before the next one runs.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        with _capturing:
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UP):  # libraries choose their algorithms and allocate their workspaces
                    step()
            torch.cuda.current_stream().wait_stream(self._stream)
            torch.cuda.empty_cache()  # the graph cannot use what the warm-up leaves
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads may allocate memory meanwhile.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    logits = step()
            except BaseException:
                self._pool = None  # a failed capture leaves it unusable
                raise
            return graph.replay, logits
