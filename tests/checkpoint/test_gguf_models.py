"""A GGUF model equals the model that it was made from."""

import contextlib
import json

import numpy as np
import pytest
import torch
from gguf_files import MODELS, TYPES, write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import onward
from onward.checkpoint import GgufCheckpoint
from onward.checkpoint.gguf.blocks import dequantized
from onward.errors import CheckpointError, ConfigError, OnwardWarning, RequestError, UnsupportedArchitectureError
from onward.models import read_config
from onward.models.rope import rotary_schedule
from onward.ops import QuantizedWeight
from tiny_checkpoint import refused

IDS = list(range(5, 45))


def logits_of(lm) -> torch.Tensor:
    """[T, V]"""
    return lm.logits(IDS).float()


def read_params(checkpoint, device="cpu"):
    return checkpoint.read_weights(read_config(checkpoint.config), dtype=None, device=torch.device(device))


def twin_of(folder, config, weights):
    """The same model in the Hugging Face layout, in float32."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return onward.load(folder)


def assert_equal_logits(file, config, weights) -> None:
    ours = logits_of(onward.load(file, dtype="float32"))
    theirs = logits_of(twin_of(file.parent / "twin", config, weights))
    assert theirs.std() > 0.01  # they say something
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("type", TYPES)
def test_every_type(tmp_path, type):
    assert_equal_logits(tmp_path / "m.gguf", *write_model(tmp_path / "m.gguf", "qwen3", type))


# The package has no name for a head of Gemma 2, which is always tied. Every second case: each architecture once, those
# before it untied and those after it tied.
@pytest.mark.stride(2)
@pytest.mark.parametrize(
    ("architecture", "tied"), [(name, tied) for name in MODELS for tied in (False, True) if tied or name != "gemma2"]
)
def test_every_architecture(tmp_path, architecture, tied):
    file = tmp_path / "m.gguf"
    assert_equal_logits(file, *write_model(file, architecture, "Q8_0", tie_word_embeddings=tied))


@pytest.mark.parametrize("type", ["Q4_0", "Q4_K"])
def test_column_permutations_move_or_dequantize_blocks(tmp_path, type):
    """Blocks of 32 weights keep their bits; those of 256 are cut by heads of 64, and become floats."""
    file = tmp_path / "m.gguf"
    config, twin = write_model(file, "qwen35", type)
    assert_equal_logits(file, config, twin)
    checkpoint = GgufCheckpoint(file)
    params = read_params(checkpoint)
    weight = params.layers[0].mixer.out_proj.weight
    assert isinstance(weight, QuantizedWeight) == (type == "Q4_0")
    whole = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
    assert torch.equal(whole, twin["model.layers.0.linear_attn.out_proj.weight"].to(torch.bfloat16))


@pytest.mark.parametrize("architecture", ["qwen3next", "qwen3next with fewer tensors"])
def test_a_slice_of_a_tensors_rows_keeps_its_blocks(tmp_path, architecture):
    """Heads of Qwen3-Next: queries, keys, values and z of a key head lie together in the checkpoint."""
    _, twin = write_model(tmp_path / "m.gguf", architecture, "Q4_K")
    mixer = read_params(GgufCheckpoint(tmp_path / "m.gguf")).layers[0].mixer
    fused = twin["model.layers.0.linear_attn.in_proj_qkvz.weight"].to(torch.bfloat16).view(2, -1, 256)
    q, k, v, z = fused.split([64, 64, 128, 128], 1)
    for weight, rows in ((mixer.qkv_proj.weight, (q, k, v)), (mixer.z_proj.weight, (z,))):
        assert isinstance(weight, QuantizedWeight)
        assert torch.equal(weight.dequantize(), torch.cat([part.reshape(-1, 256) for part in rows]))


def test_two_tensors_of_one_type_joined_keep_their_blocks(tmp_path):
    _, twin = write_model(tmp_path / "m.gguf", "granitehybrid", "Q4_0")
    want = twin["model.layers.0.shared_mlp.input_linear.weight"].to(torch.bfloat16)
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    weight = read_params(checkpoint).layers[0].feed_forward.shared.gate_up_proj.weight
    assert isinstance(weight, QuantizedWeight)
    assert torch.equal(weight.dequantize(), want)
    gate = checkpoint.tensors["blk.0.ffn_gate_shexp.weight"]
    floats = dequantized(gate.type, gate.rows)
    float32 = checkpoint.tensors["output_norm.weight"].type
    checkpoint.tensors[gate.name] = gate._replace(type=float32, rows=floats.view(torch.uint8))
    weight = read_params(checkpoint).layers[0].feed_forward.shared.gate_up_proj.weight
    assert torch.equal(weight, want)


def test_contradictory_numbers_of_layers_are_refused(tmp_path):
    write_model(tmp_path / "m.gguf", "granitehybrid", "Q8_0")
    for counts, error in (
        (np.array([2, 4]), "differs between layers"),
        (np.array([0, 0, 2]), "layer_types"),
        (2, "a number for each layer"),
    ):
        checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
        checkpoint.files[0].metadata["granitehybrid.attention.head_count_kv"] = counts
        with refused(ConfigError, error):
            read_config(checkpoint.config)


def test_ambiguous_kinds_of_single_block_layers_are_refused(tmp_path):
    write_model(tmp_path / "m.gguf", "nemotron_h", "Q8_0")
    for widths, words in (([0, 512, 512, 0], "layer 2 has"), ([0, 512], "for each layer"), (512, "each layer")):
        checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
        checkpoint.files[0].metadata["nemotron_h.feed_forward_length"] = np.array(widths) if widths != 512 else 512
        with refused(ConfigError, "m.gguf: nemotron_h: ", words):
            _ = checkpoint.config


def test_gemma4_layers_must_be_consistent(tmp_path):
    write_model(tmp_path / "m.gguf", "gemma4", "Q8_0")
    for key, value in (
        ("feed_forward_length", np.array([512, 1024, 512, 1024])),
        ("feed_forward_length", np.array([512, 512])),
        ("attention.head_count_kv", np.array([2, 1, 1, 1])),
        ("attention.head_count_kv", np.array([2, 1])),
        ("attention.head_count_kv", ["two"]),
    ):
        checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
        checkpoint.files[0].metadata[f"gemma4.{key}"] = value
        with refused(ConfigError, "m.gguf: gemma4: ", key):
            _ = checkpoint.config
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    checkpoint.files[0].metadata["gemma4.attention.value_length_swa"] = 64
    with refused(ConfigError, "key length 32 and value length 64"):
        _ = checkpoint.config
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    del checkpoint.tensors["rope_freqs.weight"]  # without it all pairs would turn
    with refused(ConfigError, "m.gguf: gemma4: rope_freqs.weight must be 1 for the rotated pairs"):
        _ = checkpoint.config


def test_keys_of_layers_that_share_keys_are_ignored(tmp_path):
    """The last layers of Gemma 4 attend to the keys of others; files have matrices for these, too."""
    write_model(tmp_path / "m.gguf", "gemma4", "Q8_0")
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    matrix = checkpoint.tensors["blk.0.attn_k.weight"]
    checkpoint.tensors["blk.2.attn_k.weight"] = checkpoint.tensors["blk.3.attn_v.weight"] = matrix
    assert len(read_params(checkpoint).layers) == 4
    checkpoint.tensors["blk.0.attn_qkv.weight"] = matrix
    with refused(CheckpointError, "blk.0.attn_qkv.weight"):
        read_params(checkpoint)


def test_the_numbers_of_yarn(tmp_path):
    """The converter's key has the attention_factor of config.json; the other key's number llama.cpp multiplies with
    the factor's own, 0.1 ln(factor) + 1."""
    write_model(tmp_path / "m.gguf", "olmo3", "F32")
    keys = {"attn_factor": 1.5, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}

    def rope(**changes):
        checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
        metadata = checkpoint.files[0].metadata
        metadata |= {f"olmo2.rope.scaling.{key}": value for key, value in changes.items()}
        return checkpoint.config["rope_parameters"]["full_attention"]

    assert rope()["attention_factor"] == pytest.approx(1.2)
    assert rope(**keys)["attention_factor"] == pytest.approx(1.2)
    found = rope(**keys, yarn_attn_factor=None)
    assert found["attention_factor"] == pytest.approx(1.5 * (0.1 * np.log(4) + 1))
    assert (found["beta_fast"], found["beta_slow"]) == (16, 2)


@pytest.mark.parametrize("only", ["layer_norm_epsilon", "layer_norm_rms_epsilon"])
def test_nemotron_h_names_its_norm_epsilon_by_either_key(tmp_path, only):
    write_model(tmp_path / "m.gguf", "nemotron_h", "Q8_0", layer_norm_epsilon=3e-4, rms_norm_eps=3e-4)
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    metadata = checkpoint.files[0].metadata
    for key in ("layer_norm_epsilon", "layer_norm_rms_epsilon"):
        value = metadata.pop(f"nemotron_h.attention.{key}")
        metadata |= {f"nemotron_h.attention.{key}": value} if key == only else {}
    assert checkpoint.config["layer_norm_epsilon"] == pytest.approx(3e-4)


def test_recurrent_layers_may_be_listed_per_layer(tmp_path):
    write_model(tmp_path / "m.gguf", "qwen3next", "Q8_0")
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    checkpoint.files[0].metadata["qwen3next.attention.recurrent_layers"] = np.array([True, False])
    assert checkpoint.config["layer_types"] == ["linear_attention", "full_attention"]
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    checkpoint.files[0].metadata["qwen3next.attention.recurrent_layers"] = np.array([True])
    with refused(ConfigError, "layer_types"):
        read_config(checkpoint.config)


def test_mismatched_parts_of_a_weight_are_refused(tmp_path):
    write_model(tmp_path / "m.gguf", "deepseek2", "F32")
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    keys = checkpoint.tensors["blk.0.attn_k_b.weight"]
    for shape in ((2, *keys.shape[1:]), (keys.shape[0] * keys.shape[1], keys.shape[2])):
        checkpoint.tensors[keys.name] = keys._replace(shape=shape)
        with refused(CheckpointError, "kv_b_proj", str(list(shape)), "the metadata expects"):
            read_params(checkpoint)
    del checkpoint.tensors["blk.0.attn_v_b.weight"]
    with refused(CheckpointError, "blk.0.attn_v_b.weight", "missing"):
        read_params(checkpoint)


def test_biases_are_reordered_like_their_rows(tmp_path):
    file = tmp_path / "m.gguf"
    assert_equal_logits(file, *write_model(file, "llama", "F32", attention_bias=True))


def test_each_matrix_may_have_its_own_type(tmp_path):
    types = {
        "model.embed_tokens.weight": "Q6_K",
        "lm_head.weight": "F16",
        "model.layers.0.self_attn.v_proj.weight": "Q5_0",
        "model.layers.1.mlp.down_proj.weight": "IQ4_XS",
    }
    file = tmp_path / "m.gguf"
    assert_equal_logits(file, *write_model(file, "qwen3", "Q4_K", types=types))
    counts = GgufCheckpoint(file).types
    assert next(iter(counts)) == "Q4_K"
    assert set(counts) == {"Q4_K", *types.values()}


def test_llama3_scaling_is_read_from_its_divisors(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

    def divisors(writer) -> None:
        schedule = rotary_schedule({"rope_parameters": rope}, 64, 64)
        plain = rotary_schedule({"rope_theta": 500000.0}, 64, 64)
        at = torch.zeros(1, 1, 1)
        plain, scaled = (
            one.scaling.inverse_frequencies(one.dims, one.base, at, context=64) for one in (plain, schedule)
        )
        values = plain / scaled
        writer.add_tensor("rope_freqs.weight", values.numpy())

    file = tmp_path / "m.gguf"
    config, weights = write_model(file, "llama", "Q8_0", metadata=divisors, rope_theta=500000.0)
    assert_equal_logits(file, config | {"rope_parameters": rope}, weights)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_divisors_of_any_scaling_apply(tmp_path, factor):
    """A factor divides every frequency once more; divisors that are all alike are a linear scaling."""

    def divisors(writer) -> None:
        writer.add_tensor("rope_freqs.weight", np.full(32, 4 / factor, dtype=np.float32))
        writer.add_float32("llama.rope.scaling.factor", factor)

    config, weights = write_model(tmp_path / "m.gguf", "llama", "F32", metadata=divisors)
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    assert_equal_logits(tmp_path / "m.gguf", config | {"rope_parameters": rope}, weights)


@pytest.mark.parametrize("numbers", [np.linspace(1, 7, 31), np.linspace(-1, 7, 32), np.full(32, np.nan)])
def test_invalid_divisors_are_refused(tmp_path, numbers):
    def divisors(writer) -> None:
        writer.add_tensor("rope_freqs.weight", numbers.astype(np.float32))

    write_model(tmp_path / "m.gguf", "llama", "Q8_0", metadata=divisors)
    with refused(ConfigError, "rope_freqs.weight must be 32 positive numbers", "m.gguf"):
        onward.load(tmp_path / "m.gguf")


def test_gemma4_divisors_determine_the_rotated_pairs(tmp_path):
    write_model(tmp_path / "m.gguf", "gemma4", "Q8_0")
    ropes = GgufCheckpoint(tmp_path / "m.gguf").config["rope_parameters"]
    assert ropes["full_attention"]["partial_rotary_factor"] == 0.25
    assert ropes["sliding_attention"]["partial_rotary_factor"] == 1.0
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    stored = checkpoint.tensors["rope_freqs.weight"]
    divisors = torch.tensor([1.0] * 15 + [1e30] * 7)  # 15 / 22 * 22 is below 15
    checkpoint.tensors[stored.name] = stored._replace(shape=(22,), rows=divisors.view(torch.uint8))
    assert checkpoint.config["rope_parameters"]["full_attention"]["partial_rotary_factor"] * 22 >= 15


@pytest.mark.parametrize(
    ("type", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q4_0", "bfloat16")]
)
def test_the_dtype_of_a_model(tmp_path, type, dtype):
    write_model(tmp_path / "m.gguf", "qwen3", type)
    assert onward.load(tmp_path / "m.gguf").model.params.norm.dtype == getattr(torch, dtype)


def test_equal_head_counts_per_layer_are_accepted(tmp_path):
    config, _ = write_model(tmp_path / "m.gguf", "qwen3", "Q8_0")
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    checkpoint.files[0].metadata["qwen3.attention.head_count_kv"] = np.array([2, 2], np.int32)
    assert checkpoint.config["num_key_value_heads"] == config["num_key_value_heads"]
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    checkpoint.files[0].metadata["qwen3.attention.head_count_kv"] = np.array([2, 4], np.int32)
    with refused(ConfigError, "head_count_kv", "differs between layers"):
        _ = checkpoint.config


def test_an_unknown_architecture_is_named(tmp_path):
    write_model(tmp_path / "m.gguf", "qwen3", "Q8_0")
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    checkpoint.files[0].metadata["general.architecture"] = "rwkv7"
    with refused(UnsupportedArchitectureError, "rwkv7", "qwen3"):
        _ = checkpoint.config


def test_infinite_scales_are_refused(tmp_path):
    write_model(tmp_path / "m.gguf", "qwen3", "Q8_0")
    raw = bytearray((tmp_path / "m.gguf").read_bytes())
    tensor = GgufCheckpoint(tmp_path / "m.gguf").tensors["blk.1.ffn_down.weight"]
    at = bytes(raw).index(tensor.rows[0].numpy().tobytes())
    raw[at : at + 2] = np.array([np.inf], np.float16).tobytes()
    (tmp_path / "m.gguf").write_bytes(raw)
    with refused(CheckpointError, "blk.1.ffn_down.weight", "not finite"):
        onward.load(tmp_path / "m.gguf")


def test_missing_and_surplus_tensors_are_named(tmp_path):
    write_model(tmp_path / "m.gguf", "qwen3", "Q8_0", num_hidden_layers=1)
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    config = read_config(checkpoint.config)
    stored = checkpoint.tensors.pop("blk.0.attn_k.weight")
    with refused(CheckpointError, "blk.0.attn_k.weight", "k_proj"):
        checkpoint.read_weights(config, dtype=None, device=torch.device("cpu"))
    checkpoint.tensors["blk.0.attn_k.weight"] = stored
    checkpoint.tensors["blk.7.attn_k.weight"] = stored
    with refused(CheckpointError, "blk.7.attn_k.weight"):
        checkpoint.read_weights(config, dtype=None, device=torch.device("cpu"))


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3moe", "gpt-oss"])
@pytest.mark.parametrize("type", ["Q8_0", "Q4_K", "MXFP4"])
def test_experts_keep_the_bits_of_their_blocks(tmp_path, architecture, type):
    _, twin = write_model(tmp_path / "m.gguf", architecture, type)
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    params = read_params(checkpoint)
    matrices = params.layers[0].feed_forward.down_proj.weight
    names = [name for name in twin if name.endswith((".down_proj.weight", ".w2.weight"))]
    for matrix, name in zip(matrices, names, strict=True):
        assert isinstance(matrix, QuantizedWeight)
        assert torch.equal(matrix.dequantize().float(), twin[name].to(torch.bfloat16).float())


def test_a_wrong_number_of_experts_is_named(tmp_path):
    write_model(tmp_path / "m.gguf", "qwen3moe", "Q8_0")
    for count, words in ((3, ("4 experts", "says 3")), (5, ("[4, 256, 256]", "[5, 256, 256]"))):
        checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
        checkpoint.files[0].metadata["qwen3moe.expert_count"] = count
        router = checkpoint.tensors["blk.0.ffn_gate_inp.weight"]
        rows = router.rows.new_zeros(count, router.rows.shape[1])
        checkpoint.tensors[router.name] = router._replace(shape=(count, router.shape[1]), rows=rows)
        with refused(CheckpointError, "_exps.weight", *words):
            read_params(checkpoint)


VALUES = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-1, 8),
    st.floats(),
    st.booleans(),
    st.text(max_size=8),
    st.lists(st.integers(-1, 8), max_size=4).map(lambda values: np.array(values, np.int32)),
    st.lists(st.text(max_size=3), max_size=3),
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for number, name in enumerate(MODELS):
        write_model(folder / f"{number}.gguf", name, "F32", tie_word_embeddings=True)
    return [folder / f"{number}.gguf" for number in range(len(MODELS))]


# Keys behind the architecture's name that a file may have, and that few of the zoo do.
SOME_HAVE = ["nextn_predict_layers", "attention.recurrent_layers", "rope.freq_base_swa", "rope.scaling.finetuned"]
SOME_HAVE += ["attention.sliding_window", "attention.sliding_window_pattern", "expert_count", "expert_gating_func"]
SOME_HAVE += [f"rope.scaling.{key}" for key in ("type", "factor", "original_context_length", "attn_factor")]
SOME_HAVE += [f"rope.scaling.yarn_{key}" for key in ("ext_factor", "attn_factor", "beta_fast", "log_multiplier")]


@settings(max_examples=400)
@given(st.data())
def test_any_metadata_are_read_or_refused(checkpoints, data):
    """The files of every family, with some of their numbers replaced or gone, or others added."""
    checkpoint = GgufCheckpoint(data.draw(st.sampled_from(checkpoints)))
    metadata = checkpoint.files[0].metadata
    others = [f"{metadata['general.architecture']}.{key}" for key in SOME_HAVE]
    keys = sorted({key for key in metadata if "." in key} | set(others))
    for key in data.draw(st.lists(st.sampled_from(keys), max_size=3)):
        if data.draw(st.booleans()):
            metadata[key] = data.draw(VALUES)
        else:
            metadata.pop(key, None)
    with contextlib.suppress(ConfigError, CheckpointError, UnsupportedArchitectureError):
        read_params(checkpoint, "meta")


@pytest.mark.parametrize("family", [family for family in MODELS if "experts" in family])
def test_absurd_numbers_of_rows_allocate_no_memory(family, tmp_path):
    write_model(tmp_path / "m.gguf", family, "F32", tie_word_embeddings=True)
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    metadata = checkpoint.files[0].metadata
    for name in [name for name in metadata if name.endswith("feed_forward_length")]:
        metadata[name] = 2**31 - 1
    with refused(CheckpointError, "but the metadata expects"):
        read_params(checkpoint)


def test_mtp_layers_are_ignored(tmp_path):
    write_model(tmp_path / "m.gguf", "glm4moe", "Q8_0")
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    checkpoint.files[0].metadata |= {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    norm = checkpoint.tensors["output_norm.weight"]
    checkpoint.tensors["blk.2.nextn.enorm.weight"] = norm
    params = read_params(checkpoint)
    assert len(params.layers) == 2
    checkpoint.tensors["blk.3.nextn.enorm.weight"] = norm
    with refused(CheckpointError, "blk.3.nextn.enorm.weight"):
        read_params(checkpoint)


def test_mtp_layers_are_counted_in_every_family(tmp_path):
    write_model(tmp_path / "m.gguf", "qwen3", "Q8_0")
    for ahead in (2, 2**62):
        checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
        checkpoint.files[0].metadata["qwen3.nextn_predict_layers"] = ahead
        with refused(ConfigError, f"must be less than the 2 layers; got {ahead}"):
            read_params(checkpoint)
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    checkpoint.files[0].metadata["qwen3.nextn_predict_layers"] = 1
    assert len(read_params(checkpoint).layers) == 1


def test_a_nonnumeric_yarn_ext_factor_is_ignored(tmp_path):
    write_model(tmp_path / "m.gguf", "deepseek2", "F32")
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    checkpoint.files[0].metadata["deepseek2.rope.scaling.yarn_ext_factor"] = "none"
    assert checkpoint.config["rope_parameters"]["rope_type"] == "yarn"


@pytest.mark.parametrize("architecture", MODELS)
def test_floats_equal_those_of_the_checkpoint_in_its_dtype(tmp_path, architecture):
    """Norms too, to whose weights the converter adds 1 in float32."""
    config, weights = write_model(tmp_path / "m.gguf", architecture, "F32", tie_word_embeddings=True)
    folder = tmp_path / "twin"
    twin_of(folder, config, weights)
    ours, theirs = (onward.load(source, dtype="bfloat16") for source in (tmp_path / "m.gguf", folder))
    assert torch.equal(logits_of(ours), logits_of(theirs))


def test_unsupported_options_for_gguf_models(tmp_path):
    write_model(tmp_path / "m.gguf", "qwen3", "Q8_0")
    with refused(RequestError, "already quantized", "Q8_0"):
        onward.load(tmp_path / "m.gguf", quantize="int4")
    with refused(RequestError, "name map"):
        onward.load(tmp_path / "m.gguf", name_map={})


def test_floats_can_be_quantized_while_loading(tmp_path):
    write_model(tmp_path / "m.gguf", "qwen3", "F32")
    lm = onward.load(tmp_path / "m.gguf", quantize="int8")
    assert lm.model.params.lm_head.weight.format == "int8"


def test_a_context_past_the_trained_one_is_a_warning(tmp_path):
    write_model(tmp_path / "m.gguf", "qwen3", "Q8_0")
    with pytest.warns(OnwardWarning, match="max_position_embeddings 64"):
        onward.load(tmp_path / "m.gguf", max_seq_len=128)
