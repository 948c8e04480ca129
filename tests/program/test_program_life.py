"""Long-lived programs don't grow, survive interrupts, serve several threads and don't keep dead objects alive."""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from foreign_models import gpt2, gpt2_params, new_cache, plain, plain_cache, plain_params
from tests.conftest import FULL
from torch import Tensor

import onward
from onward import native
from onward.models import Model
from onward.models.run import Run
from onward.program import ProgramCache
from onward.testing import tiny_model

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library was built")
ZERO = torch.zeros(1, dtype=torch.int32)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def small() -> Model:
    return tiny_model("qwen3", dtype=torch.float32, hidden_size=16, intermediate_size=32, num_hidden_layers=1)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
def test_every_family_decodes_the_tokens_of_its_eager_forward_in_float32(family: str) -> None:
    model = tiny_model(family, dtype=torch.float32)
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6]]
    texts = []
    for compile in ("native", "eager"):
        lm = onward.LanguageModel(model, compile=compile)
        completions = lm.generate(prompts, max_new_tokens=40, temperature=0)
        texts.append([completion.token_ids for completion in completions])
    assert texts[0] == texts[1]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_number_of_tokens() -> None:
    """Prompts of every length and batches that shrink, over and over."""
    most = 100_000 if FULL else 20_000
    model = small()
    programs = ProgramCache()
    lm = onward.LanguageModel(model)
    lm._model_run = Run(model, "native", programs)

    def some(tokens: int) -> None:
        done = 0
        while done < tokens:
            for length in range(1, 20):
                done += sum(
                    len(c.token_ids) for c in lm.generate([[1] * length, [2], [3]], max_new_tokens=40, seed=done)
                )

    def sizes() -> tuple[int, int, int, int]:
        gc.collect()
        return len(programs.by_shape), len(programs.families), len(programs.arena.memory), resident_bytes()

    some(most // 5)  # every shape has been traced now, and the allocator has its memory
    before = sizes()
    some(most)
    after = sizes()
    assert after[:3] == before[:3]
    assert after[0] <= 32
    # Logits stored per token would take more than 20 MB; a pointer for each of 100,000 tokens takes 800 kB.
    assert after[3] - before[3] < 800_000


def test_a_program_frees_unused_caches() -> None:
    for forward, params, make in ((gpt2, gpt2_params(), new_cache), (plain, plain_params(), plain_cache)):
        first = make(1, 16)
        program = onward.compile(forward, params=params, cache=first)
        dead = [weakref.ref(leaf) for leaf in torch.utils._pytree.tree_leaves(first)]
        program(ZERO.reshape(1, 1), ZERO, first)
        del first
        gc.collect()
        assert [reference() for reference in dead if reference() is not None] == []
        # A new cache at the same place in memory is another cache.
        for _ in range(20):
            cache = make(1, 16)
            logits, _ = program(ZERO.reshape(1, 1), ZERO, cache)
            assert torch.isfinite(logits).all()
            assert any(leaf.any() for leaf in torch.utils._pytree.tree_leaves(cache)), "it is this one that is written"
            del cache


# ── interrupts ────────────────────────────────────────────────────────────────────────────────────────────────


class Interrupted:
    """Calls a function, but raises at the n-th call."""

    def __init__(self, call: Callable[..., Any], at: int) -> None:
        self._call, self._left = call, at

    def __call__(self, *arguments: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return self._call(*arguments)


@pytest.mark.parametrize("where", ["on_token", "select", "forward"])
def test_an_interrupt_leaves_model_and_program_usable(where: str) -> None:
    params = gpt2_params()
    calls = {"on_token": lambda token: None, "select": onward.greedy}

    def run(**other: Any) -> list[int]:
        options = {"first_token": 1, "max_new_tokens": 20, **calls, **other}
        return onward.decode(gpt2, cache=new_cache(1, 32), params=params, **options)

    expected = run(compile="eager")
    if where == "forward":
        broken = Interrupted(gpt2, 1)  # in the middle of the trace
        with pytest.raises(KeyboardInterrupt):
            onward.decode(broken, cache=new_cache(1, 32), params=params, first_token=1, max_new_tokens=3)
        assert (
            onward.decode(broken, cache=new_cache(1, 32), params=params, first_token=1, max_new_tokens=20) == expected
        )
        return
    for at in (1, 2, 7):
        with pytest.raises(KeyboardInterrupt):
            run(**{where: Interrupted(calls[where], at)})
        assert run() == expected


@pytest.mark.parametrize("inside", ["bind", "run", "point"])
def test_an_interrupt_within_a_step(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in the call of a program it comes, the next call is right and the lock is free."""
    from onward.program.executable import Addresses, ShapeProgram

    params = gpt2_params()
    program = onward.compile(gpt2, params=params, cache=new_cache(1, 16))
    token = torch.ones((1, 1), dtype=torch.int32)
    cache = new_cache(1, 16)
    expected, _ = program(token, ZERO, new_cache(1, 16))
    owner, name = (ShapeProgram, "_run") if inside == "run" else (Addresses, inside)
    original = getattr(owner, name)
    with monkeypatch.context() as patched:

        def late(self: Any, *arguments: Any) -> Any:
            original(self, *arguments)
            raise KeyboardInterrupt

        patched.setattr(owner, name, late)
        with pytest.raises(KeyboardInterrupt):
            program(token, ZERO, cache)
    logits, _ = program(token, ZERO, cache)
    assert torch.equal(logits, expected)
    assert cache.keys[0].any(), "it is this cache that is written"


def test_interrupted_and_abandoned_streams_leave_the_language_model_usable() -> None:
    lm = onward.LanguageModel(small(), compile="native")
    prompt, options = [1, 2, 3], {"max_new_tokens": 20, "temperature": 0}
    expected = lm.generate(prompt, **options)
    interrupted = lm.stream(prompt, **options)
    next(interrupted)
    with pytest.raises(KeyboardInterrupt):
        interrupted.throw(KeyboardInterrupt)
    left = lm.stream(prompt, **options)
    next(left), next(left)
    other = lm.stream([7], **options)  # while another one is under way
    assert next(other).token_id == lm.generate([7], **options).token_ids[0]
    assert lm.generate(prompt, **options).token_ids == expected.token_ids
    assert [piece.token_id for piece in left] == expected.token_ids[2:]


# ── threads ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_several_threads_share_a_program() -> None:
    params = gpt2_params()
    program = onward.compile(gpt2, params=params, cache=new_cache(1, 32))
    begin = threading.Barrier(4)

    def text(first: int) -> list[int]:
        cache, token, ids = new_cache(1, 32), first, []
        begin.wait()
        for position in range(30):
            arguments = torch.tensor([[token]], dtype=torch.int32), torch.tensor([position], dtype=torch.int32)
            logits, cache = program(*arguments, cache)
            token = int(logits[0, 0].argmax())
            ids.append(token)
        return ids

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(text, (1, 2, 3, 4)))
    begin = threading.Barrier(1)
    assert together == [text(first) for first in (1, 2, 3, 4)]


def test_several_threads_stream_one_forward() -> None:
    params = gpt2_params()

    def text(first: int) -> list[int]:
        return onward.decode(gpt2, cache=new_cache(1, 32), params=params, first_token=first, max_new_tokens=30)

    expected = [text(first) for first in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(text, range(8))) == expected


# ── the imports ───────────────────────────────────────────────────────────────────────────────────────────────

COMPILES = """
import sys, torch, onward
from onward.testing import tiny_model
model = tiny_model("qwen3", dtype=torch.bfloat16)
lm = onward.LanguageModel(model)
lm.generate([[1, 2, 3], [4, 5, 6, 7], [8]], max_new_tokens=4, seed=0)
lm.generate([1, 2, 3, 4, 5], max_new_tokens=4, seed=0)
assert lm._model_run._program.backend == "native"
assert "(torch)" not in str(lm.explain())
compilers = "sympy", "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes"
print(*(name for name in compilers if name in sys.modules))
"""


def test_compiling_imports_no_compiler() -> None:
    """sympy and torch._dynamo would take a second of every start."""
    found = subprocess.run([sys.executable, "-c", COMPILES], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_a_script_whose_model_lives_to_the_end_exits_silently() -> None:
    script = """
import torch, onward
def forward(tokens, offsets, cache, params):
    return params["table"][tokens], cache
def model():
    return onward.Model(forward, {"table": torch.randn(9, 9)}, lambda batch, max_len: (), vocab_size=9)
params = {"table": torch.randn(9, 9)}
onward.decode(forward, cache=(), params=params, first_token=1, max_new_tokens=4)
lm = onward.LanguageModel(model())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_logits_have_their_own_memory() -> None:
    program = onward.compile(gpt2, params=gpt2_params(), cache=new_cache(1, 16))
    token = torch.ones((1, 1), dtype=torch.int32)
    first, _ = program(token, ZERO, new_cache(1, 16))
    copy = first.clone()
    second, _ = program(token + 1, ZERO, new_cache(1, 16))
    assert torch.equal(first, copy)
    assert not torch.equal(first, second)


def test_a_new_cache_from_the_forward_is_written_back() -> None:
    def forward(tokens: Tensor, offsets: Tensor, cache: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        return params[tokens.long()], cache + 1

    cache = torch.zeros(1, 3)
    program = onward.compile(forward, params=torch.eye(4), cache=cache)
    for count in (1, 2, 3):
        _, returned = program(ZERO.reshape(1, 1), ZERO, cache)
        assert returned is cache
        assert cache.tolist() == [[count] * 3]
