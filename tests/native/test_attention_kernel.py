"""The attention kernel, compared with its definition in float64, and bit for bit between divisions of the work.

The bound. U is the unit roundoff of float32, u that of the weights (2^-8 if pairs of bf16 are multiplied, else U). With
s_j the scores, p_j the normalized weights and o the exact output:
- s_j is a sum of D products in order, scaled, masked and compared with the maximum:
  |error| <= (D + 3) U scale sum_d |q_d k_jd| + 2 U (|s_j| + |m|), m the largest score;
- a softcap doesn't increase the error of a score (its slope is at most 1) and adds its own rounding errors: a division,
  tanh to 6 U, a product: 8 U of the capped score;
- e^x has an error of 3 U, and a weight is multiplied by one such factor per block: 3 U (S / 64 + 3);
- so every weight is off by a factor 1 + e_j, where |e_j| <= u + the sum of these. Both sums have the same weights, so
  the output changes by sum_j p_j e_j (v_j - o) to first order; 1.1 covers the second order;
- each sum has at most 64 + S / 64 + S / 512 + 20 additions in a chain, with an error of U each;
- the output is rounded once to its dtype.
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_calls import CODES, DTYPES, attention, poisoned
from torch import Tensor

from onward import native
from onward.errors import NativeError

U = 2.0**-24
ROUNDING = {torch.float32: U, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 1e-37, torch.bfloat16: 1e-37, torch.float16: 2.0**-24}
per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
seeds = st.integers(0, 2**31)


@dataclasses.dataclass
class Case:
    """An attention call. `offsets` None: every query sees every key."""

    q: Tensor
    keys: Tensor
    values: Tensor
    offsets: Tensor | None
    window: int = 0
    mask: Tensor | None = None
    sinks: Tensor | None = None
    softcap: float = 0.0

    def run(self) -> Tensor:
        return attention(
            self.q, self.keys, self.values, self.offsets, window=self.window, mask=self.mask, sinks=self.sinks,
            softcap=self.softcap,
        )  # fmt: skip

    def part(self, row: int, start: int, end: int) -> "Case":
        """Queries start … end - 1 of one row, alone."""
        offsets = None if self.offsets is None else self.offsets[row : row + 1] + start
        mask = self.mask
        if mask is not None:
            mask = mask[row : row + 1] if mask.shape[0] > 1 else mask
            mask = mask[:, :, start:end] if mask.shape[2] > 1 else mask
        return dataclasses.replace(
            self,
            q=self.q[row : row + 1, :, start:end],
            keys=self.keys[row : row + 1],
            values=self.values[row : row + 1],
            offsets=offsets,
            mask=mask,
        )


def visible(case: Case) -> Tensor:
    """bool [B, 1, T, S]: which key each query sees."""
    queries, positions = case.q.shape[2], case.keys.shape[2]
    if case.offsets is None:
        return torch.ones(case.q.shape[0], 1, queries, positions, dtype=torch.bool)
    at = (case.offsets.long()[:, None] + torch.arange(queries))[:, None, :, None]
    key = torch.arange(positions)
    seen = key <= at
    return seen & (key > at - case.window) if case.window else seen


def definition(case: Case) -> tuple[Tensor, Tensor]:
    """The output in float64 and the bound of the error, see above."""
    q, k, v = case.q.double(), case.keys.double(), case.values.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    dim, positions = q.shape[3], k.shape[2]
    scale = dim**-0.5
    seen = visible(case)
    scores = q @ k.transpose(-1, -2) * scale
    size = q.abs() @ k.abs().transpose(-1, -2) * scale
    if case.softcap:
        scores = case.softcap * (scores / case.softcap).tanh()
    if case.mask is not None:
        scores = scores + case.mask
    scores = scores.masked_fill(~seen, -math.inf)
    sinks = torch.full((q.shape[1],), -math.inf) if case.sinks is None else case.sinks
    sinks = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
    every = torch.cat((scores, sinks), -1)
    largest = every.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = (every - largest).exp()
    total = weights.sum(-1, keepdim=True)
    p = (weights / total.clamp(min=1e-300))[..., :-1]
    out = p @ v

    finite = scores.nan_to_num(neginf=0.0)
    # A score was rounded before its mask was added, and the sink's own error moves all as one.
    error = (
        (dim + 3 + 8 * bool(case.softcap)) * U * size
        + 2 * U * (finite.abs() + size + largest.abs())
        + 3 * U * (positions / 64 + 3)
    )
    weight_unit = 2.0**-8 if q_rounds_weights(case.q.dtype) else U
    distance = (v[:, :, None] - out[:, :, :, None]).abs()  # [B, H, T, S, D]
    moved = ((p * (error + weight_unit))[..., None] * distance).sum(3)
    chain = 64 + positions / 64 + positions / 512 + 20
    bound = 1.1 * (moved + 2 * chain * U * (p @ v.abs()))
    if case.sinks is not None:
        bound = bound + 1.1 * out.abs() * (2 * U * (sinks.abs() + largest.abs()) + 6 * U + weight_unit)
    return out, bound + ROUNDING[case.q.dtype] * (out.abs() + bound) + SMALLEST[case.q.dtype]


def q_rounds_weights(dtype: torch.dtype) -> bool:
    return native.isa() == "avx512" and dtype == torch.bfloat16


def assert_correct(case: Case) -> None:
    want, bound = definition(case)
    got = case.run().double()
    assert not got.isnan().any()
    excess = ((got - want).abs() - bound).max().item()
    assert excess <= 0, f"{excess} beyond a bound of up to {bound.max().item()}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@st.composite
def cases(draw: st.DrawFn, longest: int = 200, queries: int = 40, dims: tuple[int, ...] = ()) -> Case:
    generator = torch.Generator().manual_seed(draw(seeds))
    dtype = draw(st.sampled_from(DTYPES))
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3, 7)))
    t = draw(st.integers(1, queries))
    positions = draw(st.integers(t, longest))
    dim = draw(st.sampled_from(dims or (1, 3, 16, 17, 31, 33, 64, 80, 127, 128)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    offsets = None
    if draw(st.booleans()):
        offsets = torch.tensor([draw(st.integers(0, positions - t)) for _ in range(batch)], dtype=torch.int32)
    heads = kv_heads * group
    value_dim = dim if draw(st.booleans()) else draw(st.sampled_from((2, 16, 33, 96)))
    mask = None
    if draw(st.booleans()):
        shape = [size if draw(st.booleans()) else 1 for size in (batch, heads, t, positions)]
        mask = torch.randn(shape, generator=generator)
        mask[mask > 1.5] = -math.inf
    return Case(
        q=2 * normal(batch, heads, t, dim),
        keys=normal(batch, kv_heads, positions, dim),
        values=normal(batch, kv_heads, positions, value_dim),
        offsets=offsets,
        window=draw(st.integers(1, positions)) if offsets is not None and draw(st.booleans()) else 0,
        mask=mask,
        sinks=torch.randn(heads, generator=generator) if draw(st.booleans()) else None,
        softcap=draw(st.sampled_from((0.0, 0.0, 0.5, 5.0, 50.0))),
    )


@given(case=cases(), threads=st.integers(1, 3))
@per_isa
def test_agrees_with_the_definition(isa: str, case: Case, threads: int) -> None:
    native.set_num_threads(threads)
    assert_correct(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 3, 9])
def test_long_contexts_agree_with_the_definition(isa: str, dtype: torch.dtype, queries: int) -> None:
    generator = torch.Generator().manual_seed(queries)
    keys, values = (torch.randn(2, 2, 3000, 31, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(2, 4, queries, 31, generator=generator).to(dtype)
    assert_correct(Case(q, keys, values, torch.tensor([2900, 511], dtype=torch.int32)))


@given(data=st.data(), threads=st.tuples(st.integers(1, 4), st.integers(1, 4)))
@per_isa
def test_bits_depend_only_on_the_query(isa: str, data: st.DataObject, threads: tuple[int, int]) -> None:
    """Alone == batched, chunked == whole, whatever the threads."""
    case = data.draw(cases(longest=1400, queries=600, dims=(17, 32, 48)))
    native.set_num_threads(threads[0])
    whole = case.run()
    native.set_num_threads(threads[1])
    for _ in range(4):
        row = data.draw(st.integers(0, case.q.shape[0] - 1))
        start = data.draw(st.integers(0, case.q.shape[2] - 1))
        end = data.draw(st.integers(start + 1, min(start + 80, case.q.shape[2])))
        part = case.part(row, start, end).run()
        assert same_bits(part, whole[row : row + 1, :, start:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_batched_query_equals_the_query_alone(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(1, 2, 600, 32, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(1, 4, 600, 32, generator=generator).to(dtype)
    case = Case(q, keys, values, torch.tensor([0], dtype=torch.int32), sinks=torch.randn(4, generator=generator))
    whole = case.run()
    for start in (*range(0, 600, 7), 63, 64, 65, 511, 512, 513):
        assert same_bits(case.part(0, start, start + 1).run(), whole[:, :, start : start + 1])


@given(case=cases(longest=700), threads=st.integers(1, 3))
@per_isa
def test_entries_that_no_query_sees_are_not_read(isa: str, case: Case, threads: int) -> None:
    if case.offsets is None:
        case = dataclasses.replace(case, offsets=torch.zeros(case.q.shape[0], dtype=torch.int32))
    native.set_num_threads(threads)
    clean = case.run()
    hidden = ~visible(case).any(2)[..., None]  # [B, 1, S, 1]
    spoiled = dataclasses.replace(
        case,
        keys=case.keys.masked_fill(hidden, math.nan),
        values=case.values.masked_fill(hidden, math.nan),
    )
    assert same_bits(spoiled.run(), clean)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("window", [0, 9])
def test_a_nonfinite_token_affects_only_the_queries_that_see_it(
    isa: str, dtype: torch.dtype, bad: float, window: int
) -> None:
    generator = torch.Generator().manual_seed(2)
    keys, values = (torch.randn(1, 1, 100, 20, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(1, 2, 100, 20, generator=generator).to(dtype)
    clean = Case(q, keys, values, torch.tensor([0], dtype=torch.int32), window=window)
    spoiled = dataclasses.replace(clean, keys=keys.clone(), values=values.clone())
    spoiled.keys[:, :, 40], spoiled.values[:, :, 40] = bad, bad
    got, sees = spoiled.run(), visible(clean)[0, 0, :, 40]
    assert same_bits(got[:, :, ~sees], clean.run()[:, :, ~sees])
    assert not got[:, :, sees].isfinite().any()


@given(case=cases(longest=1200, queries=90), threads=st.integers(1, 3), data=st.data())
@per_isa
def test_nonfinite_tokens_do_not_affect_queries_that_mask_them(
    isa: str, case: Case, threads: int, data: st.DataObject
) -> None:
    """Later tokens of the same chunk, and those that a window has left behind: 0 times infinity must not happen."""
    if case.offsets is None:
        case = dataclasses.replace(case, offsets=torch.zeros(case.q.shape[0], dtype=torch.int32))
    assert case.offsets is not None
    native.set_num_threads(threads)
    clean, seen = case.run(), visible(case)
    first, last = int(case.offsets.min()), int(case.offsets.max()) + case.q.shape[2] - 1
    keys, values = case.keys.clone(), case.values.clone()
    for position in data.draw(st.lists(st.integers(first, last), min_size=1, max_size=3)):
        keys[:, :, position] = data.draw(st.sampled_from((0.0, math.nan, math.inf, -math.inf)))
        values[:, :, position] = data.draw(st.sampled_from((math.nan, math.inf, -math.inf)))
    got = dataclasses.replace(case, keys=keys, values=values).run()
    broken = ~values.isfinite().all(-1)[:, :1, None]  # [B, 1, 1, S]
    untouched = ~(seen & broken).any(-1).expand(clean.shape[:3])
    assert same_bits(got[untouched], clean[untouched])


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_unaligned_tensors(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)

    def odd(*shape: int) -> Tensor:
        """Of this shape, at an address and with strides that fit nothing."""
        memory = torch.randn(math.prod(shape[:-1]) * (shape[-1] + 3) + 1, generator=generator).to(dtype)
        return memory[1:].view(*shape[:-1], shape[-1] + 3)[..., : shape[-1]]

    for dim in (33, 64):
        q, keys, values = odd(2, 70, 4, dim).transpose(1, 2), odd(2, 2, 90, dim), odd(2, 2, 90, dim)
        case = Case(q, keys, values, torch.tensor([20, 3], dtype=torch.int32))
        out = poisoned((2, 70, 4, dim), dtype)
        attention(q, keys, values, case.offsets, out=out.transpose(1, 2))
        plain = dataclasses.replace(case, q=q.contiguous(), keys=keys.contiguous(), values=values.contiguous())
        assert same_bits(out.transpose(1, 2), plain.run())


def test_a_query_without_visible_keys_gives_zeros(isa: str) -> None:
    q, kv = torch.ones(1, 1, 2, 8), torch.ones(1, 1, 5, 8)
    hide_all = torch.full((1, 1, 2, 5), -math.inf)
    hide_all[0, 0, 1, 2] = 0.0
    out = Case(q, kv, kv, None, mask=hide_all).run()
    assert out[0, 0].tolist() == [[0.0] * 8, [1.0] * 8]
    assert Case(q, kv[:, :, :0], kv[:, :, :0], None).run().tolist() == [[[[0.0] * 8] * 2]]


def test_a_sink_takes_its_share(isa: str) -> None:
    q, kv = torch.zeros(1, 2, 1, 4), torch.ones(1, 2, 3, 4)
    # Scores of 0: three keys weigh 3, sinks of log 3 and -inf weigh 3 and nothing.
    out = Case(q, kv, kv, None, sinks=torch.tensor([math.log(3.0), -math.inf])).run()
    torch.testing.assert_close(out[0, :, 0], torch.tensor([[0.5] * 4, [1.0] * 4]), rtol=1e-6, atol=0)


def test_outputs_stay_between_the_values(isa: str) -> None:
    """Weights are rounded before they are summed: a constant value comes out as it went in."""
    generator = torch.Generator().manual_seed(4)
    q, keys = (torch.randn(1, 2, 300, 64, generator=generator).bfloat16() for _ in range(2))
    values = torch.full((1, 2, 300, 64), 1.7109375).bfloat16()
    out = Case(q, keys, values, torch.tensor([0], dtype=torch.int32)).run()
    assert torch.equal(out, values)


def test_a_softcap_bounds_scores_before_the_mask(isa: str) -> None:
    """One key scores far above the cap, one far below, one is hidden: weights e^c, e^-c and 0, c = 1."""
    q = torch.full((1, 1, 1, 4), 50.0)
    keys = torch.tensor([50.0, -50.0, 50.0]).view(1, 1, 3, 1).expand(1, 1, 3, 4).contiguous()
    values = torch.tensor([1.0, 0.0, 7.0]).view(1, 1, 3, 1)
    mask = torch.tensor([0.0, 0.0, -math.inf]).view(1, 1, 1, 3)
    out = Case(q, keys, values, None, mask=mask, softcap=1.0).run()
    assert out.item() == pytest.approx(1 / (1 + math.exp(-2)), rel=8 * U)


def test_values_may_be_a_slice_of_the_keys(isa: str) -> None:
    """As the absorbed form of multi-head latent attention has them: 576 features of a key, the first 512 its value."""
    generator = torch.Generator().manual_seed(5)
    for dtype in DTYPES:
        keys = torch.randn(2, 1, 200, 576, generator=generator).to(dtype)
        q = torch.randn(2, 16, 3, 576, generator=generator).to(dtype)
        case = Case(q, keys, keys[..., :512], torch.tensor([190, 63], dtype=torch.int32))
        assert same_bits(case.run(), dataclasses.replace(case, values=case.values.contiguous()).run())
        assert_correct(case)


@pytest.mark.parametrize("softcap", [-1.0, math.nan])
def test_a_negative_softcap_is_refused(isa: str, softcap: float) -> None:
    one = torch.ones(1, 1, 1, 8)
    with pytest.raises(NativeError, match="bad argument"):
        Case(one, one, one, None, softcap=softcap).run()


@pytest.mark.parametrize("offset", [-1, 5, 2**31 - 1])
def test_positions_outside_the_cache_are_refused(isa: str, offset: int) -> None:
    q, kv = torch.ones(1, 1, 4, 8), torch.ones(1, 1, 8, 8)
    with pytest.raises(NativeError, match="bad argument"):
        Case(q, kv, kv, torch.tensor([offset], dtype=torch.int32)).run()


def test_query_heads_must_be_a_multiple_of_key_heads(isa: str) -> None:
    with pytest.raises(NativeError, match="bad argument"):
        Case(torch.ones(1, 3, 1, 8), torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8), None).run()


def test_every_dtype_has_a_code() -> None:
    assert set(CODES) == {torch.float32, torch.bfloat16, torch.float16}
