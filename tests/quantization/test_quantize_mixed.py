"""Mixed precision: the limit is respected, bits go where iq4_nl costs most, and costs are measured on the model."""

import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import onward
from onward.errors import ConfigError, RequestError
from onward.language_model import Calibration, quantize, quantize_folder
from onward.language_model.quantize_model import _knapsack, choose_formats
from onward.models import map_marked, parameter_name
from onward.quantization.params import ParamsQuantizer
from onward.testing import random_checkpoint, tiny_model
from tiny_checkpoint import FEW_EXPERTS

IDS = torch.randint(0, 60, (3, 20), generator=torch.Generator().manual_seed(0), dtype=torch.int32)


def reports_of(model, bits):
    reports = []
    quantize(model, bits, progress=reports.append, calibrate=Calibration(ids=IDS))
    return reports


def between(model):
    """Bits between those of iq4_nl and int8; zeros that fill up blocks make them many in a tiny model."""
    nbytes, weights = {}, 0
    for format in ("iq4_nl", "int8"):
        reports = reports_of(model, format)
        nbytes[format] = sum(report.nbytes for report in reports)
        weights = sum(rows * inputs for rows, inputs in (report.shape for report in reports))
    return 4 * sum(nbytes.values()) / weights


@pytest.mark.parametrize("family", ["qwen3", "qwen3moe", "qwen3next", "phi3"])
@pytest.mark.stride(2)
def test_budget_is_enforced_and_used_up(family):
    model = tiny_model(family, hidden_size=64, intermediate_size=128)
    every = {format: reports_of(model, format) for format in ("iq4_nl", "int8")}
    weights = sum(rows * inputs for rows, inputs in (report.shape for report in every["iq4_nl"]))
    least, most = (8 * sum(report.nbytes for report in every[format]) / weights for format in ("iq4_nl", "int8"))
    for budget in (least, (least + most) / 2, most):
        reports = reports_of(model, budget)
        bits = 8 * sum(report.nbytes for report in reports) / weights
        assert bits <= budget + 1e-9
        assert {report.format for report in reports} <= {"iq4_nl", "int8"}
        if budget in (least, most):
            assert bits == pytest.approx(budget)
    assert {report.format for report in reports_of(model, (least + most) / 2)} == {"iq4_nl", "int8"}


@pytest.mark.parametrize("tied", [True, False])
def test_the_cost_of_a_matrix_is_the_divergence_with_it_alone_in_iq4_nl(tied):
    model = tiny_model(tie_word_embeddings=tied)
    choices = choose_formats(model, IDS, between(model))

    def logprobs(params):
        lm = onward.LanguageModel(onward.Model(**vars(model) | {"params": params}))
        return torch.cat([F.log_softmax(lm.logits(row), -1) for row in IDS.tolist()])

    exact = logprobs(model.params)
    for name in choices:
        quantizer = ParamsQuantizer(model.params, "iq4_nl")

        def convert(path, part, name=name, quantizer=quantizer):
            return quantizer.quantized(part) if f"{parameter_name(path)}.weight" == name else part

        if tied and name in ("embed_tokens.weight", "lm_head.weight"):
            continue  # in the model they are one weight
        want = F.kl_div(logprobs(map_marked(convert, model.params)), exact, reduction="sum", log_target=True)
        # Sums of float32 in another order: of T V = 60 * 258 terms, each of them as exact as its logprobs.
        assert choices[name].divergence == pytest.approx(float(want) / IDS.numel(), rel=1e-2, abs=1e-6)
    if tied:
        assert choices["embed_tokens.weight"] == choices["lm_head.weight"]


@given(
    things=st.lists(st.tuples(st.floats(0, 9), st.integers(-9, 30)), min_size=1, max_size=8), room=st.integers(0, 90)
)
@settings(deadline=None)
def test_the_best_knapsack_that_fits_is_chosen(things, room):
    costs, sizes = zip(*things, strict=True)
    room += sum(min(size, 0) for size in sizes)
    chosen = _knapsack(costs, sizes, room)
    assert sum(sizes[index] for index in chosen) <= room
    subsets = itertools.chain.from_iterable(
        itertools.combinations(range(len(things)), n) for n in range(len(things) + 1)
    )
    fitting = [subset for subset in subsets if sum(sizes[index] for index in subset) <= room]
    most = max(math.fsum(costs[index] for index in subset) for subset in fitting)
    assert math.fsum(costs[index] for index in chosen) == pytest.approx(most)


def test_a_large_budget_is_enforced_though_its_room_is_divided():
    sizes = [10_007 + 13 * index for index in range(100)]
    chosen = _knapsack([1.0] * 100, sizes, 300_000)
    assert sum(sizes[index] for index in chosen) <= 300_000
    assert len(chosen) == 29  # as many of the smallest as fit


def test_the_experts_of_a_layer_have_one_format():
    model = tiny_model("qwen3moe", **FEW_EXPERTS["qwen3moe"] | {"hidden_size": 64, "moe_intermediate_size": 64})
    reports = reports_of(model, between(model))
    experts = {
        report.format for report in reports if report.name.startswith("layers.0") and report.name[-1].isdecimal()
    }
    assert len(experts) == 1


def test_matrices_with_few_inputs_are_no_larger_in_int8():
    model = tiny_model("nemotronh", hidden_size=16)
    budget = between(model)
    reports = reports_of(model, budget)
    weights = sum(rows * inputs for rows, inputs in (report.shape for report in reports))
    assert 8 * sum(report.nbytes for report in reports) / weights <= budget
    assert all(report.format == "int8" for report in reports if report.shape[1] <= 32)


def test_a_mixed_folder_loads_as_written(tmp_path):
    source = random_checkpoint(tmp_path / "source")
    calibration = Calibration(ids=IDS)
    bits = between(onward.load(source).model)
    reports = quantize_folder(source, tmp_path / "mixed", bits, calibrate=calibration)
    manifest = json.loads((tmp_path / "mixed" / "config.json").read_text())["onward_quantization"]
    assert (manifest["version"], "format" in manifest) == (2, False)
    assert sorted(entry["format"] for entry in manifest["tensors"].values()) == sorted(r.format for r in reports)
    small = quantize(onward.load(source), bits, calibrate=calibration)
    assert torch.equal(onward.load(tmp_path / "mixed").logits([1, 2, 3]), small.logits([1, 2, 3]))
    with pytest.raises(RequestError, match="is already int8 and iq4_nl"):
        quantize_folder(tmp_path / "mixed", tmp_path / "again", "iq4_nl")
    config = json.loads((tmp_path / "mixed" / "config.json").read_text())
    next(iter(config["onward_quantization"]["tensors"].values()))["format"] = "int3"
    (tmp_path / "mixed" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="format must be 'int8', 'int4' or 'iq4_nl'; got 'int3'"):
        onward.load(tmp_path / "mixed")


def test_a_budget_below_iq4_nl_is_refused():
    with pytest.raises(RequestError, match="bits per weight; got a limit of 3"):
        quantize(tiny_model(), 3.0, calibrate=Calibration(ids=IDS))
    with pytest.raises(RequestError, match=r"embed_tokens\.weight is already int8"):
        quantize(quantize(tiny_model(), "int8"), 9.0, calibrate=Calibration(ids=IDS))
