"""Models with experts: quantized except for routers, read and written expert by expert, with clear errors."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import onward
from onward import ops
from onward.errors import CheckpointError, ConfigError
from onward.language_model import quantize_folder
from onward.models import ExpertLinear, Router, marked_parts, read_config
from onward.testing import random_checkpoint, tiny_config

SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True}
PROMPTS = [[5, 6, 7, 8, 9], [11], [3, 1]]


def checkpoint(folder, **overrides):
    return random_checkpoint(folder, "qwen3moe", **(SIZES | overrides))


def texts(lm, **options):
    return [one.token_ids for one in lm.generate(PROMPTS, max_new_tokens=12, temperature=0, **options)]


@pytest.mark.parametrize("format", [None, "int8", "int4", "iq4_nl"])
def test_batched_row_equals_the_row_alone(format, tmp_path):
    lm = onward.load(checkpoint(tmp_path), quantize=format)
    together = texts(lm)
    assert together == [lm.generate(p, max_new_tokens=12, temperature=0).token_ids for p in PROMPTS]
    assert texts(lm, draft="lookup") == together
    whole = lm.logits(list(range(40)))
    for chunk in (1, 7):
        lm.prefill_chunk = chunk
        assert torch.equal(lm.logits(list(range(40))), whole)


@pytest.mark.parametrize("format", ["int8", "int4", "iq4_nl"])
def test_experts_are_quantized_and_routers_are_not(format, tmp_path):
    lm = onward.load(checkpoint(tmp_path), quantize=format)
    parts = marked_parts(lm.model.params)
    experts = [part for part in parts if isinstance(part, ExpertLinear)]
    routers = [part for part in parts if isinstance(part, Router)]
    assert len(experts) == 6
    assert len(routers) == 2
    assert all(isinstance(part.weight, ops.QuantizedExperts) and part.weight.format == format for part in experts)
    assert all(part.weight.dtype == torch.float32 for part in routers)
    assert not any(isinstance(part.weight, ops.QuantizedWeight) for part in routers)


@pytest.mark.parametrize("format", ["int8", "int4", "iq4_nl"])
def test_a_quantized_folder_has_each_expert_and_equals_the_model(format, tmp_path):
    source = checkpoint(tmp_path / "source")
    reports = quantize_folder(source, tmp_path / "small", format)
    stored = load_file(tmp_path / "small" / "model.safetensors")
    assert stored["model.layers.1.mlp.experts.3.up_proj.weight"].dtype == torch.uint8
    assert stored["model.layers.1.mlp.gate.weight"].dtype == torch.float32
    assert sum("experts" in name or "gate_proj" in name for name in (report.name for report in reports)) == 8
    loaded = onward.load(tmp_path / "small")
    assert torch.equal(loaded.logits([1, 2, 3]), onward.load(source, quantize=format).logits([1, 2, 3]))


@pytest.mark.parametrize("family", ["qwen3moe", "qwen3_5moe", "gptoss"])
def test_programs_have_no_torch_operators(family, tmp_path):
    lm = onward.load(random_checkpoint(tmp_path, family, **(SIZES if family == "qwen3moe" else {})))
    assert lm.explain().backend == "native"
    assert "(torch)" not in str(lm.explain())


def test_two_names_of_one_number_must_agree():
    with pytest.raises(ConfigError, match="experts_per_token is 3 and num_experts_per_tok 2: keep one"):
        read_config(tiny_config("gptoss", experts_per_token=3))


def test_the_gpt_oss_config_on_the_hub_is_read():
    """OpenAI's own fields, and RoPE as files before transformers 5 have it."""
    rope = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    config = tiny_config(
        "gptoss", experts_per_token=2, initial_context_length=4096, attention_bias=True, swiglu_limit=7.0,
        rope_parameters=None, rope_theta=150000, rope_scaling=rope | {"original_max_position_embeddings": 4096},
    )  # fmt: skip
    decoder = read_config(config)
    assert [layer.mixer.window for layer in decoder.layers] == [24, None]
    bare = {name: value for name, value in config.items() if name not in ("rope_scaling", "rope_theta")}
    assert read_config(bare) == decoder


def test_a_session_continues_with_the_same_tokens(tmp_path):
    lm = onward.load(checkpoint(tmp_path))
    whole = lm.generate(PROMPTS[0], max_new_tokens=12, temperature=0).token_ids
    session = onward.Session(lm)
    first = session.generate(PROMPTS[0], max_new_tokens=5, temperature=0).token_ids
    rest = session.generate(PROMPTS[0] + first, max_new_tokens=7, temperature=0).token_ids
    assert first + rest == whole


def damaged(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_missing_expert_is_named(tmp_path):
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    folder = damaged(checkpoint(tmp_path), lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"'{name}' of shape .* is missing"):
        onward.load(folder)


def test_a_router_of_another_width_is_named(tmp_path):
    name = "model.layers.0.mlp.gate.weight"
    folder = damaged(checkpoint(tmp_path), lambda tensors: tensors.update({name: torch.zeros(5, 32)}))
    with pytest.raises(CheckpointError, match=rf"'{name}' has shape \[5, 32\], but config.json expects \[4, 32\]"):
        onward.load(folder)


def test_a_surplus_expert_is_named(tmp_path):
    name = "model.layers.0.mlp.experts.4.gate_proj.weight"
    folder = damaged(checkpoint(tmp_path), lambda tensors: tensors.update({name: torch.zeros(40, 32)}))
    with pytest.raises(CheckpointError, match=r"experts\.4\.gate_proj"):
        onward.load(folder)


@pytest.mark.parametrize(
    ("field", "value"), [("n_group", 3), ("n_group", 4), ("topk_group", 3), ("num_experts_per_tok", 3)]
)
def test_invalid_groups_are_named(field, value):
    fields = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    read_config(tiny_config("glm4moe", **fields))
    with pytest.raises(ConfigError, match=field):
        read_config(tiny_config("glm4moe", **(fields | {field: value})))


def test_glms_router_bias_stays_float32_in_a_bfloat16_model(tmp_path):
    folder = random_checkpoint(
        tmp_path, "glm4moe", dtype=torch.bfloat16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=20
    )
    stored = load_file(folder / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert stored.dtype == torch.float32
    lm = onward.load(folder)
    params = lm.model.params.layers[1].feed_forward
    assert torch.equal(params.choice_bias, stored)
    assert params.router.weight.dtype == torch.float32
    assert params.gate_proj.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_experts_per_tok", 5), ("num_experts", 0), ("decoder_sparse_step", -1), ("mlp_only_layers", "0")],
)
def test_invalid_fields_are_named(field, value):
    with pytest.raises(ConfigError, match=field):
        read_config(tiny_config("qwen3moe", **(SIZES | {field: value})))


def test_duplicate_expert_counts_must_agree():
    twice = tiny_config("qwen3moe", **SIZES, num_local_experts=SIZES["num_experts"])
    assert read_config(twice) == read_config(tiny_config("qwen3moe", **SIZES))
    with pytest.raises(ConfigError, match="num_experts is 4 and num_local_experts 5: keep one"):
        read_config(twice | {"num_local_experts": 5})
