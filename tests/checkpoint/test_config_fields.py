"""Fields of config.json with a wrong type or out of range: never a guess, never another library's error."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_config_json import JSON, LLAMA3, QWEN, SLIDING, config

from onward.errors import ConfigError, UnsupportedArchitectureError
from onward.models import FAMILIES, read_config
from tiny_checkpoint import CONFIG, refused

HUGE = 10**30


@pytest.mark.parametrize("value", [[{}], [5], [None], [["LlamaForCausalLM"]]], ids=repr)
def test_an_architecture_is_a_name(value):
    with refused(UnsupportedArchitectureError, repr(value[0]), "SmolLM3"):
        read_config(config(architectures=value))


@pytest.mark.parametrize("name", ["tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"])
@pytest.mark.parametrize("value", ["false", 0, 1, [], {}], ids=repr)
def test_a_flag_is_true_or_false(name, value):
    family = QWEN if name == "use_sliding_window" else {}
    with refused(ConfigError, repr(name), "true or false", repr(value)):
        read_config(config(**family | {name: value}))


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta", "partial_rotary_factor"])
@pytest.mark.parametrize("value", [0, -1, True, "1e-6", [], {}, float("inf"), float("nan"), 10**400], ids=str)
def test_a_number_is_positive_and_finite(name, value):
    with refused(ConfigError, repr(name), "positive number"):
        read_config(config(**{name: value}))


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", [1e308, 1e39, 1e-39, 5e-324, 10**100], ids=str)
def test_a_number_fits_float32(name, value):
    with refused(ConfigError, repr(name), "positive number", "float32"):
        read_config(config(**{name: value}))


def test_dynamic_rope_of_a_single_pair_is_refused():
    with refused(ConfigError, "dynamic", "head_dim"):
        read_config(config(head_dim=2, rope_scaling={"rope_type": "dynamic", "factor": 2.0}))


def test_an_epsilon_may_be_null():
    assert read_config(config(rms_norm_eps=None)) == read_config(config(rms_norm_eps=...))


@pytest.mark.parametrize("value", [True, float("inf"), float("nan")], ids=str)
@pytest.mark.parametrize("name", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_rope_factor_is_positive_and_finite(name, value):
    with refused(ConfigError, "llama3", repr(name)):
        read_config(config(rope_scaling=LLAMA3 | {name: value}))


@pytest.mark.parametrize("value", ["llama3", ["llama3"], 5, True], ids=repr)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_rope_is_an_object(name, value):
    with refused(ConfigError, repr(name), "object", repr(value)):
        read_config(config(**{name: value}))


@pytest.mark.parametrize("kind", [["llama3"], {"a": 1}], ids=repr)
def test_a_rope_type_is_a_name(kind):
    with refused(ConfigError, "RoPE type", repr(kind)):
        read_config(config(rope_scaling={"rope_type": kind}))


@pytest.mark.parametrize("value", [0, -3, True, 32.5, "32", [], HUGE], ids=str)
def test_the_original_length_of_a_rope_is_a_positive_integer(value):
    for fields in (
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": value}},
        {"original_max_position_embeddings": value},
    ):
        with refused(ConfigError, "'original_max_position_embeddings'", "whole number"):
            read_config(config(**fields))


@pytest.mark.parametrize("name", ["vocab_size", "max_position_embeddings", "num_hidden_layers", "intermediate_size"])
def test_absurdly_large_sizes_are_refused(name):
    """Ids and positions are int32, and a tuple of that many layers would not fit in memory."""
    with refused(ConfigError, repr(name), str(HUGE), "to "):
        read_config(config(**{name: HUGE}))


def test_a_hidden_size_that_the_heads_do_not_divide_is_named():
    with refused(ConfigError, "hidden_size (18)", "num_attention_heads (4)", "head_dim"):
        read_config(config(hidden_size=18))


@pytest.mark.parametrize("types", ["full_attention", 5, True, {}, [{}, {}], [["full_attention"], 1]], ids=repr)
def test_layer_types_are_a_list_of_names(types):
    with refused(ConfigError, "layer_types", "2 entries"):
        read_config(config(**SLIDING, layer_types=types))


@pytest.mark.parametrize("types", [["full_attention"], ["full_attention", "nothing"]], ids=repr)
def test_layer_types_are_checked_without_sliding_layers_too(types):
    with refused(ConfigError, "layer_types", "2 entries"):
        read_config(config(**QWEN, layer_types=types))


def test_a_sliding_layer_without_a_window_is_refused():
    with refused(ConfigError, "layer_types", "use_sliding_window", "sliding_window"):
        read_config(config(**QWEN, layer_types=["full_attention", "sliding_attention"]))


@pytest.mark.parametrize("value", [-1, True, 1.5, "1", []], ids=repr)
def test_max_window_layers_is_an_integer(value):
    with refused(ConfigError, "max_window_layers"):
        read_config(config(**SLIDING, max_window_layers=value))


FIELDS = [
    *CONFIG,
    "attention_bias",
    "head_dim",
    "layer_types",
    "max_window_layers",
    "mlp_bias",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "sliding_window",
    "use_sliding_window",
]
ROPES = st.dictionaries(st.sampled_from([*LLAMA3, "type", "rope_theta"]), JSON | st.sampled_from(["llama3", "linear"]))


@settings(max_examples=300)
@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(FIELDS), JSON | ROPES, max_size=4))
def test_any_config_is_read_or_refused(architecture, fields):
    try:
        read = read_config(CONFIG | {"architectures": [architecture]} | fields)
    except ConfigError as error:
        message = str(error)
    else:
        message = ""
        assert all(getattr(layer.mixer, "head_dim", 2) % 2 == 0 for layer in read.layers)
        assert len(read.layers) == fields.get("num_hidden_layers", CONFIG["num_hidden_layers"])
    assert "\n" not in message
