"""Log-probabilities, compared with float64: in one order, and the same alone and in a batch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onward import Sampler, SamplingParams
from onward.errors import RequestError
from onward.sampling import logprobs, noise
from onward.sampling.logprobs import log_softmax
from onward.sampling.noise import by_rows

NAN, INF = math.nan, math.inf


def test_literal_probabilities():
    got = logprobs(torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log() + 5, torch.tensor([2]), top_k=3)
    assert got.chosen.tolist() == pytest.approx([math.log(0.2)], abs=1e-6)
    assert got.top_ids.tolist() == [[1, 3, 2]]
    assert got.top[0].tolist() == pytest.approx([math.log(0.4), math.log(0.3), math.log(0.2)], abs=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0, 50.0])
@pytest.mark.parametrize("vocab", [3, 1000, 151_936])
def test_logprobs_equal_a_log_softmax_in_float64(scale, vocab):
    logits = scale * torch.randn(2, 3, vocab, generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor([[0, 1, 2], [vocab - 1, 0, 1]])
    got = logprobs(logits, chosen, top_k=3)
    exact = logits.to(torch.float64).log_softmax(-1)
    # The bound of its docstring.
    bound = 5e-7 + 2.0**-24 * exact.abs()
    assert ((got.chosen - exact.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)).abs() <= bound.amax(-1)).all()
    assert ((got.top - exact.gather(-1, got.top_ids)).abs() <= bound.gather(-1, got.top_ids)).all()
    assert torch.equal(log_softmax(logits.flatten(0, 1)).view_as(logits).gather(-1, got.top_ids), got.top)
    if scale:
        assert torch.equal(got.top_ids, logits.sort(-1, descending=True).indices[..., :3])


def test_ties_are_ordered_by_id():
    logits = torch.zeros(2, 5000)
    logits[0, [4000, 17]] = 1.0
    assert logprobs(logits, torch.tensor([0, 0]), top_k=4).top_ids.tolist() == [[17, 4000, 0, 1], [0, 1, 2, 3]]


def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    logits = 4 * torch.randn(5, 20_000, generator=torch.Generator().manual_seed(2))
    chosen = torch.arange(5)
    batch = logprobs(logits, chosen, top_k=7)
    for row in range(5):
        alone = logprobs(logits[row : row + 1], chosen[row : row + 1], top_k=7)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, batch, strict=True))


@given(
    leading=st.lists(st.integers(0, 7), min_size=0, max_size=3),
    vocab=st.integers(1, 40),
    most=st.integers(1, 100),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_any_number_of_rows_at_once_gives_the_same_bits(leading, vocab, most, dtype):
    generator = torch.Generator().manual_seed(vocab)
    logits = (4 * torch.randn(*leading, vocab, generator=generator)).to(dtype)
    chosen = torch.randint(0, vocab, leading, generator=generator)
    top_k = min(3, vocab)
    whole = logprobs(logits, chosen, top_k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "_MOST_AT_ONCE", most)
        parts = logprobs(logits, chosen, top_k)
    for one, other in zip(whole, parts, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert whole.chosen.shape == tuple(leading)
    assert whole.top.shape == whole.top_ids.shape == (*leading, top_k)


@pytest.mark.parametrize("vocab", [1024, 16_384, 151_936])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_rows_near_the_chunk_limit_equal_rows_alone(vocab, more):
    most = noise._MOST_AT_ONCE // vocab
    rows = most + more
    logits = 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3))
    chosen = torch.arange(rows)
    batch = logprobs(logits, chosen, top_k=2)
    for row in {0, most - 2, most - 1, rows - 1} & set(range(rows)):
        alone = logprobs(logits[row : row + 1], chosen[row : row + 1], top_k=2)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, batch, strict=True))


@pytest.mark.parametrize(("rows", "vocab"), [(0, 3), (1, 3), (7, 1000), (1050, 1000), (3, 2**18 + 1), (5, 0)])
def test_chunks_do_not_exceed_the_limit(rows, vocab):
    sizes = []

    def compute(logits, column):
        sizes.append(logits.numel())
        assert len(column) == len(logits)
        return column

    column = torch.arange(rows)
    assert torch.equal(by_rows(compute, torch.empty(1).expand(rows, vocab), column), column)
    assert max(sizes) <= max(vocab * torch.get_num_threads(), noise._MOST_AT_ONCE)
    assert sum(sizes) == rows * vocab


def test_filtered_logprobs_equal_the_sampling_distribution():
    sampler = Sampler([SamplingParams(temperature=1.0, top_k=2, seed=1)])
    scores = sampler.scores(torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log())
    got = logprobs(scores, torch.tensor([1]), top_k=4)
    assert got.chosen.item() == pytest.approx(math.log(4 / 7), abs=1e-6)
    assert got.top[0, 2:].tolist() == [-INF, -INF]
    assert got.top_ids.tolist() == [[1, 3, 0, 2]]


@pytest.mark.parametrize("mark", [NAN, INF])
def test_an_invalid_distribution_has_no_logprobs(mark):
    got = logprobs(torch.tensor([[0.0, mark, 1.0]]), torch.tensor([0]), top_k=2)
    assert got.chosen.isnan().all()
    assert got.top.isnan().all()
    assert got.top_ids[0, 0] == 1
    assert logprobs(torch.full((1, 3), -INF), torch.tensor([0])).chosen.isnan().all()


@pytest.mark.parametrize(
    ("chosen", "top_k", "says"),
    [
        (torch.tensor([[0]]), 0, r"ids of shape \[1\]"),
        (torch.tensor([0.0]), 0, "float32"),
        (torch.tensor([3]), 0, "from 0 to 2"),
        (torch.tensor([-1]), 0, "from 0 to 2"),
        (torch.tensor([0]), 4, "from 0 to 3"),
        (torch.tensor([0]), -1, "from 0 to 3"),
        (torch.tensor([0]), True, "from 0 to 3"),
    ],
)
def test_mismatched_arguments_are_refused(chosen, top_k, says):
    with pytest.raises(RequestError, match=says):
        logprobs(torch.zeros(1, 3), chosen, top_k)
