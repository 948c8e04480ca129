"""The sampling kernels give the ids and sums of their definitions, bit for bit, for all logits, options and numbers of
threads."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_elementwise_kernels import per_isa, seeds, spread

from onward import native, ops
from onward.errors import NativeError
from onward.sampling.draw import GumbelSampler
from onward.sampling.logprobs import _normaliser, _normalisers

INF = math.inf
ROWS = 6
temperatures = st.sampled_from((0.0, 1e-44, 1e-3, 0.3, 0.8, 1.0, 1.7, 50.0, 1e30))
top_ks = st.sampled_from((0, 0, 1, 2, 7, 40, 700, 5000, 2**40))
top_ps = st.sampled_from((1.0, 1.0, 0.999, 0.95, 0.5, 0.1, 1e-3, 1e-9, 1e-45, 1 - 2.0**-24))
min_ps = st.sampled_from((0.0, 0.0, 1e-30, 1e-3, 0.05, 0.5, 0.999, 1.0))


@pytest.fixture(autouse=True)
def kernels(isa: str) -> None:
    assert ops.choice() == ("native", isa), "the kernel is what is tested"


def column(values: list, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


options = st.tuples(
    *(st.lists(values, min_size=ROWS, max_size=ROWS) for values in (temperatures, top_ks, top_ps, min_ps))
)


def draw_of(chosen: tuple[list, list, list, list], seed: int) -> GumbelSampler:
    temperature, top_k, top_p, min_p = chosen
    keys = torch.randint(-(2**63), 2**63 - 1, (ROWS,), generator=torch.Generator().manual_seed(seed))
    return GumbelSampler(
        keys,
        column(temperature, torch.float32),
        column(top_k, torch.int64),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
    )


def logits_of(kind: str, seed: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, columns, generator=generator)
    scale = torch.rand(ROWS, 1, generator=generator) * 12
    match kind:
        case "ties":
            return (x * 2).round()
        case "plateaus":  # many equal and large, some slightly different
            return torch.where(x > 0, 3.0, 3.0 - 2e-7 * (x * 4).round())
        case "peaks":
            return x + 40 * (x == x.amax(-1, keepdim=True))
        case "impossible":
            return torch.where(x > 1, x * scale, -INF)
        case "merged":  # different logits, equal scores: relative to the best, the differences are rounded away
            return torch.where(x == x.amax(-1, keepdim=True), 100.0, x * 1e-6)
        case "huge":
            return x * 1e38
        case "tiny":
            return x * 1e-42
        case _:
            return x * scale


@given(
    seed=seeds,
    kind=st.sampled_from(("normal", "normal", "ties", "plateaus", "peaks", "impossible", "huge", "tiny")),
    columns=st.sampled_from((1, 2, 15, 63, 64, 65, 300, 4099)),
    chosen=options,
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    threads=st.integers(1, 3),
    position=st.integers(0, 2**31),
)
@settings(parent=per_isa, max_examples=150)
def test_kernel_draws_equal_the_definition(isa, seed, kind, columns, chosen, dtype, threads, position):
    native.set_num_threads(threads)
    draw, positions = draw_of(chosen, seed), position + torch.arange(ROWS) * 3
    logits = logits_of(kind, seed, columns).to(dtype)
    assert torch.equal(draw(spread(logits), positions), draw.definition(logits, positions))


@given(
    seed=seeds,
    kind=st.sampled_from(("normal", "normal", "ties", "merged")),
    chosen=st.tuples(
        *(
            st.lists(st.sampled_from(values), min_size=ROWS, max_size=ROWS)
            for values in ((0.7, 1.0, 50.0), (0, 0, 7, 100), (1.0, 0.97, 0.8, 0.4, 0.02), (0.0, 0.02, 0.1, 0.4))
        )
    ),
)
@settings(parent=per_isa, max_examples=30)
def test_filters_together_admit_the_same_ids(isa, seed, kind, chosen):
    """At 64 positions a row, so that ids near every threshold are drawn."""
    draw = draw_of(chosen, seed).take(torch.arange(ROWS).repeat_interleave(64))
    logits = logits_of(kind, seed, 300).repeat_interleave(64, 0)
    positions = torch.arange(len(logits))
    assert torch.equal(draw(logits, positions), draw.definition(logits, positions))


@given(seed=seeds, chosen=options, mark=st.sampled_from((math.nan, INF, -INF)), places=st.lists(st.integers(0, 299)))
@settings(parent=per_isa, max_examples=60)
def test_a_row_with_nonfinite_logits_gives_its_first_one(isa, seed, chosen, mark, places):
    logits = torch.full((ROWS, 300), -INF) if mark == -INF else logits_of("normal", seed, 300)
    logits[:, places] = mark
    draw, positions = draw_of(chosen, seed), torch.arange(ROWS)
    got = draw(logits, positions)
    assert torch.equal(got, draw.definition(logits, positions))
    if places and mark != -INF:
        assert (got == min(places)).all()


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)) and torch.equal(got.isnan(), want.isnan())


@given(
    seed=seeds,
    kind=st.sampled_from(("normal", "ties", "plateaus", "peaks", "impossible", "merged", "huge", "tiny")),
    columns=st.sampled_from((1, 2, 15, 63, 64, 65, 300, 4099)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    threads=st.integers(1, 3),
    mark=st.sampled_from((None, None, math.nan, INF, -INF)),
)
@settings(parent=per_isa, max_examples=80)
def test_the_sums_of_logprobs_equal_the_definition(isa, seed, kind, columns, dtype, threads, mark):
    native.set_num_threads(threads)
    logits = logits_of(kind, seed, columns).to(dtype)
    if mark is not None:
        logits[1], logits[2, seed % columns] = mark, mark
    assert same_bits(_normalisers(spread(logits)), _normaliser(logits))


def test_the_sums_of_a_large_vocabulary_over_several_threads(isa):
    scale = torch.tensor([0.0, 0.3, 1.0, 3.0, 9.0, 40.0]).unsqueeze(1)
    logits = torch.randn(ROWS, 151_936, generator=torch.Generator().manual_seed(3)) * scale
    want = _normaliser(logits)
    for threads in (1, 3):
        native.set_num_threads(threads)
        assert torch.equal(_normalisers(logits), want)
        assert torch.equal(torch.cat([_normalisers(row.unsqueeze(0)) for row in logits]), want)


def test_a_large_vocabulary_over_several_threads(isa):
    """Rows alone, in a batch, with one thread and with three; flat rows, whose nuclei hold most of the ids."""
    vocab = 151_936
    scale = torch.tensor([0.0, 0.3, 1.0, 3.0, 9.0, 2.0]).unsqueeze(1)
    logits = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(3)) * scale
    chosen = ([0.9] * ROWS, [0, 0, 0, 50, 0, 3000], [0.95, 0.3, 1.0, 0.9, 1e-4, 0.8], [0, 0, 0.01, 0.0, 0, 0.001])
    draw, positions = draw_of(chosen, 5), torch.arange(ROWS)
    want = draw.definition(logits, positions)
    for threads in (1, 3):
        native.set_num_threads(threads)
        assert torch.equal(draw(logits, positions), want)
        alone = [draw.take(torch.tensor([i]))(logits[i : i + 1], positions[i : i + 1]) for i in range(ROWS)]
        assert torch.equal(torch.cat(alone), want)


def test_no_rows_and_no_columns(isa):
    draw = draw_of(([1.0] * ROWS, [0] * ROWS, [1.0] * ROWS, [0.0] * ROWS), 1)
    assert draw.take(torch.empty(0, dtype=torch.int64))(torch.empty(0, 5), torch.empty(0)).shape == (0,)
    library = native.library()
    assert library is not None
    with pytest.raises(NativeError, match="bad argument"):
        library.check(library.onward_sample(1, 0, *[0] * 10), "onward_sample")
