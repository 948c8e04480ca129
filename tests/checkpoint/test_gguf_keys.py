"""Every key of a GGUF file's metadata is followed, refused by name, or has no effect."""

from pathlib import Path

import gguf.constants
import numpy as np
import pytest
from gguf_files import MODELS, write_model

import onward
from onward.checkpoint import GgufCheckpoint
from onward.checkpoint.gguf.config import config_and_keys, family_of
from onward.checkpoint.gguf.keys import KNOWN, UNREAD
from onward.errors import ConfigError, OnwardError
from onward.models import read_config
from tiny_checkpoint import refused

DOCS = Path(__file__).parents[2] / "docs" / "gguf.md"
IDS = list(range(5, 45))
# Keys that a family looks up, and that say nothing of some of its models, or say what the file says elsewhere.
SAY_NOTHING = {
    # A newer key, or the type of the scaling, decides.
    "rope.scale_linear": "rope.scaling.factor is there",
    "rope.scaling.original_context_length": "nothing is scaled",
    **dict.fromkeys((f"rope.scaling.yarn_{key}" for key in ("attn_factor", "beta_fast", "beta_slow")), "no YaRN"),
    "rope.scaling.yarn_log_multiplier": "no YaRN",
    "rope.scaling.attn_factor": "rope.scaling.yarn_attn_factor is there",
    # All of its layers have experts, or none have.
    "feed_forward_length": "experts",
    **dict.fromkeys(
        ("expert_used_count", "expert_group_count", "expert_weights_norm", "expert_weights_scale"), "dense"
    ),
    "moe_latent_size": "dense",
    # Widths of latents, which the keys of what is computed of them replace.
    "attention.key_length": "attention.key_length_mla is there",
    "attention.value_length": "attention.value_length_mla is there",
}
# Families in which nothing turns.
STILL = ("nemotron_h", "nemotron_h_moe")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of each of some families: path by name."""
    folder = tmp_path_factory.mktemp("models")
    names = [name for name in MODELS if " " not in name]
    for name in names:
        write_model(folder / f"{name}.gguf", name, "F32", tie_word_embeddings=True)
    return {name: GgufCheckpoint(folder / f"{name}.gguf") for name in names}


def config_with(checkpoint: GgufCheckpoint, **changes: object) -> dict:
    """None takes a key out. Dots in names are written as two underscores."""
    metadata = dict(checkpoint.files[0].metadata)
    for name, value in changes.items():
        metadata[f"{metadata['general.architecture']}.{name.replace('__', '.')}"] = value
    present = {key: value for key, value in metadata.items() if value is not None}
    return config_and_keys(present, checkpoint.tensors, "m")[0]


def test_every_key_of_llama_cpp_is_known():
    """The keys in its package; a new version may add some."""

    def keys_of(names: type) -> set[str]:
        values = [value for name, value in vars(names).items() if not name.startswith("__")]
        nested = [keys_of(value) for value in values if isinstance(value, type)]
        return {value for value in values if isinstance(value, str)}.union(*nested)

    found = {key.removeprefix("{arch}.") for key in keys_of(gguf.constants.Keys) if key.startswith("{arch}.")}
    assert {key for key in found if "{" not in key} <= KNOWN


@pytest.mark.parametrize("value", [3, 0.37, np.array([3, 5])])
def test_no_key_is_ignored_silently(files, value):
    """A value that no model has is refused, changes the architecture, or is one that the table says changes nothing."""
    ignored = set()
    for name, checkpoint in files.items():
        plain = config_with(checkpoint)
        same = read_config(plain)
        for key in KNOWN - UNREAD - set(SAY_NOTHING):
            current = checkpoint.files[0].metadata.get(f"{MODELS[name][0]}.{key}")
            if np.array_equal(current, value) or (name in STILL and key.startswith("rope.")):
                continue
            try:
                config = config_with(checkpoint, **{key: value})
                if config != plain or read_config(config) != same:
                    continue
            except OnwardError:
                continue
            ignored.add((name, key))
    # 3 is the softmax of the chosen; Falcon-H1's factor is in its weights; layers of this Granite are "nope".
    right = {("gpt-oss", "expert_gating_func"), ("falcon-h1", "embedding_scale"), ("granitehybrid", "rope.freq_base")}
    assert ignored <= right | {("granitehybrid", "rope.scaling.factor")}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4}),
        ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4}),
        ({"scale_linear": 4}, {"rope_type": "linear", "factor": 4}),
        ({"scaling.factor": 2.0, "scale_linear": 4.0}, {"rope_type": "linear", "factor": 2}),
        ({"scaling.factor": 0.0, "scale_linear": 4.0}, {"rope_type": "default"}),
        ({"scaling.type": "none", "scaling.factor": 4.0}, {"rope_type": "default"}),
        ({"scaling.type": "linear"}, {"rope_type": "default"}),
        ({"scaling.type": "yarn"}, {"rope_type": "yarn", "factor": 1}),
        ({"scaling.type": "yarn", "scaling.original_context_length": 0}, {"original_max_position_embeddings": None}),
        ({"scaling.type": "yarn", "scaling.factor": 4, "scaling.attn_factor": 2}, {"attention_factor": 2.277258872}),
        ({"scaling.attn_factor": 1.3}, {"rope_type": "longrope", "attention_factor": 1.3, "long_factor": 1}),
        ({"scaling.factor": 4.0, "scaling.attn_factor": 1.3}, {"attention_factor": 1.3, "short_factor": 4}),
        ({"freq_base": None}, {"rope_theta": 10000.0}),
    ],
)
def test_rope_is_read_as_in_llama_cpp(files, keys, expected):
    config = config_with(files["llama"], **{f"rope.{key}": value for key, value in keys.items()})
    rope = dict(config["rope_parameters"])
    for name in ("long_factor", "short_factor"):  # one for all 32 pairs
        if name in rope:
            assert rope[name] == rope[name][:1] * 32
            rope[name] = rope[name][0]
    assert {name: rope[name] for name in expected} == pytest.approx(expected)
    read_config(config)


def test_untyped_rope_factors_and_attention_scales_apply(tmp_path):
    """The logits are those of the same model in the Hugging Face layout, where queries have the factors of both."""
    from test_gguf_models import assert_equal_logits

    def keys(writer) -> None:
        writer.add_float32("llama.rope.scale_linear", 4.0)
        writer.add_float64("llama.rope.scaling.attn_factor", 1.5)

    config, weights = write_model(tmp_path / "m.gguf", "llama", "F32", metadata=keys)
    for name in weights:
        weights[name] = weights[name] * (1.5**2 if name.endswith("q_proj.weight") else 1)
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    assert_equal_logits(tmp_path / "m.gguf", config | {"rope_parameters": rope}, weights)


def test_divisors_with_a_factor_are_refused(files):
    with refused(ConfigError, "rope_freqs"):
        config_with(files["gemma4"], rope__scaling__factor=2.0)


def test_one_of_two_lists_of_divisors_is_refused(tmp_path):
    write_model(tmp_path / "m.gguf", "phi3 for long texts", "F32")
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    del checkpoint.tensors["rope_factors_short.weight"]
    with refused(ConfigError, "rope_factors_long.weight", "rope_factors_short.weight"):
        _ = checkpoint.config


@pytest.mark.parametrize(
    ("family", "keys", "field", "expected"),
    [
        ("deepseek2", "expert_weights_norm", "norm_topk_prob", False),
        ("deepseek2", "expert_weights_scale", "routed_scaling_factor", 1.0),
        ("deepseek2", "leading_dense_block_count", "first_k_dense_replace", 0),
        ("glm4moe", "expert_weights_norm", "norm_topk_prob", False),
        ("nemotron_h_moe", "expert_weights_norm", "norm_topk_prob", False),
        ("gemma3", "attention.sliding_window", "sliding_window", None),
        ("exaone4", "attention.sliding_window", "sliding_window", None),
        ("qwen3", "attention.head_count_kv", "num_key_value_heads", 4),
    ],
)
def test_defaults_equal_llama_cpp(files, family, keys, field, expected):
    assert config_with(files[family], **{keys: None})[field] == expected


@pytest.mark.parametrize("family", ["glm4", "glm4moe", "qwen35"])
def test_whole_heads_are_rotated_by_default(files, family):
    assert config_with(files[family], rope__dimension_count=None)["rope_parameters"]["partial_rotary_factor"] == 1


@pytest.mark.parametrize(
    ("pattern", "types"),
    [(2, "SFSFSF"), (3, "SSFSSF"), (0, "SSSSSS"), (1, "FFFFFF"), (np.array([1, 0, 0, 1, 0, 0, 1]), "SFFSFF")],
)
def test_windows_for_all_layers_or_per_layer(files, pattern, types):
    config = config_with(files["gemma3"], attention__sliding_window_pattern=pattern)
    assert "".join(kind[0].upper() for kind in config["layer_types"]) == types


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "attention.causal", False),
        ("llama", "attention.scale", 0.5),
        ("llama", "attention.sliding_window", 9),
        ("llama", "logit_scale", 2.0),
        ("qwen3", "final_logit_softcapping", 30.0),
        ("qwen3", "attention.clamp_kqv", 8.0),
        ("qwen3", "use_parallel_residual", True),
        ("qwen3moe", "expert_weights_norm", False),
        ("qwen3moe", "expert_gating_func", 2),
        ("glm4moe", "expert_gating_func", 1),
        ("glm4moe", "expert_group_count", 4),
        ("deepseek2", "expert_gating_func", 4),
        ("deepseek2", "attention.temperature_scale", 0.1),
        ("granite", "rope.scaling.finetuned", False),
        ("lfm2", "attention.sliding_window", 9),
        ("gemma2", "rope.freq_base_swa", 5e5),
        ("qwen3", "attention.layer_norm_rms_epsilon", None),
        ("qwen3moe", "expert_used_count", None),
        ("gpt-oss", "attention.sliding_window", None),
    ],
)
def test_keys_that_would_change_the_model_are_refused_by_name(files, family, key, value):
    with refused(ConfigError, key):
        config_with(files[family], **{key: value})


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "attention.causal", True),
        ("llama", "attention.scale", 0.125),
        ("llama", "attention.sliding_window", 4096),
        ("llama", "expert_count", 0),
        ("llama", "rope.scaling.finetuned", True),
        ("qwen3", "attention.clamp_kqv", 0.0),
        ("qwen3", "logit_scale", 1.0),
        ("qwen3moe", "expert_weights_norm", 1),
        ("qwen3moe", "expert_gating_func", 1),
        ("gemma2", "attn_logit_softcapping", 20),
        ("gemma4", "attention.scale", 1.0),
        ("gemma4", "embedding_scale", 16.0),
        ("deepseek2", "expert_weights_norm", 1.0),
        ("qwen3", "block_count", 2.0),
    ],
)
def test_keys_that_confirm_the_architecture_change_nothing(files, family, key, value):
    same, confirmed = config_with(files[family]), config_with(files[family], **{key: value})
    assert read_config(same) == read_config(confirmed)


def test_unknown_keys_are_named(files, tmp_path):
    def keys(writer) -> None:
        writer.add_uint32("qwen3.my.own_key", 3)

    write_model(tmp_path / "m.gguf", "qwen3", "Q8_0", metadata=keys)
    assert GgufCheckpoint(tmp_path / "m.gguf").unknown_keys == ["qwen3.my.own_key"]
    assert onward.load(tmp_path / "m.gguf").logits(IDS).isfinite().all()
    assert all(checkpoint.unknown_keys == [] for checkpoint in files.values())


def test_suppressed_tokens_are_never_generated(tmp_path):
    from test_gguf_tokenizers import trained, write_byte_level

    write_byte_level(tmp_path / "m.gguf", trained("qwen2"), "qwen2")
    likeliest = onward.load(tmp_path / "m.gguf").generate([40, 41], max_new_tokens=1, temperature=0).token_ids[0]
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    checkpoint.files[0].metadata["tokenizer.ggml.suppress_tokens"] = np.array([likeliest, 10**6], np.int32)
    assert checkpoint.generation_config == {"suppress_tokens": [likeliest]}


def lists_of_docs(files) -> dict[str, list[str]]:
    """The lists in docs/gguf.md: keys that families read, keys without effect, and keys that are refused unless off."""
    read: set[str] = set()
    for checkpoint in files.values():
        metadata, tensors = checkpoint.files[0].metadata, checkpoint.tensors
        read |= {*family_of(metadata, tensors, "m").fixed, *config_and_keys(metadata, tensors, "m")[1].read}
    never = UNREAD - read
    return {"honoured": sorted(read & KNOWN), "nothing": sorted(never), "refused": sorted(KNOWN - read - never)}


def test_the_docs_list_every_key(files):
    text = DOCS.read_text()
    for name, keys in lists_of_docs(files).items():
        _, _, rest = text.partition(f"<!-- keys: {name} -->\n")
        listed = rest.partition("\n\n")[0].replace("\n", " ").strip(" .").split(", ")
        assert [key.strip("`") for key in listed] == keys, name


def test_absurd_sizes_allocate_no_lists(files):
    """An absurd number of layers allocates no list of layers, and an absurd width no list of pairs."""
    with refused(ConfigError, "head_dim 1099511627776"):
        wide = {"attention.key_length": 2**40, "attention.value_length": 2**40, "rope.dimension_count": 2**40}
        config_with(files["qwen3"], **wide, rope__scaling__attn_factor=2.0)
    for name in ("gemma2", "gemma3", "exaone4", "gpt-oss"):
        with refused(ConfigError, "num_hidden_layers"):
            read_config(config_with(files[name], block_count=2**40, attention__sliding_window_pattern=2))
