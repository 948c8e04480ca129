"""Families with latent attention: one cached latent per token, and configs read, quantized and refused correctly."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from same_bits import assert_bits_depend_only_on_the_text

import onward
from onward import native, ops
from onward.checkpoint import CheckpointFolder, read_weights
from onward.errors import CheckpointError, ConfigError
from onward.language_model import quantize_folder
from onward.models import LatentLinear, marked_parts, read_config
from onward.testing import random_checkpoint, tiny_config

FAMILIES = ["deepseekv2", "deepseekv3", "glm4moelite", "mistral4"]
IDS = [(13 * i) % 258 for i in range(70)]
KV_B = "model.layers.0.self_attn.kv_b_proj.weight"


def stored(folder):
    return load_file(folder / "model.safetensors")


def changed(folder, tensors, **fields):
    """The folder with other tensors and fields of its config."""
    save_file(stored(folder) | tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_position_caches_one_latent_and_one_rotated_key(family, tmp_path):
    lm = onward.load(random_checkpoint(tmp_path, family))
    shape = lm.new_cache(1).keys[0].shape
    assert (shape[1], shape[3]) == (1, 16 + 8)
    assert lm.new_cache(1, max_len=64).nbytes == 2 * 64 * (16 + 8) * 4
    assert lm.model.new_blocks(1).block_nbytes == 2 * 64 * (16 + 8) * 4


@pytest.mark.skipif(not native.available_isas(), reason="torch's products have no one order")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", [None, "int8", "int4"])
def test_bits_depend_only_on_the_text(family, dtype, format, tmp_path):
    lm = onward.load(random_checkpoint(tmp_path, family, dtype=dtype), quantize=format)
    assert_bits_depend_only_on_the_text(lm, IDS, new_tokens=12)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_the_latent_projection_stays_in_floats(format, tmp_path):
    source = random_checkpoint(tmp_path / "source", "deepseekv3")
    lm = onward.load(source, quantize=format)
    parts = marked_parts(lm.model.params)
    assert sum(isinstance(part, LatentLinear) for part in parts) == 2
    assert isinstance(lm.model.params.layers[0].mixer.q_proj.weight, ops.QuantizedWeight)
    quantize_folder(source, tmp_path / "small", format)
    assert torch.equal(stored(tmp_path / "small")[KV_B], stored(source)[KV_B])
    assert torch.equal(onward.load(tmp_path / "small").logits(IDS), lm.logits(IDS))
    assert torch.equal(onward.quantize(onward.load(source), format).logits(IDS), lm.logits(IDS))


def test_a_packed_latent_projection_has_the_stored_values(tmp_path):
    folder = random_checkpoint(tmp_path, "deepseekv3")
    config = read_config(CheckpointFolder(folder).config)
    params = read_weights(folder, config, dtype=None, device=torch.device("cpu"))
    part = params.layers[0].mixer.kv_b_proj
    packed = part.packed()
    assert torch.equal(packed.stock, stored(folder)[KV_B])
    assert packed.packed() is packed


def test_an_adapter_of_the_latent_projection_is_merged(tmp_path):
    folder = random_checkpoint(tmp_path / "model", "deepseekv3")
    generator = torch.Generator().manual_seed(1)
    rows, rank = stored(folder)[KV_B].shape
    a, b = torch.randn(3, rank, generator=generator), torch.randn(rows, 3, generator=generator)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    module = f"base_model.model.{KV_B.removesuffix('.weight')}"
    save_file({f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 3, "target_modules": ["kv_b_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    plain, merged = onward.load(folder), onward.load(folder, merge=adapter)
    onto = changed(folder, {KV_B: stored(folder)[KV_B] + b @ a})
    assert torch.equal(merged.logits(IDS), onward.load(onto).logits(IDS))
    assert not torch.equal(merged.logits(IDS), plain.logits(IDS))


@pytest.mark.parametrize("family", ["deepseekv3", "glm4moelite", "glm4moe"])
def test_mtp_layers_are_not_read(family, tmp_path):
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    folder = random_checkpoint(tmp_path, family, **experts)
    before = onward.load(folder).logits(IDS)
    ahead = {"model.layers.2.eh_proj.weight": torch.zeros(3, 3), "model.layers.2.enorm.weight": torch.zeros(3)}
    changed(folder, ahead, num_nextn_predict_layers=1)
    assert torch.equal(onward.load(folder).logits(IDS), before)
    changed(folder, {}, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.e"):
        onward.load(folder)


def test_stacked_experts_equal_separate_ones(tmp_path):
    folder = random_checkpoint(tmp_path, "mistral4")
    before, tensors = onward.load(folder).logits(IDS), stored(folder)
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.mlp.experts"
        each = [[tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for e in range(4)] for part in ("gate", "up", "down")]
        tensors[f"{prefix}.gate_up_proj"] = torch.cat([torch.stack(each[0]), torch.stack(each[1])], 1)
        tensors[f"{prefix}.down_proj"] = torch.stack(each[2])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(onward.load(folder).logits(IDS), before)
    quantize_folder(folder, tmp_path / "small", "int8")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in stored(tmp_path / "small")


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("deepseekv3", {"num_key_value_heads": 2}, r"num_key_value_heads \(2\) must equal num_attention_heads \(4\)"),
        ("deepseekv3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        (
            "deepseekv3",
            {"qk_head_dim": 21},
            "qk_head_dim is 21, but .* 12 and qk_rope_head_dim 8 make 20",
        ),
        ("deepseekv3", {"partial_rotary_factor": 0.5}, "rotates 10 features of a head, but qk_rope_head_dim is 8"),
        ("deepseekv3", {"kv_lora_rank": 0}, "'kv_lora_rank' must be a whole number from 1"),
        ("deepseekv3", {"q_lora_rank": 0}, "'q_lora_rank' must be a whole number from 1"),
        (
            "deepseekv3",
            {"scoring_func": "softmax"},
            "scoring_func 'softmax' .* family has 'sigmoid'",
        ),
        ("deepseekv3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("deepseekv3", {"n_group": 3}, r"n_group \(3\) must divide 4 experts"),
        ("deepseekv3", {"index_topk": 64}, "'index_topk' is 64, and Onward does not know"),
        ("deepseekv2", {"topk_method": "noaux_tc"}, "this family has 'greedy' or 'group_limited_greedy'"),
        ("deepseekv2", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("glm4moelite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must have 2 entries"),
        (
            "glm4moelite",
            {"mlp_layer_types": ["sparse", "sparse"], "first_k_dense_replace": 1},
            "contradicts first_k_dense_replace 1",
        ),
        ("mistral4", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}}, "no field 'mscale'"),
    ],
)
def test_invalid_fields_are_named(family, fields, message):
    read_config(tiny_config(family))
    with pytest.raises(ConfigError, match=message):
        read_config(tiny_config(family, **fields))


def test_mscale_all_dim_of_yarn_scales_the_scores():
    rope = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0}
    plain = read_config(tiny_config("deepseekv3", rope_scaling=rope)).layers[0].mixer.scale
    sharp = read_config(tiny_config("deepseekv3", rope_scaling=rope | {"mscale_all_dim": 1.0})).layers[0].mixer.scale
    assert plain == 20**-0.5
    assert sharp == pytest.approx(plain * (0.1 * 3.6888794541139363 + 1) ** 2)  # ln 40


def test_a_mistral4_config_without_rope_has_transformers_defaults():
    config = {name: value for name, value in tiny_config("mistral4").items() if not name.startswith("rope")}
    mixer = read_config(config).layers[0].mixer
    assert (mixer.rope.scaling.kind, mixer.rope.scaling.factor, mixer.query_growth.beta) == ("yarn", 128.0, 0.1)
