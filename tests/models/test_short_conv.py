"""LFM2: convolutions whose state is their last inputs; configs from the hub, and refused values."""

import pytest
import torch
from same_bits import assert_bits_depend_only_on_the_text

import onward
from onward import native
from onward.errors import ConfigError
from onward.language_model import quantize_folder
from onward.models import read_config
from onward.testing import random_checkpoint, tiny_config

IDS = [(13 * i) % 258 for i in range(70)]


@pytest.mark.skipif(not native.available_isas(), reason="torch's products have no one order")
@pytest.mark.parametrize("family", ["lfm2", "lfm2moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", [None, "int8", "int4"])
def test_bits_depend_only_on_the_text(family, dtype, format, tmp_path):
    source = random_checkpoint(tmp_path / "source", family, dtype=dtype, num_hidden_layers=3)
    lm = onward.load(source, quantize=format)
    assert_bits_depend_only_on_the_text(lm, IDS, new_tokens=40)
    if format is not None:
        quantize_folder(source, tmp_path / "small", format)
        assert torch.equal(onward.load(tmp_path / "small").logits(IDS), lm.logits(IDS))


def test_a_state_is_the_last_inputs(tmp_path):
    lm = onward.load(random_checkpoint(tmp_path, "lfm2"))
    inputs, state, numbers = lm.new_cache(1, max_len=64).states
    assert inputs.shape == (1, 2, 3 - 1 + 16, 32)
    assert state.numel() == 0
    assert numbers.shape == (1, 2)


def test_the_config_on_the_hub_is_read():
    """The config of LFM2-1.2B, in which sizes have several names."""
    hub = {
        "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048,
        "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5,
        "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "conv_L_cache": 3,
        "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "max_position_embeddings": 128000,
        "model_type": "lfm2", "norm_eps": 1e-5, "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "rope_theta": 1e6, "use_pos_enc": True, "vocab_size": 65536,
    }  # fmt: skip
    decoder = read_config(hub)
    assert decoder.layers[0].feed_forward.intermediate_size == 8192
    assert decoder.tie_word_embeddings
    assert (len(decoder.cached), len(decoder.states)) == (6, 10)
    for name, value in {"conv_dim": 1024, "num_heads": 16, "block_use_swiglu": False, "use_pos_enc": False}.items():
        with pytest.raises(ConfigError, match=f"{name} {value} is not supported"):
            read_config(hub | {name: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["conv", "conv"]}, "at least one layer of this family must be 'full_attention'"),
        ({"layer_types": ["conv", "sliding_attention"]}, "layer_types must have 2 entries"),
        ({"full_attn_idxs": [2]}, r"full_attn_idxs must be a list of layers from 0 to 1; got \[2\]"),
        ({"full_attn_idxs": [0]}, "layer_types and full_attn_idxs .* differ"),
        ({"conv_L_cache": 0}, "'conv_L_cache' must be a whole number from 1"),
        ({"block_multiple_of": "8"}, "'block_multiple_of' must be a whole number"),
    ],
)
def test_invalid_fields_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        read_config(tiny_config("lfm2", **fields))
