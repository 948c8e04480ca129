"""Families with Mamba2: bits, states, configs from the hub, and refused values."""

import pytest
import torch
from same_bits import assert_bits_depend_only_on_the_text

import onward
from onward import native
from onward.cache import LayerShape, StateShape
from onward.errors import ConfigError
from onward.language_model import quantize_folder
from onward.models import read_config
from onward.models.blocks import ParallelMixer
from onward.testing import random_checkpoint, tiny_config

IDS = [(13 * i) % 258 for i in range(70)]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "granitemoehybrid": EXPERTS | {"num_hidden_layers": 3},
    "bamba": {},
    "falconh1": {"mamba_rms_norm": True, "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 0.7]},
    "nemotronh": {"moe_latent_size": 24},
}


@pytest.mark.skipif(not native.available_isas(), reason="torch's products have no one order")
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", [None, "int8", "int4"])
def test_bits_depend_only_on_the_text(family, dtype, format, tmp_path):
    source = random_checkpoint(tmp_path / "source", family, dtype=dtype, **MODELS[family])
    lm = onward.load(source, quantize=format)
    assert_bits_depend_only_on_the_text(lm, IDS, new_tokens=40)
    if format is not None:
        quantize_folder(source, tmp_path / "small", format)
        assert torch.equal(onward.load(tmp_path / "small").logits(IDS), lm.logits(IDS))


def test_heads_of_a_group_share_cached_keys(tmp_path):
    lm = onward.load(random_checkpoint(tmp_path, "bamba"))
    inputs, state, numbers = lm.new_cache(1, max_len=64).states
    assert inputs.shape == (1, 2, 4 - 1 + 16, 64 + 2 * 2 * 12)
    assert state.shape == (1, 2, 2, 16 * 12 + 4 * (12 * 8 + 16 * (8 + 1)))
    assert numbers.shape == (1, 2)


def test_a_layer_may_cache_keys_and_a_state():
    decoder = read_config(tiny_config("falconh1"))
    assert isinstance(decoder.layers[0].mixer, ParallelMixer)
    assert [type(shape) for shape in decoder.cached] == [LayerShape] * 2
    assert [type(shape) for shape in decoder.states] == [StateShape] * 2
    assert list(decoder.places()) == [(0, 0), (1, 1)]
    assert len(decoder.schedules) == 1


def test_only_layers_with_a_mixer_have_places_in_the_cache():
    decoder = read_config(tiny_config("nemotronh", hybrid_override_pattern="M*-M*E", num_hidden_layers=6))
    assert [layer.mixer is None for layer in decoder.layers] == [False, False, True, False, False, True]
    assert [layer.feed_forward is None for layer in decoder.layers] == [True, True, False, True, True, False]
    assert (len(decoder.cached), len(decoder.states)) == (2, 2)
    assert [place for place, layer in zip(decoder.places(), decoder.layers, strict=True) if layer.mixer] == [0, 0, 1, 1]


def test_configs_on_the_hub_are_read():
    """Those of granite-4.0-h-tiny, granite-4.0-micro, Falcon-H1-0.5B and Nemotron-H-8B, without unread fields."""
    common = {"vocab_size": 1000, "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    granite = common | {
        "architectures": ["GraniteMoeHybridForCausalLM"], "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12, "hidden_act": "silu", "hidden_size": 1536, "init_method": "mup",
        "intermediate_size": 512, "layer_types": ["mamba", "mamba", "attention", "mamba"], "logits_scaling": 6,
        "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_proj_bias": False,
        "normalization_function": "rmsnorm", "num_experts_per_tok": 6, "num_hidden_layers": 4, "num_local_experts": 64,
        "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_theta": 10000,
        "shared_intermediate_size": 1024, "tie_word_embeddings": True,
    }  # fmt: skip
    decoder = read_config(granite)
    assert decoder.layers[2].mixer.rope is None
    assert decoder.layers[0].mixer.widths == (3072, 3072, 128, 128, 48)
    assert decoder.layers[0].feed_forward.num_chosen == 6
    attention = ["attention"] * 4
    dense = {"layer_types": attention, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 7}
    decoder = read_config(granite | dense | {"position_embedding_type": "rope"})
    assert decoder.states == ()
    assert decoder.layers[0].feed_forward.intermediate_size == 1024
    falcon = common | {
        "architectures": ["FalconH1ForCausalLM"], "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375,
        "attn_layer_indices": None, "embedding_multiplier": 5.656854249492381, "hidden_size": 768, "head_dim": 64,
        "intermediate_size": 2048, "key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625, "mamba_d_conv": 4,
        "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
        "mamba_n_heads": 24, "mamba_norm_before_gate": False, "mamba_rms_norm": False, "mamba_use_mlp": True,
        "mlp_expansion_factor": 8, "mlp_multipliers": [0.88, 0.58], "num_hidden_layers": 3, "num_logits_to_keep": 1,
        "projectors_bias": False, "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35], "ssm_out_multiplier": 0.23, "time_step_floor": 0.0001,
        "time_step_limit": [0.0, "Infinity"], "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": "auto",
    }  # fmt: skip
    mixer = read_config(falcon).layers[0].mixer
    assert mixer.attention.scale == 64**-0.5 * 0.390625
    assert mixer.recurrent.limits == (0.0, float("inf"))
    assert mixer.recurrent.norm is None
    nemotron = common | {
        "architectures": ["NemotronHForCausalLM"], "attention_head_dim": 128, "chunk_size": 128, "conv_kernel": 4,
        "expand": 2, "hidden_size": 4096, "hybrid_override_pattern": "M-M*-", "intermediate_size": 21504,
        "layer_norm_epsilon": 1e-5, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 128,
        "mamba_proj_bias": False, "mlp_bias": False, "mlp_hidden_act": "relu2", "n_groups": 8, "num_hidden_layers": 5,
        "num_logits_to_keep": 1, "rescale_prenorm_residual": True, "residual_in_fp32": False, "ssm_state_size": 128,
        "time_step_floor": 0.0001, "time_step_limit": [0.0, 1e9], "time_step_max": 0.1, "time_step_min": 0.001,
        "use_bias": False, "use_conv_bias": True, "use_mamba_kernels": True,
    }  # fmt: skip
    decoder = read_config(nemotron)
    assert decoder.layers[3].mixer.head_dim == 128
    assert decoder.layers[0].mixer.limits == (0.001, float("inf"))


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("bamba", {"attn_layer_indices": []}, "at least one layer of this family must be 'full_attention'"),
        ("bamba", {"attn_layer_indices": [2]}, r"attn_layer_indices must be a list of layers from 0 to 1; got \[2\]"),
        ("bamba", {"mamba_n_heads": 7}, r"mamba_n_heads \(7\) times mamba_d_head \(9\) is 63"),
        ("bamba", {"mamba_n_groups": 3}, r"the heads of Mamba2 \(8\) must be a multiple of its groups \(3\)"),
        ("bamba", {"mamba_d_state": 300}, "limited to 256 by 256 numbers per head"),
        ("bamba", {"time_step_limit": [0.5, 0.1]}, "time_step_limit must be two numbers from 0 on, in order"),
        ("bamba", {"time_step_limit": 3}, "time_step_limit must be two numbers; got 3"),
        ("bamba", {"time_step_limit": ["a", 1]}, "'time_step_limit' must hold numbers; got 'a'"),
        ("bamba", {"mamba_gate": 3}, "'mamba_gate' is 3, and Onward does not know"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 2}, "at least one layer of this family"),
        ("granitemoehybrid", {"layer_types": ["mamba", "conv"]}, "layer_types must have 2 entries"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not supported"),
        ("falconh1", {"mlp_multipliers": [1.0]}, "mlp_multipliers must be a list of 2 numbers"),
        ("falconh1", {"ssm_multipliers": [1, 1, 1, 1, "x"]}, "'ssm_multipliers' must be a number"),
        ("falconh1", {"mamba_use_mlp": False}, "mamba_use_mlp False is not supported"),
        ("nemotronh", {"hybrid_override_pattern": "MX*-"}, "a letter of M, \\*, -, E for each layer"),
        ("nemotronh", {"hybrid_override_pattern": "M*"}, "must have 4 entries"),
        ("nemotronh", {"hybrid_override_pattern": "MMMM"}, "at least one layer of this family"),
        ("nemotronh", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported"),
        ("nemotronh", {"n_group": 3}, r"n_group \(3\) must divide 4 experts"),
    ],
)
def test_invalid_fields_are_named(family, fields, message):
    with pytest.raises(ConfigError, match=message):
        read_config(tiny_config(family, **fields))
