"""config.json: read correctly, or refused in one line with the received and the accepted value."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import onward
from onward.checkpoint import CheckpointFolder
from onward.errors import CheckpointError, ConfigError, UnsupportedArchitectureError
from onward.models import FAMILIES, read_config
from onward.models.families import KNOWN_MODELS
from tiny_checkpoint import CONFIG, change_json, make_checkpoint, refused

QWEN = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 8}
SLIDING = QWEN | {"use_sliding_window": True, "sliding_window": 4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def config(**changes):
    return {name: value for name, value in (CONFIG | changes).items() if value is not ...}


# ── the file ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_without_a_config_is_refused(folder):
    (folder / "config.json").unlink()
    with refused(ConfigError, str(folder), "no config.json"):
        onward.load(folder)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"model: llama", "JSON"),
        (b"[]", "object; got list"),
        (b"null", "object; got NoneType"),
        (b'"llama"', "object; got str"),
        (json.dumps(CONFIG).encode("utf-16"), "UTF-8"),
        (b"\xef\xbb\xbf{", "JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "JSON"),
        (b"[" * 100_000, "JSON"),
    ],
    ids=range(10),
)
def test_configs_other_than_json_objects_are_refused(content, why, folder):
    (folder / "config.json").write_bytes(content)
    with refused(ConfigError, "config.json", why):
        onward.load(folder)


def test_a_folder_named_config_json_is_refused(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with refused(ConfigError, "no config.json"):
        onward.load(folder)


# ── the architecture ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "MistralModel", "llamaforcausallm", ""])
def test_the_error_for_an_unsupported_architecture_lists_the_supported_ones(name, folder):
    change_json(folder / "config.json", architectures=[name])
    with refused(UnsupportedArchitectureError, repr(name), *(known.names for known in KNOWN_MODELS)):
        onward.load(folder)


@pytest.mark.parametrize("value", [..., None, [], "LlamaForCausalLM", ["LlamaForCausalLM"] * 2, {}, 5], ids=str)
def test_exactly_one_architecture_must_be_named(value):
    with refused(ConfigError, "'architectures'", repr(None if value is ... else value)):
        read_config(config(architectures=value))


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
@pytest.mark.parametrize(
    "value", [{"quant_method": "hqq"}, {"quant_method": ["awq"]}, {"bits": 4}, {}, [], "int4", True], ids=str
)
def test_unknown_quantization_methods_are_refused(name, value, folder):
    change_json(folder / "config.json", **{name: value})
    shown = repr(value.get("quant_method") if isinstance(value, dict) else value)
    with refused(ConfigError, name, shown, "unquantized"):
        onward.load(folder)


def test_quantization_config_may_be_empty(folder):
    change_json(folder / "config.json", quantization_config=None, compression_config=None)
    onward.load(folder)


# ── fields ────────────────────────────────────────────────────────────────────────────────────────────────

REQUIRED = [
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
]


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("value", [..., None], ids=["absent", "null"])
def test_missing_required_fields_are_named(name, value):
    with refused(ConfigError, repr(name), "missing"):
        read_config(config(**{name: value}))


@pytest.mark.parametrize("name", [*REQUIRED, "num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -4, True, False, 4.0, "4", [4], {}], ids=repr)
def test_a_size_is_a_positive_integer(name, value):
    with refused(ConfigError, repr(name), "whole number", repr(value)):
        read_config(config(**{name: value}))


OPTIONAL = [
    "attention_bias",
    "head_dim",
    "layer_types",
    "mlp_bias",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "use_sliding_window",
]


# Fields that a family needs in addition to CONFIG: at least one layer of a hybrid must be attention, by default the
# fourth or none; with latent attention, there are as many heads as key heads.
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
_NEEDED = {
    "BambaForCausalLM": _MAMBA | {"attn_layer_indices": [0]},
    "GraniteMoeHybridForCausalLM": _MAMBA | {"layer_types": ["attention", "mamba"], "num_local_experts": 0},
    "NemotronHForCausalLM": {
        "hybrid_override_pattern": "M*", "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8,
        "layer_norm_epsilon": 1e-6,
    },
}  # fmt: skip
_NEEDED_BY_KIN = {
    ("Qwen3Next", "Qwen3_5"): {"full_attention_interval": 2},
    ("Deepseek", "Glm4MoeLite", "Mistral4"): {"num_key_value_heads": 4},
}


def needed(architecture):
    kin = [fields for names, fields in _NEEDED_BY_KIN.items() if architecture.startswith(names)]
    return _NEEDED.get(architecture, kin[0] if kin else {})


@pytest.mark.parametrize("architecture", [name for name in FAMILIES if name.endswith("ForCausalLM")])
@pytest.mark.parametrize("name", OPTIONAL)
def test_null_means_absent(name, architecture):
    fields = {"architectures": [architecture]} | needed(architecture)
    if name == "layer_types" and name in fields:
        pytest.skip("this family's layers are named one by one")
    absent = read_config(config(**fields | {name: ...}))
    assert read_config(config(**fields | {name: None})) == absent


def test_heads_are_a_multiple_of_key_value_heads():
    with refused(ConfigError, "num_attention_heads (4)", "num_key_value_heads (3)", "multiple"):
        read_config(config(num_key_value_heads=3))


def test_head_dim_is_even():
    with refused(ConfigError, "head_dim", "even", "5"):
        read_config(config(head_dim=5))
    with refused(ConfigError, "head_dim", "even", "3"):
        read_config(config(hidden_size=12))


@pytest.mark.parametrize("act", ["gelu", "relu", "SiLU", "", None, 5, []], ids=repr)
def test_other_activations_are_refused(act):
    with refused(ConfigError, "hidden_act", repr(act), "silu"):
        read_config(config(hidden_act=act))


@pytest.mark.parametrize(
    "types", [[], ["full_attention"], ["full_attention"] * 3, ["full_attention", "chunked_attention"]]
)
def test_layer_types_have_one_entry_per_layer(types):
    with refused(ConfigError, "layer_types", "2 entries", "num_hidden_layers", f"got {len(types)}"):
        read_config(config(**SLIDING, layer_types=types))


@pytest.mark.parametrize("value", [0, -1, True, 4.5, "4"], ids=repr)
@pytest.mark.parametrize("family", [SLIDING, {"architectures": ["MistralForCausalLM"]}], ids=["qwen3", "mistral"])
def test_a_window_is_a_positive_integer(family, value):
    with refused(ConfigError, "sliding_window", repr(value)):
        read_config(config(**family | {"sliding_window": value}))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["ntk", "mrope", "LLAMA3"])
def test_the_error_for_an_unknown_rope_lists_the_known_ones(key, kind):
    with refused(ConfigError, repr(kind), "default, linear, dynamic, llama3, yarn, longrope, proportional"):
        read_config(config(**{key: {"rope_type": kind, "factor": 2.0}}))


@pytest.mark.parametrize(("low", "high"), [(4.0, 1.0), (2.0, 2.0)])
def test_llama3_low_freq_factor_is_below_high_freq_factor(low, high):
    with refused(ConfigError, "llama3", "low_freq_factor", str(low), str(high)):
        read_config(config(rope_scaling=LLAMA3 | {"low_freq_factor": low, "high_freq_factor": high}))


@pytest.mark.parametrize("value", [..., None, 0, -1.0, "2", [2.0]], ids=repr)
@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3"])
def test_a_scaled_rope_needs_its_factor(kind, value):
    scaling = LLAMA3 | {"rope_type": kind, "factor": value}
    with refused(ConfigError, kind, "'factor'"):
        read_config(config(rope_scaling={name: item for name, item in scaling.items() if item is not ...}))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_theta": 1e3, "rope_parameters": {"rope_theta": 500.0}}, ["rope_theta", "500.0 in rope_parameters"]),
        ({"rope_theta": 1e3, "rope_parameters": {"rope_theta": 500.0}}, ["1000.0 in config.json itself"]),
        ({"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}}, ["factor", "4.0", "2.0", "rope_scaling"]),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 8},
            ["original_max_position_embeddings", "8", "16"],
        ),
        (
            {"rope_scaling": YARN | {"type": "linear"}},
            ["rope_type", "'yarn' in rope_scaling", "'linear' in rope_scaling"],
        ),
        ({"rope_scaling": YARN | {"short_factor": [1.0]}}, ["yarn", "'short_factor'"]),
        ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, ["default", "'factor'"]),
        ({"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 2}}, ["beta_slow", "beta_fast", "got 2 and 1"]),
        (
            {"rope_scaling": YARN | {"attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 1.0}},
            ["attention_factor is 1.5", "mscale 1 and mscale_all_dim 1 mean 1"],
        ),
    ],
    ids=str,
)
def test_contradictory_rope_fields_are_refused(fields, words):
    with refused(ConfigError, "config.json", *words):
        read_config(config(**{"rope_theta": ...} | fields))


@pytest.mark.parametrize("value", [..., None, 3, [1.0], [1.0, "2"], [1.0, 0.0], "1.0, 2.0"], ids=repr)
@pytest.mark.parametrize("name", ["short_factor", "long_factor"])
def test_longrope_needs_a_factor_for_every_pair(name, value):
    scaling = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.0, 2.0], name: value}
    with refused(ConfigError, "longrope", repr(name)):
        read_config(config(rope_scaling={name: item for name, item in scaling.items() if item is not ...}))


def test_partial_rotation_is_refused():
    with refused(ConfigError, "partial_rotary_factor"):
        read_config(config(partial_rotary_factor=0.5))


def test_sizes_that_the_weights_do_not_have_are_named_by_tensor(folder):
    change_json(folder / "config.json", intermediate_size=10**9)
    with refused(CheckpointError, "mlp", "1000000000"):
        onward.load(folder)


# ── anything at all ───────────────────────────────────────────────────────────────────────────────────────

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**20) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@given(
    st.dictionaries(st.sampled_from(["quantization_config", "eos_token_id", "bos_token_id", "dtype", "other"]), JSON)
)
def test_any_config_is_read_or_refused_by_the_folder(tmp_path_factory, fields):
    path = tmp_path_factory.getbasetemp() / "any-config"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | fields))
    folder = CheckpointFolder(path)
    try:
        eos = folder.eos
    except ConfigError as error:
        message = str(error)
    else:
        message = ""
        assert all(type(token) is int for token in eos)
    assert "\n" not in message


def test_fields_without_effect_are_accepted(tmp_path):
    extra = {"transformers_version": "5.0", "torch_dtype": "float32", "use_cache": True, "initializer_range": 0.02}
    onward.load(make_checkpoint(tmp_path, **extra))
