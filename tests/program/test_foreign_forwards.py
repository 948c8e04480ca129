"""Forwards in plain torch decode natively: the tokens of eager calls, and no operator left to torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from foreign_models import VOCAB, gpt2, gpt2_params, new_cache, plain, plain_cache, plain_params
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import onward
from onward import native, ops
from onward.errors import ProgramError
from onward.models import Model, Run
from onward.program import ForwardBatch
from onward.program.graph import KernelCall

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library was built")
MAX_LEN = 48

FOREIGN: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "gpt2": (gpt2, gpt2_params, new_cache),
    "plain torch": (plain, plain_params, plain_cache),
}


@pytest.fixture(params=FOREIGN)
def foreign(request: pytest.FixtureRequest) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    return FOREIGN[request.param]


def ids(batch: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (batch, tokens), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


def greedy(run: Callable[..., Any], cache: Any, prompt: Tensor, count: int) -> tuple[list[list[int]], list[Tensor]]:
    """Prefill, then `count` tokens a row: the ids, and the logits that each was picked from."""
    offsets = torch.zeros(len(prompt), dtype=torch.int32)
    picked, seen = [], []
    for _ in range(count):
        logits, cache = run(prompt, offsets, cache)
        seen.append(logits[:, -1])
        offsets = offsets + prompt.shape[1]
        prompt = logits[:, -1:].argmax(-1).to(torch.int32)
        picked.append(prompt[:, 0].tolist())
    return picked, seen


def test_every_operator_has_a_kernel(foreign: Any) -> None:
    forward, params, cache = foreign
    program = onward.compile(forward, params=params(), cache=cache(1, MAX_LEN), fallback="raise")
    assert program.backend == "native"
    for batch, tokens in ((1, 1), (1, 9), (3, 1), (3, 4)):
        report = program.explain(cache(batch, MAX_LEN), batch, tokens)
        assert not report.missing
        assert all(row.kernel != "(torch)" for row in report.rows)


@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_equal_those_of_eager_calls_in_float32(foreign: Any, batch: int) -> None:
    forward, params, cache = foreign
    weights = params()
    program = onward.compile(forward, params=weights, cache=cache(1, MAX_LEN))
    ours, _ = greedy(program, cache(batch, MAX_LEN), ids(batch, 7), 40)
    theirs, _ = greedy(lambda *arguments: forward(*arguments, weights), cache(batch, MAX_LEN), ids(batch, 7), 40)
    assert ours == theirs
    assert len(set(map(tuple, ours))) > 3, "a text of one token would show nothing"


class Rounding(TorchDispatchMode):
    """Every floating-point result is off by up to `relative`, as roundings make it."""

    def __init__(self, relative: float, seed: int) -> None:
        super().__init__()
        self._relative = relative
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not isinstance(made, Tensor) or not made.is_floating_point() or func.is_view or func._schema.is_mutable:
            return made
        off = torch.rand(made.shape, generator=self._generator, dtype=made.dtype) * 2 - 1
        return made * (1 + self._relative * off)


def rounding_error(forward: Callable[..., Any], params: Any, cache: Any, tokens: Tensor) -> Tensor:
    """Standard deviation of each logit between two computations in bfloat16.

    Each rounds every result to within 2^-9 of itself, so the two are up to 2^-8 apart there. What that does to the
    logits is measured: in float32 with each result off by a random amount of up to 2^-8. The ops run by their
    definitions, so that each step within them is off too: more than happens.
    """
    wide = pytree.tree_map(lambda t: t.float(), params)
    before = ops.choice()
    ops.choose("definition")
    samples = []
    try:
        for seed in range(32):
            empty = pytree.tree_map(lambda t: t.float(), cache)
            with Rounding(2**-8, seed), torch.no_grad():
                samples.append(forward(tokens, torch.zeros(len(tokens), dtype=torch.int32), empty, wide)[0])
    finally:
        ops.choose(before.isa)
    return torch.stack(samples).std(0).double()


def test_bfloat16_differs_only_by_rounding(foreign: Any) -> None:
    forward, params, cache = foreign
    weights, tokens = params(dtype=torch.bfloat16), ids(2, 12)
    zeros = torch.zeros(2, dtype=torch.int32)
    program = onward.compile(forward, params=weights, cache=cache(1, MAX_LEN, torch.bfloat16))
    ours, _ = program(tokens, zeros, cache(2, MAX_LEN, torch.bfloat16))
    with torch.no_grad():
        theirs, _ = forward(tokens, zeros, cache(2, MAX_LEN, torch.bfloat16), weights)
    deviation = rounding_error(forward, weights, cache(2, MAX_LEN, torch.bfloat16), tokens)
    # Sums of hundreds of roundings are close to normal: six deviations are exceeded once in 10^9 logits.
    tolerance = 6 * deviation
    assert ((ours.double() - theirs.double()).abs() <= tolerance).all()
    top = theirs.double().topk(2)
    clear = top.values[..., 0] - top.values[..., 1] > 2 * tolerance.amax(-1)
    assert clear.any()
    assert torch.equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])


# ── operators without a kernel ────────────────────────────────────────────────────────────────────────────────────────


def with_a_gap(tokens: Tensor, offsets: Tensor, cache: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.nn.functional.embedding(tokens, params)
    x = torch.special.i0(x)  # the line without a kernel
    cache[:, 0] += 1
    return x @ params.T, cache


def gap_line() -> int:
    import inspect

    lines, first = inspect.getsourcelines(with_a_gap)
    return first + next(i for i, line in enumerate(lines) if "i0" in line)


def gap_params() -> Tensor:
    return torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(3))


def test_fallback_eager_runs_one_operator_in_torch_and_reports_it() -> None:
    params = gap_params()
    program = onward.compile(with_a_gap, params=params, cache=torch.zeros(1, 2), fallback="eager")
    cache, zero = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int32)
    for tokens in (1, 5, 6, 7):
        ours, _ = program(ids(1, tokens), zero, cache)
        theirs, _ = with_a_gap(ids(1, tokens), zero, torch.zeros(1, 2), params)
        # Dot products of 8: the kernel may add in another order, 8 roundings of sums that |x| |y| bounds.
        bound = torch.special.i0(params[ids(1, tokens).long()]).abs() @ params.abs().T * 8 * 2**-23
        assert ((ours - theirs).abs() <= bound).all()
    assert cache.tolist() == [[4, 0]]
    (missing,) = program.explain(cache).missing
    assert missing.op == "aten.i0"
    assert missing.where == f"program/test_foreign_forwards.py:{gap_line()} in with_a_gap"
    assert missing.why == "no kernel for this operator"


def test_fallback_raise_names_operator_and_line() -> None:
    with pytest.raises(ProgramError, match=rf"no kernels for: aten\.i0 at .*forwards\.py:{gap_line()} in with"):
        onward.compile(with_a_gap, params=gap_params(), cache=torch.zeros(1, 2), fallback="raise")


def test_fallback_inductor_gives_the_whole_forward_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = []

    def fake(forward: Callable[..., Any], *, fullgraph: bool) -> Callable[..., Any]:
        sources.append((forward, fullgraph))
        return forward

    monkeypatch.setattr(torch, "compile", fake)
    program = onward.compile(with_a_gap, params=gap_params(), cache=torch.zeros(1, 2), fallback="inductor")
    assert (program.backend, sources) == ("inductor", [(with_a_gap, True)])
    assert "aten.i0" in program.explain(torch.zeros(1, 2)).note
    whole = onward.compile(gpt2, params=gpt2_params(), cache=new_cache(1, MAX_LEN), fallback="inductor")
    assert (whole.backend, len(sources)) == ("native", 1), "nothing is missing: nothing is compiled"


# ── the report ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_report_accounts_for_every_weight_and_all_the_time() -> None:
    params = gpt2_params()
    program = onward.compile(gpt2, params=params, cache=new_cache(1, MAX_LEN))
    report = program.explain(new_cache(1, MAX_LEN), offset=MAX_LEN - 1)
    leaves = pytree.tree_leaves(params)
    looked_up = params.wpe.nbytes - params.wpe[0].nbytes - params.wte[0].nbytes  # wte is also the head
    assert sum(row.nbytes for row in report.rows) == sum(leaf.nbytes for leaf in leaves) - looked_up
    assert report.seconds == sum(row.seconds for row in report.rows) > 0
    assert [row.seconds for row in report.rows] == sorted((row.seconds for row in report.rows), reverse=True)
    assert {"cached_attention", "aten.embedding", "layer_norm"} <= {row.op for row in report.rows}


@pytest.mark.parametrize("make", [lambda: (gpt2, gpt2_params(), new_cache(1, MAX_LEN)),
                                  lambda: (with_a_gap, gap_params(), torch.zeros(1, 2))])  # fmt: skip
def test_the_report_fits_a_terminal_of_80_columns(make: Callable[[], Any]) -> None:
    forward, params, cache = make()
    lines = str(onward.compile(forward, params=params, cache=cache).explain(cache)).splitlines()
    assert lines[0] == "backend native"
    assert lines[1].split() == ["op", "kernel", "calls", "MB", "us", "share", "GB/s"]
    if forward is with_a_gap:
        assert lines[-2:] == [
            f"run by torch: aten.i0 at program/test_foreign_forwards.py:{gap_line()} in with_a_gap: no",
            "    kernel for this operator",
        ]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("batch", [1, 3])
def test_logits_at_some_positions_are_selected_inside_the_program(foreign: Any, batch: int) -> None:
    """Of a `Model` whose forward computes all; prompts of many lengths share a few traces."""
    forward, params, cache = foreign
    model = Model(forward, params(), cache, VOCAB)
    run, last = Run(model), Run(model)
    for seed, tokens in enumerate((9, 2, 5, 17, 30, 12)):
        prompt = ids(batch, tokens, seed)
        at = torch.full((batch, 1), tokens - 1)
        batches = [
            ForwardBatch(prompt, torch.zeros(batch, dtype=torch.int32), cache(batch, MAX_LEN), positions)
            for positions in (None, at, at[:, :0])
        ]
        whole, some, none = (run.step(each).logits for each in batches)
        assert torch.equal(some, whole[:, -1:])
        assert none.shape == (batch, 0, VOCAB)
        for later in batches[1:]:
            for ours, theirs in zip(pytree.tree_leaves(later.cache), pytree.tree_leaves(batches[0].cache), strict=True):
                assert torch.equal(ours, theirs)
        last.step(ForwardBatch(prompt, torch.zeros(batch, dtype=torch.int32), cache(batch, MAX_LEN), at))
    assert run.why_eager == ""
    programs = last._programs
    assert len(programs.by_shape) == 6
    assert [len(family.traced) for family in programs.families.values()] == [1]
    assert all(family.grids for family in programs.families.values())
    assert all(isinstance(call, KernelCall) for each in programs.by_shape.values() for call in each.image.calls)


def test_inputs_of_any_strides_are_read_in_place() -> None:
    def forward(tokens: Tensor, offsets: Tensor, cache: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        return params[tokens] + torch.special.i0(tokens).unsqueeze(2) + offsets[:, None, None], cache  # i0: by torch

    params, cache = torch.randn(VOCAB, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(2, 1)
    program = onward.compile(forward, params=params, cache=cache)
    for seed in range(3):
        many = ids(2, 6, seed) % 5
        for tokens in (many[:, :3], many[:, ::2], many.T[:2, :2], many[:, 1:4].contiguous()):
            for offsets in (torch.tensor([1, 2], dtype=torch.int32), torch.arange(8, dtype=torch.int32)[1::4]):
                ours, _ = program(tokens, offsets, cache)
                torch.testing.assert_close(ours, forward(tokens.contiguous(), offsets, cache, params)[0])
