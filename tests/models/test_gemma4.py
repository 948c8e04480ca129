"""The parts that only Gemma 4 has: its configs, its text part, shared keys, and refused values."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers_reference import CASES, OTHER_IDS, SMALL, TOLERANCE, build, save

import onward
from onward.errors import ConfigError, OnwardWarning
from onward.models import read_config
from onward.testing import random_checkpoint, tiny_config

IDS = [(7 * i * i + 3) % 101 for i in range(40)]
SHARED = {
    "num_hidden_layers": 5,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
}
MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}


def test_both_forms_of_full_layer_heads_are_read():
    fields = SHARED | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 24}
    old = tiny_config("gemma4", **fields)
    own = {"head_dim": 24, "num_key_value_heads": 1}
    new = {name: value for name, value in old.items() if not name.startswith(("global_", "num_global_"))}
    assert read_config(new | {"per_layer_config": {"00": own, "4": own}}) == read_config(old)
    assert read_config(old).layers[0].mixer.head_dim == 24
    assert read_config(old | {"attention_k_eq_v": False}).layers[0].mixer.num_kv_heads == 2


def test_the_last_layers_cache_no_keys():
    decoder = read_config(tiny_config("gemma4", **SHARED))
    assert [layer.mixer.kv_source_layer for layer in decoder.layers] == [None, None, None, 2, 0]
    assert len(decoder.cached) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_shared_layers": 4}, r"num_kv_shared_layers is 4 of 5 layers, .* 'sliding_attention', whose keys"),
        ({"num_kv_shared_layers": 5}, r"num_kv_shared_layers is 5 of 5 layers"),
        (
            {"layer_types": ["full_attention"] * 4 + ["sliding_attention"]},
            r"last layer .* has 'sliding_attention'",
        ),
        ({"layer_types": ["full_attention"] * 4}, r"layer_types must have 5 entries"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, r"per_layer_config .* full layers \[0, 4\] one head_dim"),
        ({"per_layer_config": {"0": {"rope": 8}, "4": {"rope": 8}}}, r"per_layer_config .* got"),
        ({"per_layer_config": {"0": {"head_dim": 8}, "4": {"head_dim": 6}}}, r"per_layer_config .* got"),
        ({"per_layer_config": {"0": {"head_dim": 7}, "4": {"head_dim": 7}}}, r"even head_dim.*; got 7 and 2"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, r"heads \(4\); got 24 and 3"),
        (
            {"vocab_size_per_layer_input": 100},
            r"vocab_size_per_layer_input \(100\) must be at least vocab_size \(258\)",
        ),
        (MOE | {"top_k_experts": 5}, r"top_k_experts.* from 1 to 4; got 5"),
        ({"enable_moe_block": True}, r"'num_experts' is missing"),
        ({"use_bidirectional_attention": "all"}, r"'use_bidirectional_attention' is 'all'"),
    ],
)
def test_invalid_fields_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        read_config(tiny_config("gemma4", **(SHARED | fields)))


@pytest.mark.parametrize("fields", [SHARED, MOE | {"hidden_size_per_layer_input": 0}], ids=["shared", "experts"])
@pytest.mark.parametrize("format", [None, "int8", "int4"])
def test_batched_row_equals_the_row_alone(fields, format, tmp_path):
    lm = onward.load(random_checkpoint(tmp_path, "gemma4", **fields), quantize=format)
    prompts = [IDS[:30], IDS[30:31], IDS[31:40]]
    together = [one.token_ids for one in lm.generate(prompts, max_new_tokens=40, temperature=0)]
    assert together == [lm.generate(p, max_new_tokens=40, temperature=0).token_ids for p in prompts]
    cached = lm.generate(prompts, max_new_tokens=40, temperature=0, cache=lm.new_cache(3))
    assert together == [one.token_ids for one in cached]
    whole = lm.logits(IDS)
    lm.prefill_chunk = 7
    assert torch.equal(lm.logits(IDS), whole)


@pytest.mark.parametrize("fields", [SHARED, MOE], ids=["shared", "experts"])
def test_programs_have_no_torch_operators(fields, tmp_path):
    lm = onward.load(random_checkpoint(tmp_path, "gemma4", **fields))
    assert lm.explain().backend == "native"
    assert "(torch)" not in str(lm.explain())


def test_stored_keys_of_sharing_layers_are_ignored(tmp_path):
    folder = random_checkpoint(tmp_path, "gemma4", **SHARED)
    before = onward.load(folder).logits(IDS)
    tensors = load_file(folder / "model.safetensors")
    other = {f"model.layers.4.self_attn.{part}.weight": torch.ones(3) for part in ("k_proj", "v_proj", "k_norm")}
    save_file(tensors | other, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(onward.load(folder).logits(IDS), before)


def test_the_text_part_of_a_multimodal_checkpoint_is_loaded(tmp_path, monkeypatch):
    case = CASES["gemma4 shared keys, embeddings for each layer"]
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    config = transformers.Gemma4Config(
        text_config=SMALL | OTHER_IDS["gemma4"] | case.fields,
        vision_config=vision | {"num_key_value_heads": 2, "position_embedding_size": 8},
        tie_word_embeddings=False,
    )
    whole, alone = transformers.Gemma4ForConditionalGeneration(config).eval(), build(case)
    whole.model.language_model.load_state_dict(alone.model.state_dict())
    whole.lm_head.load_state_dict(alone.lm_head.state_dict())
    folder = save(whole, tmp_path)
    assert "vision_config" in json.loads((folder / "config.json").read_text())
    monkeypatch.setattr("onward.errors._warned", set())
    with pytest.warns(OnwardWarning, match="the text part is loaded"):
        lm = onward.load(folder)
    with torch.no_grad():
        want = alone(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(lm.logits(IDS), want, rtol=0, atol=TOLERANCE)
