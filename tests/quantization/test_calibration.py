"""Calibration on the model's own texts: every family, the same size, deterministic, and a smaller error."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import onward
from onward.errors import RequestError
from onward.language_model import Calibration, GenerateOptions, calibration_ids, quantize
from onward.models import FAMILIES as ARCHITECTURES
from onward.quantization import watch
from onward.quantization.watch import LayerwiseRunner
from onward.testing import scripted_model, tiny_model
from tiny_checkpoint import FEW_EXPERTS

HELDOUT = Path(__file__).parents[2] / "training" / "heldout.txt"
FAMILIES = [name.removesuffix("ForCausalLM").lower() for name in ARCHITECTURES if name.endswith("ForCausalLM")]
IDS = torch.randint(0, 60, (3, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_layer_by_layer_like_its_forward(family, monkeypatch):
    """Three texts, two at a time: each layer's state is reused between batches."""
    monkeypatch.setattr(watch, "MAX_TOKENS", 40)
    model = tiny_model(family, **FEW_EXPERTS.get(family, {}))
    params, ids = model.params, IDS.to(torch.int32)
    with torch.no_grad():
        texts = LayerwiseRunner(model, ids, params)
        texts.advance_from(0, params.layers)
        logprobs = torch.stack(list(texts.logprobs(params)))
        expected = [onward.LanguageModel(model).logits(row) for row in IDS.tolist()]
    # The order of torch's sums depends on the number of rows.
    torch.testing.assert_close(logprobs, F.log_softmax(torch.stack(expected), -1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.stride(3)
def test_the_same_matrices_in_the_same_bytes(family):
    model, nearest, fed = tiny_model(family, **FEW_EXPERTS.get(family, {})), [], []
    before = quantize(model, "int4", progress=nearest.append)
    after = quantize(model, "int4", progress=fed.append, calibrate=Calibration(ids=IDS))
    assert sorted((r.name, r.nbytes) for r in fed) == sorted((r.name, r.nbytes) for r in nearest)
    assert after.nbytes == before.nbytes
    rounded = {report.name for report in fed if report.relative_output_error is None}
    # An expert's matrices have its number behind their name.
    of_tables = {
        name for name in rounded if name.removeprefix("layer_embeddings.").startswith(("embed_tokens", "projection"))
    }
    assert all(name.rpartition(".")[2].isdecimal() for name in rounded - of_tables)


@pytest.mark.parametrize("format", ["int4", "iq4_nl"])
def test_a_seed_determines_the_bits(format):
    lm = onward.LanguageModel(tiny_model(), defaults=GenerateOptions(eos=2, temperature=0.3, repetition_penalty=2.0))
    calibration = Calibration(texts=4, length=30, seed=1)
    first, second = (quantize(lm, format, calibrate=calibration) for _ in range(2))
    other = quantize(lm, format, calibrate=replace(calibration, seed=7))
    data = [small.model.params.layers[1].feed_forward.down_proj.weight.data for small in (first, second, other)]
    assert torch.equal(data[0], data[1])
    assert not torch.equal(data[0], data[2])


def test_texts_start_with_a_bos_and_ignore_the_defaults():
    model, calibration = tiny_model(), Calibration(texts=3, length=20)
    plain = onward.LanguageModel(model, defaults=GenerateOptions(eos=2))
    odd = onward.LanguageModel(model, defaults=GenerateOptions(eos=2, temperature=0.1, top_k=1, n=3))
    ids = calibration_ids(plain, calibration)
    assert (ids.shape, ids.dtype) == ((3, 20), torch.int32)
    assert ids[:, 0].tolist() == [2, 2, 2]
    assert len({tuple(row) for row in ids.tolist()}) == 3
    assert torch.equal(calibration_ids(odd, calibration), ids)
    assert calibration_ids(plain, Calibration(texts=1, length=10**6)).shape[1] == model.max_seq_len


def test_heads_get_error_feedback_and_separate_embeddings_do_not():
    for tied in (True, False):
        reports = []
        model = tiny_model(tie_word_embeddings=tied)
        quantize(model, "int4", progress=reports.append, calibrate=Calibration(ids=IDS))
        fed = {report.name: report.relative_output_error is not None for report in reports}
        assert fed.get("embed_tokens.weight") == tied
        assert fed.get("lm_head.weight") == (None if tied else True)


def test_unsupported_calibrations_raise_a_clear_error():
    with pytest.raises(RequestError, match="neither a BOS nor an EOS id"):
        quantize(tiny_model(), "int4", calibrate=Calibration())
    with pytest.raises(RequestError, match=r"int32 or int64 \[count, length\]; got torch.float32 \[4\]"):
        Calibration(ids=torch.ones(4))
    with pytest.raises(RequestError, match=r"int32 or int64 \[count, length\]; got torch.int64 \[0, 9\]"):
        Calibration(ids=torch.ones(0, 9, dtype=torch.int64))
    for wrong in (-1, 258, 2**33):
        with pytest.raises(RequestError, match=r"the ids to calibrate with must be in 0 … 257; got 5 …|; got -1 … 5"):
            quantize(tiny_model(), "int4", calibrate=Calibration(ids=torch.tensor([[5, wrong]])))
    with pytest.raises(RequestError, match="texts"):
        Calibration(texts=0)
    with pytest.raises(RequestError, match="Linear and Embedding"):
        quantize(scripted_model([1, 2]), "int4", calibrate=Calibration(ids=IDS))


@pytest.mark.parametrize("format", ["int4", "iq4_nl"])
@pytest.mark.stride(2)
def test_the_demo_model_loses_less_than_with_rounding_to_nearest(format):
    """KL divergence on four held-out documents; benchmarks/calibration.py takes all of them."""
    lm = onward.load("demo")
    texts = HELDOUT.read_text(encoding="utf-8").split("<|endoftext|>\n")
    documents = [lm.encode(text)[: lm.model.max_seq_len] for text in texts[:4]]
    exact = [F.log_softmax(lm.logits(ids), -1) for ids in documents]

    def divergence(small):
        return sum(
            float(F.kl_div(F.log_softmax(small.logits(ids), -1), before, reduction="sum", log_target=True))
            for ids, before in zip(documents, exact, strict=True)
        )

    fed = quantize(lm, format, calibrate=Calibration(texts=24))
    assert divergence(fed) < 0.8 * divergence(quantize(lm, format))
