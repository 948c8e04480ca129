"""Calibration of experts: each expert's own inputs, and no Hessian for those with too few."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from onward.language_model import Calibration, quantize
from onward.models import ExpertLinear, map_marked
from onward.quantization.watch import InputRecorder
from onward.testing import tiny_model

WIDTH, INNER = 16, 8
# Of 40 tokens the last expert gets 5, fewer than all inputs; the one before it 10, enough for its last layer.
CHOSEN = torch.tensor([[0, 1]] * 25 + [[0, 2]] * 10 + [[1, 3]] * 5, dtype=torch.int32)
GETS = {0: range(35), 1: (*range(25), *range(35, 40)), 2: range(25, 35), 3: range(35, 40)}


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_each_expert_has_the_hessian_of_its_tokens(activation):
    generator = torch.Generator().manual_seed(0)

    def layers(rows, inputs):
        weight = torch.randn(4, rows, inputs, generator=generator) / inputs**0.5
        return ExpertLinear(weight, torch.randn(4, rows, generator=generator))

    params = {"up": layers(INNER, WIDTH), "down": layers(WIDTH, INNER)}
    if activation == "swiglu":
        params["gate"] = layers(INNER, WIDTH)
    x, shares = torch.randn(40, WIDTH, generator=generator), torch.rand(40, 2, generator=generator)
    recorder = InputRecorder()
    recorded = map_marked(recorder.recorded, params)
    results = [
        each["down"].sum_of(x, CHOSEN, shares, each.get("gate"), each["up"], activation=activation)
        for each in (params, recorded)
    ]
    assert torch.equal(*results)

    expected = {}
    for expert, gets in GETS.items():
        rows = x[list(gets)]
        product = {
            name: F.linear(rows, part.weight[expert], part.bias[expert])
            for name, part in params.items()
            if name != "down"
        }
        hidden = F.silu(product["gate"]) * product["up"] if "gate" in product else product["up"].relu() ** 2
        for name in params:
            inputs = hidden if name == "down" else rows
            if len(rows) >= inputs.shape[1]:
                expected[(pytree.MappingKey(name), pytree.SequenceKey(expert))] = inputs.T @ inputs
    assert {path[1].idx for path in expected} == {0, 1, 2}
    hessians = recorder.hessians()
    assert hessians.keys() == expected.keys()
    for path, hessian in expected.items():
        # The two are sums of at most 40 products, in orders of their own.
        torch.testing.assert_close(hessians[path], hessian, rtol=1e-5, atol=1e-4)


def test_only_experts_with_enough_tokens_are_calibrated():
    model, nearest, fed, starved = tiny_model("qwen3moe", moe_intermediate_size=20), [], [], []
    ids = torch.randint(0, 60, (8, 60), generator=torch.Generator().manual_seed(0))
    quantize(model, "int4", progress=nearest.append)
    quantize(model, "int4", progress=fed.append, calibrate=Calibration(ids=ids))
    quantize(model, "int4", progress=starved.append, calibrate=Calibration(ids=ids[:1, :8]))

    def of_experts(reports):
        return {r.name: r for r in reports if r.name.rpartition(".")[2].isdecimal()}

    before, after = of_experts(nearest), of_experts(fed)
    assert any(report.relative_output_error is not None for report in after.values())
    for name, report in after.items():
        few = report.relative_output_error is None
        assert (report.relative_rms_error == before[name].relative_rms_error) == few, name
    assert all(report.relative_output_error is None for report in of_experts(starved).values())
