"""top_experts: the chosen experts, their order and their weights."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rounding import UNIT, random

from onward import ops
from onward.errors import RequestError

few = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
# exp and the sum of up to 300 of them, the division, the sum of weights, its division, the scale.
RELATIVE = (300 + 20) * UNIT[torch.float32]


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def near(weights: torch.Tensor, *expected: float) -> bool:
    return torch.allclose(weights, torch.tensor([expected]), rtol=RELATIVE, atol=0)


def test_softmax_before_and_after_the_choice():
    logits = logits_of(0.1, 0.4, 0.2, 0.3)
    chosen, weights = ops.top_experts(logits, 2)
    assert chosen.dtype == torch.int32
    assert chosen.tolist() == [[1, 3]]
    assert near(weights, 0.4, 0.3)
    assert near(ops.top_experts(logits, 2, normalize=True)[1], 4 / 7, 3 / 7)
    assert near(ops.top_experts(logits, 2, score="softmax_of_chosen")[1], 4 / 7, 3 / 7)
    assert near(ops.top_experts(logits, 2, normalize=True, scale=2.5)[1], 10 / 7, 7.5 / 7)


def test_a_bias_affects_the_choice_but_not_the_weights():
    logits = torch.tensor([[0.0, 2.0, -1.0]])
    sigmoids = logits.sigmoid()[0].tolist()
    chosen, weights = ops.top_experts(logits, 2, score="sigmoid", choice_bias=torch.tensor([0.0, -1.0, 0.5]))
    assert chosen.tolist() == [[2, 0]]
    assert near(weights, sigmoids[2], sigmoids[0])


def test_groups_are_selected_by_their_two_best():
    # Sums of two: 0.9, 1.0, 0.95; the single best expert is in the group that falls out.
    scores = torch.tensor([[0.85, 0.05, 0.5, 0.5, 0.6, 0.35]])
    chosen, _ = ops.top_experts(scores.logit(), 3, score="sigmoid", groups=3, kept_groups=2)
    assert chosen.tolist() == [[4, 2, 3]]


def test_groups_are_selected_by_their_best():
    scores = torch.tensor([[0.85, 0.05, 0.5, 0.5, 0.6, 0.35]])
    options = {"score": "sigmoid", "groups": 3, "kept_groups": 2, "group_best": 1}
    assert ops.top_experts(scores.logit(), 3, **options)[0].tolist() == [[0, 4, 5]]
    with pytest.raises(RequestError, match=r"one or two best experts \(group_best\); got 3"):
        ops.top_experts(scores.logit(), 3, **options | {"group_best": 3})


def test_the_first_of_equal_scores_is_chosen():
    chosen, weights = ops.top_experts(torch.zeros(2, 40), 5)
    assert chosen.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert near(weights[:1], *[1 / 40] * 5)
    tied = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 3.0]])
    assert ops.top_experts(tied, 4)[0].tolist() == [[1, 3, 5, 2]]
    assert ops.top_experts(torch.zeros(1, 8), 4, score="sigmoid", groups=4, kept_groups=2)[0].tolist() == [[0, 1, 2, 3]]


def test_a_row_with_nan_has_nan_weights():
    logits = torch.tensor([[0.0, math.nan, 1.0, 5.0], [1.0, 2.0, 3.0, 4.0]])
    chosen, weights = ops.top_experts(logits, 2)
    assert chosen.tolist() == [[1, 3], [3, 2]]
    assert weights[0].isnan().all()
    assert weights[1].isfinite().all()


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@given(
    rows=st.integers(1, 40),
    experts=st.sampled_from((4, 12, 64, 300)),
    score=st.sampled_from(("softmax", "softmax_of_chosen", "sigmoid")),
    biased=st.booleans(),
    grouped=st.booleans(),
    normalize=st.booleans(),
    seed=st.integers(0, 2**16),
)
@few
def test_routing_equals_the_formulas_of_the_families(dtype, rows, experts, score, biased, grouped, normalize, seed):
    """Against torch's own softmax, sigmoid and topk, where no two candidates are so near that roundings decide."""
    logits = (2 * random(rows, experts, seed=seed)).to(dtype)
    plain = score == "softmax_of_chosen"
    bias = random(experts, seed=seed + 1) / 10 if biased and not plain else None
    groups, kept = (4, 3) if grouped and not plain else (1, 1)
    count = 2
    wide = logits.to(torch.float64)
    scores = wide.sigmoid() if score == "sigmoid" else wide.softmax(-1)
    values = scores if bias is None else scores + bias
    if plain or (bias is None and groups == 1):
        values = wide
    sums = values.view(rows, groups, -1).topk(min(2, experts // groups), -1).values.sum(-1)
    best = sums.topk(kept, -1).indices
    mask = torch.zeros(rows, groups, dtype=torch.bool).scatter(1, best, True).repeat_interleave(experts // groups, 1)
    top = values.masked_fill(~mask, -math.inf).topk(min(count + 1, experts // groups * kept), -1)
    gaps = [(-top.values.diff(dim=-1)).amin(-1)]
    if groups > 1:
        gaps.append((-sums.sort(descending=True).values.diff(dim=-1)).amin(-1))
    clear = torch.stack(gaps).amin(0) > 1e-5
    weights = scores.gather(1, top.indices[:, :count])
    if plain:
        weights = wide.gather(1, top.indices[:, :count]).softmax(-1)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) if normalize else weights
    chosen, got = ops.top_experts(
        logits, count, score=score, choice_bias=bias, groups=groups, kept_groups=kept, normalize=normalize
    )
    assert torch.equal(chosen[clear], top.indices[clear, :count].to(torch.int32))
    torch.testing.assert_close(got[clear], weights[clear].to(torch.float32), rtol=2 * RELATIVE, atol=0)


BAD = {
    "expects float logits": {"logits": torch.zeros(2, 4, dtype=torch.int32)},
    "score is one of softmax": {"score": "relu"},
    r"float32 choice_bias \[4\]": {"choice_bias": torch.zeros(3)},
    "can't be combined with choice_bias": {"score": "softmax_of_chosen", "choice_bias": torch.zeros(4)},
    "can't form 3 equal groups": {"groups": 3},
    "of which 3 are kept": {"groups": 2, "kept_groups": 3},
    "chooses 1 … 4 of 4 experts; got 5": {"count": 5},
    "chooses 1 … 2 of 4 experts; got 3": {"groups": 2, "count": 3},
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_shapes_and_dtypes_raise_one_error(message):
    with pytest.raises(RequestError, match=message):
        ops.top_experts(**({"logits": torch.zeros(2, 4), "count": 2} | BAD[message]))
