"""CUDA graphs (captured by a double, or for real with a GPU), inductor and eager: the same program."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import onward
from onward import native
from onward.cache import KVCache
from onward.errors import ProgramError, RequestError
from onward.models import Model, Run
from onward.program import CudaGraphExecutable, ForwardBatch, Program, cuda_graph
from onward.program.cuda_graph import GraphCapture
from onward.testing import random_checkpoint, tiny_model

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def model() -> Model:
    return tiny_model("qwen3", dtype=torch.float32)


class Capture:
    """A double of `GraphCapture` without a GPU: a replay runs the same step on the same memory."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        logits = step()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            logits.copy_(step())

        logits.fill_(float("nan"))  # a graph that is only captured has computed nothing
        return replay, logits


def graphs(model: Model) -> tuple[CudaGraphExecutable, Capture]:
    capture = Capture()
    return CudaGraphExecutable(model.forward, model.params, capture=capture), capture


def tokens(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def at(*offsets: int) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


def test_a_text_replays_one_graph(model: Model) -> None:
    executable, capture = graphs(model)
    cache, other = model.new_cache(2, 32), model.new_cache(2, 32)
    ids = tokens([3], [5])
    for position in range(12):
        ours, _, returned, _ = executable.step(ForwardBatch(ids, at(position, position), cache))
        theirs, _ = model(ids, at(position, position), other)
        assert returned is cache
        assert torch.equal(ours, theirs)
        ids = ours.argmax(-1).to(torch.int32)
    assert (capture.captured, capture.replayed) == (1, 12)


def test_each_shape_and_each_cache_has_its_graph(model: Model) -> None:
    executable, capture = graphs(model)
    caches = [model.new_cache(1, 32), model.new_cache(1, 32)]
    for cache, expected in zip((caches[0], caches[0], caches[1], caches[0]), (1, 1, 2, 2), strict=True):
        executable.step(ForwardBatch(tokens([1]), at(0), cache))
        assert capture.captured == expected
    executable.step(ForwardBatch(tokens([1, 2, 3]), at(0), caches[0]))
    executable.step(ForwardBatch(tokens([1, 2, 3]), at(0), caches[0], torch.tensor([[2]])))
    assert capture.captured == 4
    executable.step(ForwardBatch(tokens([1]), at(3), caches[0]))
    assert capture.captured == 4


def test_the_least_recently_used_graphs_are_dropped(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "_MAX_GRAPHS", 2)
    executable, capture = graphs(model)
    cache = model.new_cache(1, 32)
    for count, expected in ((1, 1), (2, 2), (1, 2), (3, 3), (1, 3), (2, 4)):
        executable.step(ForwardBatch(tokens(list(range(count))), at(0), cache))
        assert capture.captured == expected, f"{count} tokens"
    assert len(executable._graphs) == 2


def test_graphs_of_other_addresses_survive_a_miss(model: Model) -> None:
    """Also after a failed capture: later calls replay without capturing again."""
    executable, capture = graphs(model)
    first, second, third = (model.new_cache(1, 32) for _ in range(3))
    expected = executable.step(ForwardBatch(tokens([1]), at(0), first)).logits
    executable.step(ForwardBatch(tokens([1]), at(0), second))
    assert (capture.captured, capture.replayed) == (2, 2)

    def refuse(step: Callable[[], Tensor]) -> Any:
        raise RuntimeError("not permitted")

    executable._capture = refuse
    with pytest.raises(ProgramError, match="cannot be captured"):
        executable.step(ForwardBatch(tokens([1]), at(0), third))
    executable._capture = capture
    assert torch.equal(executable.step(ForwardBatch(tokens([1]), at(0), first)).logits, expected)
    assert torch.equal(executable.step(ForwardBatch(tokens([1]), at(0), second)).logits, expected)
    assert (capture.captured, capture.replayed) == (2, 4)
    executable.step(ForwardBatch(tokens([1]), at(0), third))
    executable.step(ForwardBatch(tokens([1]), at(0), first))
    assert (capture.captured, capture.replayed) == (3, 6)


def test_a_cache_of_another_layout_at_the_same_address_has_its_graph(model: Model) -> None:
    executable, capture = graphs(model)
    cache = model.new_cache(1, 32)
    views = pytree.tree_map(lambda leaf: leaf.as_strided(leaf.shape, (*leaf.stride()[:2], 1, leaf.shape[2])), cache)
    executable.step(ForwardBatch(tokens([1]), at(0), cache))
    executable.step(ForwardBatch(tokens([1]), at(0), views))
    assert capture.captured == 2


def test_the_cause_of_a_failed_capture_is_reported(model: Model) -> None:
    def refuse(step: Callable[[], Tensor]) -> Any:
        try:
            raise RuntimeError("aten::_unique2 reads a value")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    executable = CudaGraphExecutable(model.forward, model.params, capture=refuse)
    with pytest.raises(ProgramError, match="cannot be captured as a CUDA graph: aten::_unique2 reads a value"):
        executable.step(ForwardBatch(tokens([1]), at(0), model.new_cache(1, 8)))


def test_requested_logits_positions_are_read_at_every_replay(model: Model) -> None:
    executable, capture = graphs(model)
    cache, other = model.new_cache(1, 32), model.new_cache(1, 32)
    for place in (0, 2, 1):
        positions = torch.tensor([[place]])
        ours = executable.step(ForwardBatch(tokens([4, 5, 6]), at(0), cache, positions)).logits
        theirs, _ = model(tokens([4, 5, 6]), at(0), other, positions)
        assert torch.equal(ours, theirs)
    assert capture.captured == 1


def test_a_prompt_runs_without_a_graph(model: Model) -> None:
    executable, capture = graphs(model)
    prompt = tokens(list(range(1, 18)))
    ours = executable.step(ForwardBatch(prompt, at(0), model.new_cache(1, 32))).logits
    theirs, _ = model(prompt, at(0), model.new_cache(1, 32))
    assert torch.equal(ours, theirs)
    assert capture.captured == 0


def test_results_have_their_own_memory(model: Model) -> None:
    executable, _ = graphs(model)
    cache = model.new_cache(1, 32)
    first = executable.step(ForwardBatch(tokens([1]), at(0), cache)).logits
    copy = first.clone()
    executable.step(ForwardBatch(tokens([2]), at(1), cache))
    assert torch.equal(first, copy)


def test_a_forward_that_makes_a_new_cache_is_refused(model: Model) -> None:
    def forward(tokens: Tensor, offsets: Tensor, cache: KVCache, params: Any) -> tuple[Tensor, KVCache]:
        logits, cache = model.forward(tokens, offsets, cache, params)
        return logits, pytree.tree_map(torch.clone, cache)

    with pytest.raises(ProgramError, match="must write its cache in place and return that cache"):
        CudaGraphExecutable(forward, model.params, capture=Capture()).step(
            ForwardBatch(tokens([1]), at(0), model.new_cache(1, 8))
        )


def test_uncapturable_forwards_run_eagerly_if_allowed(model: Model) -> None:
    def refuse(step: Callable[[], Tensor]) -> Any:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    run = Run(model, "auto")
    run._program = Program("cuda", CudaGraphExecutable(model.forward, model.params, capture=refuse))
    ours = run.step(ForwardBatch(tokens([1]), at(0), model.new_cache(1, 8))).logits
    assert torch.equal(ours, model(tokens([1]), at(0), model.new_cache(1, 8))[0])
    assert run.why_eager == (
        "the forward cannot be captured as a CUDA graph: operation not permitted when stream is capturing"
    )
    run = Run(model, "cuda")
    run._program = Program("cuda", CudaGraphExecutable(model.forward, model.params, capture=refuse))
    with pytest.raises(ProgramError, match="cannot be captured as a CUDA graph"):
        run.step(ForwardBatch(tokens([1]), at(0), model.new_cache(1, 8)))


def test_an_interrupt_during_capture_leaves_the_executable_usable(model: Model) -> None:
    executable, capture = graphs(model)

    def interrupted(step: Callable[[], Tensor]) -> Any:
        raise KeyboardInterrupt

    executable._capture = interrupted
    with pytest.raises(KeyboardInterrupt):
        executable.step(ForwardBatch(tokens([1]), at(0), model.new_cache(1, 8)))
    executable._capture = capture
    ours = executable.step(ForwardBatch(tokens([1]), at(0), model.new_cache(1, 8))).logits
    assert torch.equal(ours, model(tokens([1]), at(0), model.new_cache(1, 8))[0])


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_give_the_bits_of_eager_calls_on_a_gpu(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "qwen3", dtype=dtype)
    lm = {compile: onward.load(folder, device="cuda", compile=compile) for compile in ("cuda", "eager")}
    model = lm["cuda"].model
    program = onward.compile(model.forward, params=model.params, cache=model.new_cache(1, 8))
    assert program.backend == "cuda"
    for rows in (1, 3):
        cache, other = model.new_cache(rows, 64), model.new_cache(rows, 64)
        ids = torch.arange(rows * 5, dtype=torch.int32, device="cuda").reshape(rows, 5)
        offsets = torch.zeros(rows, dtype=torch.int32, device="cuda")
        for _ in range(20):
            ours, _ = program(ids, offsets, cache)
            with torch.no_grad():
                theirs, _ = model(ids, offsets, other)
            assert torch.equal(ours, theirs)
            offsets += ids.shape[1]
            ids = ours[:, -1:].argmax(-1).to(torch.int32)
    texts = [each.generate([[1, 2, 3], [4, 5]], max_new_tokens=30, seed=1) for each in lm.values()]
    assert [c.token_ids for c in texts[0]] == [c.token_ids for c in texts[1]]


@pytest.mark.gpu
@GPU
def test_threads_may_capture_and_allocate_concurrently_on_a_gpu(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "qwen3")
    lms, done = [onward.load(folder, device="cuda") for _ in range(2)], threading.Event()

    def allocate() -> None:
        while not done.is_set():
            torch.empty(2**24, device="cuda").sum().item()
            torch.cuda.empty_cache()

    def generate(lm: onward.LanguageModel) -> list[list[int]]:
        texts = []
        for _ in range(8):
            lm.prefix_memory = 2**24  # another cache, and so other graphs
            texts.append(lm.generate([1, 2, 3], max_new_tokens=8, seed=1, ignore_eos=True).token_ids)
        return texts

    with ThreadPoolExecutor() as threads:
        allocating = threads.submit(allocate)
        try:
            texts = [text for of_one in threads.map(generate, lms) for text in of_one]
        finally:
            done.set()
        allocating.result()
    assert len(set(map(tuple, texts))) == 1


@pytest.mark.gpu
@GPU
def test_a_failed_capture_leaves_the_others_alone_on_a_gpu() -> None:
    capture, x = GraphCapture(), torch.arange(4.0, device="cuda")
    with pytest.raises(RuntimeError):
        capture(lambda: x * x.sum().item())
    replay, doubled = capture(lambda: x + x)
    replay()
    assert doubled.tolist() == [0, 2, 4, 6]


@pytest.mark.gpu
@GPU
def test_a_cache_larger_than_gpu_memory_is_refused(tmp_path: Path) -> None:
    lm = onward.load(random_checkpoint(tmp_path, "qwen3"), device="cuda")
    rows = 2 * torch.cuda.mem_get_info()[1] // lm.new_cache(1, 256).nbytes
    with pytest.raises(
        RequestError, match=r"cannot allocate .* for a cache \(CUDA out of memory\): ask for fewer rows"
    ):
        lm.new_cache(rows, 256)


# ── eager and inductor ────────────────────────────────────────────────────────────────────────────────────────


def test_backend_eager_calls_the_forward(model: Model) -> None:
    program = onward.compile(model.forward, params=model.params, cache=model.new_cache(1, 8), backend="eager")
    ours, _ = program(tokens([1, 2]), at(0), model.new_cache(1, 8), torch.tensor([[1]]))
    with torch.no_grad():
        theirs, _ = model(tokens([1, 2]), at(0), model.new_cache(1, 8), torch.tensor([[1]]))
    assert torch.equal(ours, theirs)
    assert not ours.requires_grad
    assert str(program.explain(model.new_cache(1, 8))) == "backend eager"


INDUCTOR = """
import torch, onward

def forward(tokens, offsets, cache, params):
    x = torch.nn.functional.embedding(tokens, params)
    cache += 1
    return torch.special.i0(x) @ params.T, cache

params, cache = torch.randn(11, 8), torch.zeros(1, 2)
program = onward.compile(forward, params=params, cache=cache, fallback="inductor")
assert program.backend == "inductor" and "aten.i0" in program.explain(cache).note
for token in (1, 4):
    ids, zero = torch.tensor([[token]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    logits, returned = program(ids, zero, cache)
    expected, _ = forward(ids, zero, torch.zeros(1, 2), params)
    assert torch.allclose(logits, expected, rtol=1e-5), (logits, expected)
assert returned is cache and cache.tolist() == [[2, 2]]
print("ran")
"""


@pytest.mark.skipif("ONWARD_TEST_INDUCTOR" not in os.environ, reason="takes 10 s: set ONWARD_TEST_INDUCTOR=1")
@pytest.mark.skipif(native.library() is None, reason="no native library was built")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_inductor_runs_operators_without_a_kernel() -> None:
    """In a process of its own: torch.compile leaves modules, threads and warnings behind."""
    command = [sys.executable, "-W", "ignore", "-c", INDUCTOR]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.stdout == "ran\n", ran.stderr[-2000:]
