"""The same checkpoint with a config.json of different versions of the library."""

import json
from dataclasses import replace

import pytest
import torch
from transformers_reference import CASES, CONFIGS, DYNAMIC, LINEAR, LLAMA3, TOLERANCE, YARN, Case, build, save

import onward
from onward.models import read_config
from onward.testing import tiny_config, tiny_model

IDS = list(range(40))


def windows(config) -> tuple[int | None, ...]:
    return tuple(layer.mixer.window for layer in config.layers)


def rewritten(folder, **fields):
    """The folder with config.json changed; a field of None is removed."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize("kind_key", ["rope_type", "type"])
@pytest.mark.parametrize("rope", [LINEAR, LLAMA3, DYNAMIC, YARN], ids=lambda rope: rope["rope_type"])
def test_rope_theta_and_rope_scaling_equal_rope_parameters(rope, kind_key, tmp_path):
    folder = save(build(Case("llama", {"rope_parameters": rope, "max_position_embeddings": 32})), tmp_path)
    new = onward.load(folder, max_seq_len=32).logits(IDS[:32])
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "rope_type")}
    scaling[kind_key] = rope["rope_type"]
    old_style = rewritten(folder, rope_parameters=None, rope_theta=rope["rope_theta"], rope_scaling=scaling)
    assert torch.equal(onward.load(old_style).logits(IDS[:32]), new)


def test_rope_theta_alone_is_the_base_of_the_default_schedule(tmp_path):
    folder = save(build(CASES["qwen2"]), tmp_path)
    new = onward.load(folder).logits(IDS)
    old_style = rewritten(folder, rope_parameters=None, rope_theta=1e6, rope_scaling=None)
    assert torch.equal(onward.load(old_style).logits(IDS), new)


def test_layer_types_equal_max_window_layers(tmp_path):
    folder = save(build(CASES["qwen3 window from layer 1"]), tmp_path)
    by_layer = onward.load(folder).logits(IDS)
    old_style = rewritten(folder, layer_types=None)
    assert torch.equal(onward.load(old_style).logits(IDS), by_layer)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_disabled_window_is_none(family):
    config = tiny_config(family, use_sliding_window=False, sliding_window=3, max_window_layers=0)
    assert windows(read_config(config)) == (None, None)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_the_default_window_is_that_of_transformers(family):
    config = tiny_config(family, use_sliding_window=True, max_window_layers=0)
    del config["sliding_window"]
    theirs = CONFIGS[family](use_sliding_window=True).sliding_window
    assert windows(read_config(config)) == (theirs, theirs)
    assert windows(read_config(config | {"sliding_window": None})) == (None, None)


def test_an_old_qwen3_config_without_head_dim_means_128():
    config = tiny_config("qwen3")
    del config["head_dim"]
    assert read_config(config).layers[0].mixer.head_dim == 128


@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral"])
def test_a_config_without_head_dim_means_hidden_size_over_heads(family):
    config = tiny_config(family)
    del config["head_dim"]
    assert read_config(config).layers[0].mixer.head_dim == 8


def test_dynamic_angles_do_not_depend_on_the_chunks():
    rope = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}
    model = replace(tiny_model("llama", rope_parameters=rope, max_position_embeddings=8), max_seq_len=64)
    lm = onward.LanguageModel(model)
    whole = lm.logits(IDS)
    for chunk in (1, 5, 8, 9):
        lm.prefill_chunk = chunk
        torch.testing.assert_close(lm.logits(IDS), whole, rtol=0, atol=TOLERANCE)


def test_dynamic_rope_within_the_original_length_is_the_default_schedule(tmp_path):
    plain = build(CASES["llama, every head its own"])
    with torch.no_grad():
        expected = plain(torch.tensor([IDS[:31]]), use_cache=False).logits[0]
    dynamic = rewritten(save(plain, tmp_path), rope_parameters=DYNAMIC, max_position_embeddings=32)
    torch.testing.assert_close(onward.load(dynamic).logits(IDS[:31]), expected, rtol=0, atol=TOLERANCE)
