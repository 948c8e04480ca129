"""The statistics of `onward eval --paired`; tests/integrations has the command."""

import random
import statistics

from onward.cli.evaluate import compared, comparisons, other_flags
from onward.cli.flags import ModelFlags


def test_correlated_pairs_have_a_narrower_interval():
    draws = random.Random(1)
    hard = [draws.random() for _ in range(400)]
    pairs = [(float(each < 0.5), float(each < 0.55)) for each in hard]
    row = compared(pairs)
    assert row["documents"] == 400
    assert row["difference"] == statistics.fmean(two - one for one, two in pairs)
    low, high = row["interval"]
    wide_low, wide_high = row["unpaired_interval"]
    assert wide_low < low < row["difference"] < high < wide_high
    # Var(b - a) = p (1 - p) for the 5 % of documents that only one answers; Var(a) + Var(b) is near 1/2.
    assert (high - low) / (wide_high - wide_low) < 0.5
    assert row["better"] == sum(one < two for one, two in pairs)
    assert row["worse"] == 0


def test_intervals_cover_the_true_difference_95_times_in_100():
    draws, covered = random.Random(2), 0
    for _ in range(1000):
        pairs = [(base, base + draws.gauss(0.3, 1)) for base in (draws.gauss(0, 3) for _ in range(60))]
        low, high = compared(pairs)["interval"]
        covered += low <= 0.3 <= high
    # A normal interval of 60 pairs covers 0.945, with a standard deviation of 7.2 in 1000: four of them.
    assert 917 <= covered <= 974


def test_equal_models_have_no_difference():
    row = compared([(1.0, 1.0), (0.0, 0.0)])
    assert (row["difference"], row["interval"], row["better"], row["worse"]) == (0.0, [0.0, 0.0], 0, 0)
    assert compared([(1.0, 0.0)])["interval"] is None


def test_documents_are_paired_by_number_and_nonnumeric_metrics_are_dropped():
    def sample(doc, acc):
        return {
            "doc_id": doc, "filter": "none", "metrics": ["acc", "word_perplexity"], "acc": acc,
            "word_perplexity": (-3.0, 2),
        }  # fmt: skip

    (row,) = comparisons({"task": [sample(0, 1), sample(1, 0)]}, {"task": [sample(1, 1), sample(0, 1)]})
    assert (row["task"], row["metric"], row["first"], row["second"]) == ("task", "acc", 0.5, 1.0)


def test_the_other_model_inherits_the_flags_of_the_first():
    flags = ModelFlags(model="a", dtype="float32")
    assert other_flags("b", flags) == ModelFlags(model="b", dtype="float32")
    assert other_flags("b,quantize=int4,max-seq-len=64", flags).max_seq_len == 64
    assert other_flags("dtype=bfloat16", flags) == ModelFlags(model="a", dtype="bfloat16")
