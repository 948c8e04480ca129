"""Adapters that add tokens, and every field of adapter_config.json."""

import dataclasses
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft_adapters import ATTENTION, base
from safetensors.torch import load_file, save_file

import onward
from onward.checkpoint.peft import FIELDS
from onward.errors import CheckpointError, RequestError

TOLERANCE = 1e-4  # as in test_merging.py
IDS = [5, 101, 99, 103, 42]
NAME = "base_model.model.model.embed_tokens.weight"


@pytest.fixture(params=[False, True], ids=["own head", "tied"])
def grown(request, tmp_path):
    """A model of 101 tokens, an adapter that adds three, and the logits of both together."""
    model = base(tie_word_embeddings=request.param)
    model.save_pretrained(tmp_path / "model")
    model.resize_token_embeddings(104, mean_resizing=False)
    torch.manual_seed(3)
    table = model.get_input_embeddings().weight
    table.data[101:] = torch.randn(3, table.shape[1]) * table.shape[1] ** -0.5
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights=False)).eval()
    with torch.no_grad():
        expected = wrapped(torch.tensor([IDS])).logits[0]
    wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    return tmp_path / "model", tmp_path / "adapter", expected


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_merged_logits_equal_the_larger_model(grown, quantize):
    source, adapter, expected = grown
    lm = onward.load(source, merge=adapter, quantize=quantize)
    assert lm.model.vocab_size == 104
    assert len(lm.generate(IDS, max_new_tokens=3, temperature=0).token_ids) == 3
    if quantize is None:
        torch.testing.assert_close(lm.logits(IDS), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("saved", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids="+".join)
def test_fully_trained_embeddings_include_added_tokens(saved, tied, tmp_path):
    model = base(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "model")
    model.resize_token_embeddings(104, mean_resizing=False)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=ATTENTION, modules_to_save=saved)).eval()
    torch.manual_seed(4)
    for name, weight in wrapped.named_parameters():
        if "modules_to_save" in name:
            weight.data = torch.randn_like(weight) * weight.shape[1] ** -0.5
    with torch.no_grad():
        expected = wrapped(torch.tensor([IDS])).logits[0]
    wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    lm = onward.load(tmp_path / "model", merge=tmp_path / "adapter")
    torch.testing.assert_close(lm.logits(IDS), expected, rtol=0, atol=TOLERANCE)


def test_adapter_with_added_tokens_must_be_merged(grown):
    source, adapter, _ = grown
    with pytest.raises(CheckpointError, match=r"\[104, 32\], and the model's \[101, 32\]: added tokens.*merge="):
        onward.load(source, adapters={"it": adapter})
    with pytest.raises(RequestError, match="merged while the model is loaded"):
        onward.load(source).merge(adapter)


def test_both_embeddings_must_include_the_added_tokens(grown):
    source, adapter, _ = grown
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[NAME] = tensors[NAME][:101].clone()
    if "base_model.model.lm_head.weight" not in tensors:
        pytest.skip("the head is tied, and there is one table")
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"104 tokens, and its model\.embed_tokens\.weight has 101 rows"):
        onward.load(source, merge=adapter)


def test_every_peft_field_is_known():
    assert {
        field.name for field in dataclasses.fields(LoraConfig)
    } <= FIELDS.read | FIELDS.ignored | FIELDS.refused.keys()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("trainable_token_indices", [1, 2]),
        ("lora_bias", True),
        ("use_qalora", True),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("velora_config", {"rank": 1}),
        ("arrow_config", {"top_k": 3}),
    ],
)
def test_peft_fields_that_change_results_are_refused_by_name(grown, field, value):
    source, adapter, _ = grown
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(CheckpointError, match=f"{field} is .*merge the adapter with peft"):
        onward.load(source, merge=adapter)


def test_peft_fields_without_effect_are_accepted(grown):
    source, adapter, expected = grown
    path = adapter / "adapter_config.json"
    fields = {"fan_in_fan_out": True, "lora_dropout": 0.1, "layers_to_transform": [0, 1], "layers_pattern": "layers"}
    path.write_text(json.dumps(json.loads(path.read_text()) | fields | {"exclude_modules": ["gate_proj"]}))
    torch.testing.assert_close(onward.load(source, merge=adapter).logits(IDS), expected, rtol=0, atol=TOLERANCE)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sorcery": 3}))
    with pytest.warns(UserWarning, match=r"unknown fields, which are ignored: sorcery"):
        onward.load(source, merge=adapter)


def test_wrapped_module_names_are_found(grown):
    source, adapter, expected = grown
    file = adapter / "adapter_model.safetensors"
    prefix = "base_model.model."
    save_file({prefix + "_orig_mod." + name.removeprefix(prefix): t for name, t in load_file(file).items()}, file)
    torch.testing.assert_close(onward.load(source, merge=adapter).logits(IDS), expected, rtol=0, atol=TOLERANCE)
