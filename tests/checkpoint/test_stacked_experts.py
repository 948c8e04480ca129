"""Experts in one tensor of a file: each expert's weights, in every layout, and errors for shapes that don't fit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import onward
from onward.checkpoint.convert import convert
from onward.checkpoint.stored_names import stacked_part
from onward.errors import CheckpointError, OnwardWarning
from onward.language_model import quantize_folder
from onward.models import ExpertLinear, marked_parts
from onward.ops import QuantizedExperts
from onward.testing import random_checkpoint

IDS = [(7 * i * i + 3) % 101 for i in range(40)]
PROMPTS = [IDS[:9], IDS[9:10], IDS[10:40]]


def stack(folder):
    """Rewrite a folder's experts as Qwen3.5 of the hub has them: gate above up, all of a layer in one tensor."""
    tensors = load_file(folder / "model.safetensors")
    stems = {name.split(".experts.")[0] + ".experts" for name in tensors if ".experts." in name}
    for stem in stems:
        count = sum(name.startswith(stem) for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors.pop(f"{stem}.{i}.{part}_proj.weight") for i in range(count)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{stem}.gate_up_proj": torch.cat((gate, up), 1), f"{stem}.down_proj": down}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def changed(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_stacked_rows_are_the_experts(dtype, quantize, tmp_path):
    apart = random_checkpoint(tmp_path / "apart", "qwen3_5moe", dtype=dtype)
    whole = stack(random_checkpoint(tmp_path / "whole", "qwen3_5moe", dtype=dtype))
    assert torch.equal(
        onward.load(whole, quantize=quantize).logits(IDS), onward.load(apart, quantize=quantize).logits(IDS)
    )


def test_a_quantized_folder_names_each_expert(tmp_path):
    whole = stack(random_checkpoint(tmp_path / "whole", "qwen3_5moe"))
    quantize_folder(whole, tmp_path / "small", "int8")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in load_file(tmp_path / "small" / "model.safetensors")
    small = onward.load(tmp_path / "small")
    assert torch.equal(small.logits(IDS), onward.load(whole, quantize="int8").logits(IDS))


GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(GATE_UP), r"'model.layers.1.mlp.experts.0.gate_proj.weight' of shape \[24, 32\] is missing"),
        (lambda t: t.update({GATE_UP: t[GATE_UP][:3]}), r"gate_up_proj' \[3, 48, 32\] must hold .*experts\.3\.gate"),
        (
            lambda t: t.update({GATE_UP: t[GATE_UP].repeat(2, 1, 1)}),
            r"does not describe.*experts\.gate_up_proj",
        ),
        (lambda t: t.update({GATE_UP: t[GATE_UP][:, :40]}), r"'.*gate_up_proj' \[4, 40, 32\] must hold .*\[24, 32\]"),
        (lambda t: t.update({GATE_UP: t[GATE_UP].long()}), r"int64"),
    ],
    ids=["missing", "too few", "too many", "too narrow", "whole numbers"],
)
def test_mismatched_shapes_are_named(change, message, tmp_path):
    folder = changed(stack(random_checkpoint(tmp_path, "qwen3_5moe")), change)
    with pytest.raises(CheckpointError, match=message):
        onward.load(folder)


def test_gpt_oss_floats_are_recognized_by_either_bias():
    for bias in ("gate_up_proj_bias", "down_proj_bias"):
        part = stacked_part("a.experts.3.down_proj.weight", {"a.experts.down_proj", f"a.experts.{bias}"})
        assert part is not None
        assert part.transposed


def test_a_bias_of_one_expert_is_no_stacked_part():
    assert stacked_part("a.experts.3.gate_proj.bias", {"a.experts.gate_up_proj_bias"}) is None
    assert stacked_part("a.experts.gate_proj.weight", {"a.experts.gate_up_proj"}) is None


# ── MXFP4, as gpt-oss has it on the hub ───────────────────────────────────────────────────────────────────────


def drawn(*shape, high=256, low=0):
    return torch.randint(low, high, shape, dtype=torch.uint8)


@pytest.fixture
def oss(tmp_path):
    """A gpt-oss with experts in MXFP4, and transformers' model of the weights that these stand for."""
    torch.manual_seed(5)
    config = GptOssConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=6, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        attn_implementation="eager",
    )  # fmt: skip
    theirs = GptOssForCausalLM(config).eval()
    for name, weight in theirs.named_parameters():
        noise = torch.randn_like(weight) * weight.shape[-1] ** -0.5
        weight.data = (noise + name.endswith("norm.weight")).bfloat16()  # not the buffers: angles are float32
    packed = {}
    for index, layer in enumerate(theirs.model.layers):
        experts = layer.mlp.experts
        for name, rows, inputs in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            blocks, scales = drawn(4, rows, inputs // 32, 16), drawn(4, rows, inputs // 32, low=122, high=125)
            getattr(experts, name).data = convert_moe_packed_tensors(blocks.clone(), scales.clone())
            stem = f"model.layers.{index}.mlp.experts.{name}"
            packed |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales}
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    floats = {
        name: t for name, t in tensors.items() if not name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }
    save_file(floats | packed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text())
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(text | {"quantization_config": method}))
    return tmp_path, theirs


def experts_of(lm):
    return [part for part in marked_parts(lm.model.params) if isinstance(part, ExpertLinear)]


def test_mxfp4_floats_equal_transformers(oss):
    folder, theirs = oss
    with pytest.warns(OnwardWarning, match="quantized by mxfp4 become floats"):
        lm = onward.load(folder, dtype="float32")
    with torch.no_grad():
        want = theirs.float()(torch.tensor([IDS])).logits[0]
    assert 0.3 < want.std() < 3
    torch.testing.assert_close(lm.logits(IDS), want, rtol=0, atol=1e-4)


def test_experts_stay_in_four_bits_without_loss(oss):
    folder, theirs = oss
    lm = onward.load(folder)
    experts = experts_of(lm)
    assert len(experts) == 6
    assert all(isinstance(part.weight, QuantizedExperts) and part.weight.format == "mxfp4" for part in experts)
    for layer, (gate, up, down) in zip(theirs.model.layers, (experts[:3], experts[3:]), strict=True):
        fused = layer.mlp.experts.gate_up_proj.data.transpose(1, 2)
        assert torch.equal(gate.weight.dequantize(), fused[:, ::2])
        assert torch.equal(up.weight.dequantize(), fused[:, 1::2])
        assert torch.equal(down.weight.dequantize(), layer.mlp.experts.down_proj.data.transpose(1, 2))


def test_a_row_in_four_bits_equals_the_row_alone(oss):
    lm = onward.load(oss[0])
    together = [one.token_ids for one in lm.generate(PROMPTS, max_new_tokens=20, temperature=0)]
    assert together == [lm.generate(p, max_new_tokens=20, temperature=0).token_ids for p in PROMPTS]
    assert together == [one.token_ids for one in lm.generate(PROMPTS, max_new_tokens=20, temperature=0, draft="lookup")]
    whole = lm.logits(IDS)
    lm.prefill_chunk = 7
    assert torch.equal(lm.logits(IDS), whole)


def test_a_quantized_gpt_oss_folder_has_its_experts_and_biases(oss, tmp_path_factory):
    folder, small = oss[0], tmp_path_factory.mktemp("small") / "int8"
    quantize_folder(folder, small, "int8")
    stored = load_file(small / "model.safetensors")
    assert stored["model.layers.1.mlp.experts.3.up_proj.weight"].dtype == torch.uint8
    assert stored["model.layers.1.mlp.experts.up_proj.bias"].shape == (4, 96)
    loaded = onward.load(small)
    assert {part.weight.format for part in experts_of(loaded)} == {"int8"}
    # int8 is the coarser: a row has one scale, a block of MXFP4 one for 32 inputs.
    want, got = onward.load(folder).logits(IDS), loaded.logits(IDS)
    assert (got - want).pow(2).mean() < 0.05 * want.pow(2).mean()


@pytest.mark.parametrize("format", ["int8", "int4", "iq4_nl"])
def test_quantize_leaves_four_bit_experts_alone(format, oss):
    lm, original = onward.load(oss[0], quantize=format), onward.load(oss[0])
    for part, same in zip(experts_of(lm), experts_of(original), strict=True):
        assert torch.equal(part.weight.data, same.weight.data)
    assert lm.model.params.layers[0].mixer.q_proj.weight.format == format
    assert lm.logits(IDS).isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(GATE_UP + "_scales"), r"'.*gate_up_proj_scales' is missing"),
        (lambda t: t[GATE_UP + "_scales"].fill_(255), r"gate_up_proj_blocks.* scales that are not finite"),
        (lambda t: t.update({GATE_UP + "_blocks": t[GATE_UP + "_blocks"][:, :, :1]}), r"MXFP4 of \[96, 64\] requires"),
        (lambda t: t.pop(GATE_UP + "_blocks"), r"'.*experts\.0\.gate_proj\.weight' of shape \[96, 64\] is missing"),
        (lambda t: t.pop(GATE_UP + "_bias"), r"'.*experts\.gate_proj\.bias' of shape \[4, 96\] is missing"),
    ],
    ids=["no scales", "no numbers", "too few inputs", "no blocks", "no biases"],
)
def test_mismatched_mxfp4_tensors_are_named(change, message, oss):
    with pytest.raises(CheckpointError, match=message):
        onward.load(changed(oss[0], change))


def test_transformers_reads_the_experts_of_a_converted_folder(tmp_path):
    """The same tensors as before, under the same names."""
    config = GptOssConfig(
        vocab_size=101, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=3, num_experts_per_tok=2, pad_token_id=None,
    )  # fmt: skip
    theirs = GptOssForCausalLM(config)
    for weight in theirs.parameters():
        weight.data.normal_()
    theirs.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "floats", "safetensors")
    source, floats = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "floats"))
    assert source.keys() == floats.keys()
    assert all(torch.equal(source[name], floats[name]) for name in source)
