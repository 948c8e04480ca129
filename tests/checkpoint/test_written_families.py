"""A GGUF file of a family whose weights llama.cpp's converter computes, cuts or reorders is the model it was made of.

Where a change is exact, every weight has the bits that it had, through `onward.load` of the file and of the folder.
"""

import json

import pytest
import torch
from gguf_files import write_model
from gguf_hybrids import factors_of
from safetensors.torch import load_file, save_file

import onward
from onward.checkpoint.convert import convert
from onward.checkpoint.gguf import GgufCheckpoint
from onward.errors import OnwardWarning, RequestError
from onward.ops import QuantizedWeight
from onward.quantization import quantize_folder
from onward.testing import random_checkpoint

# Of the tests' zoo (`gguf_files`).
ZOO = ["qwen35", "qwen35 with as many keys", "qwen35moe", "qwen3next", "lfm2"]
ZOO += ["deepseek2", "deepseek2 with one matrix for keys and values"]
ZOO += ["granitehybrid", "granitehybrid without experts", "falcon-h1", "falcon-h1 without a norm of states"]
ZOO += ["nemotron_h", "nemotron_h_moe", "nemotron_h_moe in a latent space"]
ZOO += ["gemma4", "gemma4 with experts"]
CAPPED = {"final_logit_softcapping": 5.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.1, 3.2, 4.3]}
# Tiny models whose config.json leaves fields to their defaults, and what they have beside these.
_DEFAULTS = ("qwen3_5", "qwen3_5moe", "lfm2", "deepseekv2", "deepseekv3", "glm4moelite", "granitemoehybrid")
TINY = {family: {} for family in _DEFAULTS}
TINY |= {
    "granitemoeshared": {},
    "phi3": {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 64},
    "gemma2": {"query_pre_attn_scalar": 16, "head_dim": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "head_dim": 16, "num_hidden_layers": 6, "sliding_window_pattern": 6},
    "gemma4": CAPPED,
    "nemotronh": {"hybrid_override_pattern": "M-*M"},
    "nemotronh with experts": {"hybrid_override_pattern": "ME*M"},
}
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def folder_of(path, family, dtype, **options):
    """A folder of a model of the zoo, whose weights are bfloat16 numbers: the 1 of norms takes no bits of them."""
    config, twin = write_model(path / "theirs.gguf", family, "F32", **options)
    folder = path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: weight.to(torch.bfloat16).to(dtype).contiguous() for name, weight in twin.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def weights_of(path) -> dict[str, torch.Tensor]:
    """As they are read, by stock name; blocks as float32."""
    convert(path, path.with_name(f"floats of {path.name}"), "safetensors")
    return load_file(path.with_name(f"floats of {path.name}") / "model.safetensors")


def apart(weights, groups: int, keys: int, values: int) -> dict[str, torch.Tensor]:
    """Qwen3-Next's projections of Gated DeltaNet as Qwen3.5 has them. values: features of the values of a key head."""
    out = {}
    for name, weight in weights.items():
        stem, _, part = name.removesuffix(".weight").rpartition(".")
        of_groups = weight.unflatten(0, (groups, -1)) if part in ("in_proj_qkvz", "in_proj_ba") else weight
        if part == "in_proj_qkvz":
            q, k, v, z = (x.flatten(0, 1) for x in of_groups.split([keys, keys, values, values], 1))
            out |= {f"{stem}.in_proj_qkv.weight": torch.cat([q, k, v]), f"{stem}.in_proj_z.weight": z}
        elif part == "in_proj_ba":
            b, a = (x.flatten(0, 1) for x in of_groups.chunk(2, 1))
            out |= {f"{stem}.in_proj_b.weight": b, f"{stem}.in_proj_a.weight": a}
        else:
            out[name] = weight
    return out


def assert_same_weights(file, folder) -> None:
    """Bit for bit; logarithms of rates as far as a float32 exp and log may move them: each is within a unit in the last
    place (of the exp 2**-23 of the rate, which is 2**-23 of its logarithm), and 1/16 more holds products of these."""
    for name, weight in folder.items():
        if name.endswith(".A_log"):
            assert ((file[name] - weight).abs() <= (1 + weight.abs()) * (17 / 16 * 2**-23)).all(), name
        else:
            assert file[name].dtype == weight.dtype, name
            assert torch.equal(file[name], weight), name
    assert file.keys() == folder.keys()


def greedy(lm) -> list[int]:
    return lm.generate(IDS, max_new_tokens=12, temperature=0).token_ids


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ZOO)
def test_what_is_read_is_what_was_written(family, dtype, tied, tmp_path):
    options = CAPPED if family.startswith("gemma4") else {}
    folder = folder_of(tmp_path, family, DTYPES[dtype], tie_word_embeddings=tied, **options)
    convert(folder, tmp_path / "model.gguf", "gguf")
    expected = weights_of(folder)
    if family == "qwen3next":
        expected = apart(expected, 2, 64, 128)
    if family.startswith("falcon-h1"):  # whose factors, powers of 2 here, are in the file's weights
        config = json.loads((folder / "config.json").read_text())
        expected = {name: weight * factors_of(name, config).to(weight.dtype) for name, weight in expected.items()}
    assert_same_weights(weights_of(tmp_path / "model.gguf"), expected)
    file, whole = (onward.load(path, compile="eager") for path in (tmp_path / "model.gguf", folder))
    assert greedy(file) == greedy(whole)
    if dtype == "float32":
        assert (file.logits(IDS) - whole.logits(IDS)).abs().max() < 1e-4


@pytest.mark.parametrize("family", TINY)
def test_fields_that_config_json_leaves_out_are_written(family, tmp_path):
    folder = random_checkpoint(tmp_path / "folder", family.split()[0], dtype=torch.bfloat16, **TINY[family])
    convert(folder, tmp_path / "model.gguf", "gguf")
    assert_same_weights(weights_of(tmp_path / "model.gguf"), weights_of(folder))


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "qwen3_5", "qwen3_5moe"])
def test_of_a_checkpoint_that_reads_images_the_text_part_is_written(family, tmp_path, monkeypatch):
    text, whole = random_checkpoint(tmp_path / "text", family, dtype=torch.bfloat16, **TINY[family]), tmp_path / "whole"
    whole.mkdir()
    config = json.loads((text / "config.json").read_text())
    name = config["architectures"][0].replace("CausalLM", "ConditionalGeneration")
    parts = {"architectures": [name], "text_config": config, "tie_word_embeddings": config.pop("tie_word_embeddings")}
    (whole / "config.json").write_text(json.dumps(parts))
    tensors = load_file(text / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, whole / "model.safetensors")
    monkeypatch.setattr("onward.errors._warned", set())
    with pytest.warns(OnwardWarning, match="the text part is loaded, and what reads images is left out"):
        convert(whole, tmp_path / "model.gguf", "gguf")
    assert_same_weights(weights_of(tmp_path / "model.gguf"), weights_of(text))


@pytest.mark.parametrize("kinds", ["LFFL", "LLFF", "FLLL"])
def test_any_order_of_recurrent_layers_is_written(kinds, tmp_path):
    types = ["linear_attention" if kind == "L" else "full_attention" for kind in kinds]
    folder = random_checkpoint(
        tmp_path / "folder", "qwen3_5", dtype=torch.bfloat16, num_hidden_layers=4, layer_types=types
    )
    convert(folder, tmp_path / "model.gguf", "gguf")
    assert_same_weights(weights_of(tmp_path / "model.gguf"), weights_of(folder))


SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


def test_blocks_move_with_their_value_heads(tmp_path):
    widths = {"linear_value_head_dim": 32, "linear_key_head_dim": 32}
    folder = random_checkpoint(tmp_path / "folder", "qwen3_5", dtype=torch.bfloat16, **SIZES, **widths)
    quantize_folder(folder, tmp_path / "int4", "int4")
    convert(tmp_path / "int4", tmp_path / "model.gguf", "gguf")
    file = onward.load(tmp_path / "model.gguf", compile="eager")
    assert isinstance(file.model.params.layers[0].mixer.out_proj.weight, QuantizedWeight)
    assert_same_weights(weights_of(tmp_path / "model.gguf"), weights_of(tmp_path / "int4"))


def test_an_order_that_cuts_blocks_is_refused(tmp_path):
    widths = {"linear_value_head_dim": 16, "linear_num_value_heads": 4}
    folder = random_checkpoint(tmp_path / "folder", "qwen3_5", dtype=torch.bfloat16, **SIZES, **widths)
    quantize_folder(folder, tmp_path / "int4", "int4")
    with pytest.raises(RequestError, match=r"out_proj\.weight: .* cuts blocks of Q4_0: give a dtype"):
        convert(tmp_path / "int4", tmp_path / "model.gguf", "gguf")
    convert(tmp_path / "int4", tmp_path / "model.gguf", "gguf", dtype=torch.float32)


@pytest.mark.parametrize("rate", [100.0, -110.0, float("nan")])
def test_a_rate_that_float32_does_not_hold_is_refused(rate, tmp_path):
    folder = random_checkpoint(tmp_path / "folder", "qwen3_5", dtype=torch.bfloat16)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.linear_attn.A_log"][1] = rate
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(RequestError, match=r"A_log: GGUF has the rates of decay"):
        convert(folder, tmp_path / "model.gguf", "gguf")


def test_a_dense_layer_of_a_family_whose_layers_all_have_experts_is_refused(tmp_path):
    folder = random_checkpoint(tmp_path / "folder", "qwen3next", dtype=torch.bfloat16)
    with pytest.raises(RequestError, match="layer 0 has no experts, and in GGUF layers of this family have them"):
        convert(folder, tmp_path / "model.gguf", "gguf")


FACTORS = {
    "embedding_multiplier": 5.656854249492381,
    "lm_head_multiplier": 0.01953125,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.9375,
    "key_multiplier": 0.390625,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.23570226039551587,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "mamba_norm_before_gate": False,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_any_factors_of_falcon_h1_are_written_in_its_weights(tied, dtype, tmp_path):
    """With a tied head, whose factor is another than the embedding's, the file has both. Products are rounded to
    float32, 2**-24 of each weight; 16 roundings in a row that all have one sign, in 2 layers, make 2**-19 of a logit's
    terms, and logits are sums that are up to 30 times smaller than these: 2**-14, 0.6e-4 of the largest."""
    options = {"dtype": DTYPES[dtype], "tie_word_embeddings": tied, **FACTORS}
    folder = random_checkpoint(tmp_path / "folder", "falconh1", **options)
    convert(folder, tmp_path / "model.gguf", "gguf")
    file, whole = (onward.load(path, compile="eager", dtype="float32") for path in (tmp_path / "model.gguf", folder))
    assert (file.logits(IDS) - whole.logits(IDS)).abs().max() < 1e-4 * whole.logits(IDS).abs().max()
    assert greedy(file) == greedy(whole)


def test_factors_that_blocks_do_not_hold_are_refused(tmp_path):
    folder = random_checkpoint(
        tmp_path / "folder", "falconh1", dtype=torch.bfloat16, **SIZES, **FACTORS, mamba_d_ssm=64
    )
    quantize_folder(folder, tmp_path / "int4", "int4")
    with pytest.raises(RequestError, match=r"embed_tokens\.weight: GGUF has it times a factor of the forward"):
        convert(tmp_path / "int4", tmp_path / "model.gguf", "gguf")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["olmo2", "olmo3", "gpt-oss"])
def test_a_tied_head_is_written_where_llama_cpp_wants_one(family, dtype, tmp_path):
    folder = folder_of(tmp_path, family, DTYPES[dtype], tie_word_embeddings=True)
    convert(folder, tmp_path / "model.gguf", "gguf")
    tied = weights_of(folder)
    head = {"lm_head.weight": tied["model.embed_tokens.weight"]}
    assert_same_weights(weights_of(tmp_path / "model.gguf"), tied | head)


@pytest.mark.parametrize(
    ("family", "cap"),
    [
        ("gemma2", "attn_logit_softcapping"),
        ("gemma2", "final_logit_softcapping"),
        ("gemma4", "final_logit_softcapping"),
    ],
)
def test_gemma_without_a_cap_is_refused(family, cap, tmp_path):
    """Of a file without one llama.cpp takes 50 for scores and 30 for logits."""
    folder = random_checkpoint(tmp_path / "folder", family, dtype=torch.bfloat16, **{cap: None})
    with pytest.raises(RequestError, match=f"{cap} is null, and of a file without it llama.cpp takes a number"):
        convert(folder, tmp_path / "model.gguf", "gguf")


def test_caps_that_gemma_2_s_config_json_leaves_out_are_written(tmp_path):
    sizes = {"dtype": torch.bfloat16, "head_dim": 16, "query_pre_attn_scalar": 16}
    convert(random_checkpoint(tmp_path / "folder", "gemma2", **sizes), tmp_path / "model.gguf", "gguf")
    metadata = GgufCheckpoint(tmp_path / "model.gguf").files[0].metadata
    assert [metadata[f"gemma2.{name}_logit_softcapping"] for name in ("attn", "final")] == [50, 30]


def test_dense_blocks_beside_experts_are_refused_where_the_metadata_say_one_kind(tmp_path):
    folder = random_checkpoint(tmp_path / "folder", "nemotronh", dtype=torch.bfloat16)
    with pytest.raises(RequestError, match="experts in all layers that do not mix, or in none"):
        convert(folder, tmp_path / "model.gguf", "gguf")
