"""Whole models: every matrix is quantized once, the rest is unchanged, and the text is hardly worse."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from quantized_cases import FORMATS
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import onward
from demo_adapters import demo_adapter
from onward.errors import RequestError
from onward.language_model import quantize
from onward.models import pack_params
from onward.ops import QuantizedWeight
from onward.quantization import quantize_params, quantize_weight, relative_rms_error
from onward.testing import ByteTokenizer, scripted_model, tiny_model
from tiny_checkpoint import FEW_EXPERTS

HELDOUT = Path(__file__).parents[2] / "training" / "heldout.txt"
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def is_quantized(leaf):
    return isinstance(leaf, QuantizedWeight)


def logits(model, ids=range(40)):
    return onward.LanguageModel(model).logits(list(ids))


def named_parts(layer) -> list[tuple[str, object]]:
    """The parts of a layer's mixer and feed-forward block, and its norms, by their own names."""
    blocks = layer.mixer, layer.feed_forward
    norms = [
        item
        for item in layer._asdict().items()
        if not item[0].startswith(("mixer", "feed_forward")) or item[0].endswith("norm")
    ]
    return [item for block in blocks for item in block._asdict().items()] + norms


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_every_matrix_is_quantized_and_nothing_else(family, format):
    model = tiny_model(family)
    small = quantize(model, format).params
    assert isinstance(small.embed_tokens.weight, QuantizedWeight)
    assert isinstance(small.lm_head.weight, QuantizedWeight)
    assert small.norm is model.params.norm
    for before, after in zip(model.params.layers, small.layers, strict=True):
        for (name, part), (_, new) in zip(named_parts(before), named_parts(after), strict=True):
            if name in MATRICES:
                assert isinstance(new.weight, QuantizedWeight)
                assert new.weight.shape == tuple(part.weight.shape)
                assert torch.equal(new.weight.data, quantize_weight(part.weight, format).data)
                assert new.bias is part.bias
            else:
                assert new is part


@pytest.mark.parametrize("format", FORMATS)
def test_a_tied_pair_is_one_weight_and_an_untied_pair_two(format):
    tied, untied = (quantize(tiny_model(tie_word_embeddings=tie), format) for tie in (True, False))
    assert tied.params.lm_head.weight is tied.params.embed_tokens.weight
    assert untied.params.lm_head.weight is not untied.params.embed_tokens.weight
    assert untied.nbytes - tied.nbytes == untied.params.lm_head.weight.nbytes


@pytest.mark.parametrize("family", ["qwen3", "qwen3moe"])
def test_iq4_nl_takes_the_bytes_of_int4(family):
    model = tiny_model(family, **FEW_EXPERTS.get(family, {}))
    assert quantize(model, "iq4_nl").nbytes == quantize(model, "int4").nbytes
    reports = {format: quantize_params(model.params, format)[1] for format in ("iq4_nl", "int4")}
    assert [report.bits for report in reports["iq4_nl"]] == [report.bits for report in reports["int4"]]


@pytest.mark.parametrize("tied", [True, False])
def test_quantizing_a_packed_model_equals_quantizing_the_stock_one(form, tied):
    """A tied pair stays one weight when it is packed, and when that is quantized."""
    model = tiny_model(tie_word_embeddings=tied)
    packed = dataclasses.replace(model, params=pack_params(model.params))
    assert isinstance(packed.params.lm_head.weight, torch.Tensor) == (form == "definition")
    from_stock, from_packed = quantize(model, "int4"), quantize(packed, "int4")
    assert from_packed.nbytes == from_stock.nbytes
    assert torch.equal(logits(from_packed), logits(from_stock))


@pytest.mark.parametrize("format", FORMATS)
def test_the_forward_equals_dequantized_weights_up_to_activation_rounding(form, format):
    """With weights that are exact in the format, all that is left is 8-bit activations.

    A product of K inputs gets noise of a step / sqrt(12), and a step is absmax / 127, in groups up to twice that, with
    absmax at most sqrt(K) of the inputs' RMS: 1.3 and 2.6 % for the 32 inputs that most matrices here have. The noises
    of the 9 products in a row (4 a layer, the head) are independent: 3 times that.
    """
    model = tiny_model()
    small = quantize(model, format)
    exact = dataclasses.replace(
        model,
        params=pytree.tree_map(
            lambda leaf: leaf.dequantize() if is_quantized(leaf) else leaf, small.params, is_leaf=is_quantized
        ),
    )
    got, expected = logits(small), logits(exact)
    assert (got - expected).norm() < (0.039 if format == "int8" else 0.078) * expected.norm()


@pytest.mark.parametrize("format", FORMATS)
def test_reports_name_every_matrix_once_in_order_with_its_error(format):
    model, seen, released = tiny_model(tie_word_embeddings=True), [], []
    params, reports = quantize_params(model.params, format, progress=seen.append, release=lambda: released.append(1))
    assert reports == seen
    assert len(released) == len(reports) == 1 + 2 * len(MATRICES)
    assert [report.name for report in reports[:2]] == ["embed_tokens.weight", "layers.0.mixer.q_proj.weight"]
    last, weight = reports[-1], model.params.layers[1].feed_forward.down_proj.weight
    assert (last.name, last.shape) == ("layers.1.feed_forward.down_proj.weight", tuple(weight.shape))
    # Sums of 32 squares in float32 on one side, in float64 on the other.
    error = relative_rms_error(weight, params.layers[1].feed_forward.down_proj.weight)
    assert last.relative_rms_error == pytest.approx(error, rel=17 * torch.finfo(torch.float32).eps)
    assert sum(report.nbytes for report in reports) < onward.Model(**vars(model) | {"params": params}).nbytes


def test_a_language_model_is_returned_and_the_original_is_unchanged():
    lm = onward.LanguageModel(tiny_model(), ByteTokenizer(), prefill_chunk=7)
    before = logits(lm.model)
    small = quantize(lm, "int8")
    assert isinstance(small, onward.LanguageModel)
    assert small.tokenizer is lm.tokenizer
    assert small.prefill_chunk == 7
    assert len(small.generate("abc", max_new_tokens=5, ignore_eos=True).token_ids) == 5
    assert torch.equal(logits(lm.model), before)
    assert not torch.equal(logits(small.model), before)


def test_a_rows_text_does_not_depend_on_the_others(form):
    if form == "definition":
        pytest.skip("the definition's sums are torch's, whose order depends on the shape")
    small = onward.LanguageModel(quantize(tiny_model(), "int4"), ByteTokenizer())
    options = {"max_new_tokens": 12, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    prompts = ["abc", "a longer prompt than that"]
    together = small.generate(prompts, **options)
    assert [c.text for c in together] == [small.generate(prompt, **options).text for prompt in prompts]


@pytest.mark.parametrize("format", [None, True, float("nan"), float("inf"), ["int8"]], ids=repr)
def test_invalid_formats_are_refused(format):
    with pytest.raises(RequestError, match="'int8', 'int4' or 'iq4_nl', or a number of bits per weight; got"):
        quantize(tiny_model(), format)


def test_arguments_of_another_kind_are_refused():
    with pytest.raises(RequestError, match=r"a model is an onward\.Model; got str: onward\.load reads a checkpoint"):
        quantize("demo", "int8")
    with pytest.raises(
        RequestError, match=r"calibrate must be an onward\.language_model\.Calibration or None; got True"
    ):
        quantize(tiny_model(), "int8", calibrate=True)


def test_unsupported_models_raise_a_clear_error():
    model = tiny_model()
    with pytest.raises(RequestError, match="must be 'int8', 'int4' or 'iq4_nl'; got 'int2'"):
        quantize(model, "int2")
    with pytest.raises(RequestError, match=r"embed_tokens\.weight is already int8"):
        quantize(quantize(model, "int8"), "int4")
    with pytest.raises(RequestError, match="Linear and Embedding; got a model whose params are"):
        quantize(scripted_model([1, 2]), "int8")
    model.params.layers[1].feed_forward.up_proj.weight[3, 4] = torch.nan
    with pytest.raises(
        RequestError, match=r"layers\.1\.feed_forward\.up_proj\.weight: a weight to quantize must be finite"
    ):
        quantize(model, "int8")


@pytest.mark.parametrize(("format", "most"), [("int8", 0.005), ("int4", 0.04), ("iq4_nl", 0.03)])
@pytest.mark.stride(3)
def test_the_demo_models_perplexity_hardly_rises(form, format, most):
    """On four held-out documents; benchmarks/quantization.py takes all of them."""
    lm = onward.load("demo")
    texts = HELDOUT.read_text(encoding="utf-8").split("<|endoftext|>\n")
    documents = [lm.encode(text)[: lm.model.max_seq_len] for text in texts[:4]]

    def loss(model):
        parts = [F.cross_entropy(model.logits(ids[:-1]), torch.tensor(ids[1:]), reduction="sum") for ids in documents]
        return sum(map(float, parts)) / sum(len(ids) - 1 for ids in documents)

    assert math.exp(loss(quantize(lm, format)) - loss(lm)) < 1 + most


def test_quantized_models_keep_their_adapters(tmp_path):
    options = {"max_new_tokens": 12, "temperature": 0}
    folder = demo_adapter(tmp_path / "poet", seed=1)
    lm = onward.load("demo", adapters={"poet": folder})
    small = quantize(lm, "int8")
    expected = onward.load("demo", quantize="int8", adapters={"poet": folder})
    texts = [each.generate("Once", adapter="poet", **options).text for each in (small, expected)]
    assert texts[0] == texts[1] != small.generate("Once", **options).text
