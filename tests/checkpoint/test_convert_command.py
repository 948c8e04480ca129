"""A converted model has the same numbers: in Onward, in transformers, and in llama.cpp's own reader."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import MODELS, write_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import onward
from onward.checkpoint import GgufCheckpoint
from onward.checkpoint.convert import convert
from onward.checkpoint.gguf.export import WRITTEN as LINES
from onward.checkpoint.gguf.export import export_family as line_of
from onward.checkpoint.gguf.export import model_tensors
from onward.checkpoint.stored_names import with_stacked_experts
from onward.errors import ConfigError, RequestError
from onward.language_model import quantize_folder
from onward.models import FAMILIES as ARCHITECTURES
from onward.testing import random_checkpoint

FAMILIES = [name.removesuffix("ForCausalLM").lower() for name in ARCHITECTURES if name.endswith("ForCausalLM")]
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
# Whole groups of 32 inputs.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def logits(source):
    return onward.load(source, compile="eager").logits(IDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
def test_conversion_to_gguf_and_back_keeps_the_bits(family, dtype, tmp_path):
    options = {"rope_parameters": LLAMA3, "rope_theta": 500000.0} if family == "llama" else {}
    options |= {"sliding_window": None} if family == "mistral" else {}
    source = random_checkpoint(tmp_path / "source", family, dtype=dtype, **SIZES, **options)
    convert(source, tmp_path / "model.gguf", "gguf")
    assert torch.equal(logits(tmp_path / "model.gguf"), logits(source))
    convert(tmp_path / "model.gguf", tmp_path / "back", "safetensors")
    assert torch.equal(logits(tmp_path / "back"), logits(source))
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert reader.fields["general.architecture"].contents() == {"mistral": "llama"}.get(family, family)


WRITTEN = ["llama", "mixtral", "qwen2", "qwen3", "qwen3moe", "phi3", "phi3 for long texts", "olmo2", "olmo3", "exaone4"]
WRITTEN += ["granite", "granitemoe", "smollm3", "seed_oss"]

# Of which llama.cpp opens no file without a head: a tied one is written as a copy of the embedding.
UNTIED = ["olmo2", "olmo3"]


@pytest.mark.parametrize("family", WRITTEN)
def test_gguf_files_equal_those_of_llama_cpps_converter(family, tmp_path):
    """Names and keys equal those written by llama.cpp's package; reading the file back gives the bits of the folder."""
    tied = family not in UNTIED
    config, twin = write_model(tmp_path / "theirs.gguf", family, "F32", tie_word_embeddings=tied)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in twin.items()}
    save_file(weights, folder / "model.safetensors")
    convert(folder, tmp_path / "ours.gguf", "gguf")
    ours, theirs = (gguf.GGUFReader(tmp_path / name) for name in ("ours.gguf", "theirs.gguf"))
    shapes = [{tensor.name: tensor.shape.tolist() for tensor in reader.tensors} for reader in (ours, theirs)]
    assert shapes[0] == shapes[1]
    missing = theirs.fields.keys() - ours.fields.keys()
    # Keys that llama.cpp can do without: the window is 0, and of Qwen3-MoE the experts' weights always make 1.
    assert missing <= {"phi3.attention.sliding_window", "qwen3moe.expert_weights_norm"}
    for key, field in theirs.fields.items():
        if key in ours.fields and not key.startswith(("GGUF.", "general.")):
            assert ours.fields[key].contents() == field.contents(), key
            assert ours.fields[key].types == field.types, key
    convert(tmp_path / "ours.gguf", tmp_path / "back", "safetensors", dtype=torch.bfloat16)
    back = load_file(tmp_path / "back" / "model.safetensors")
    weights = with_stacked_experts(weights, *config["architectures"])
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weight) for name, weight in weights.items())


def written(tmp_path, family, **options):
    """The metadata and the types of tensors of a GGUF file that is written of a folder without a tokenizer."""
    source = random_checkpoint(tmp_path / "source", family, **options)
    convert(source, tmp_path / "model.gguf", "gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    return metadata, {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}


def test_a_model_without_a_tokenizer_is_marked_for_llama_cpp(tmp_path):
    assert written(tmp_path, "qwen3")[0]["tokenizer.ggml.model"] == "none"


def test_granites_default_factors_are_written(tmp_path):
    """llama.cpp's own defaults are others, or none."""
    factors = "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"
    metadata, _ = written(tmp_path, "granite", **dict.fromkeys(factors))
    for key in ("attention.scale", "embedding_scale", "residual_scale", "logit_scale"):
        assert metadata[f"granite.{key}"] == 1.0


def read_without(file, key: str) -> dict:
    """config.json of a file, as if it lacked a key."""
    checkpoint = GgufCheckpoint(file)
    del checkpoint.files[0].metadata[key]
    return checkpoint.config


@pytest.mark.parametrize("family", ["granite", "granitemoe"])
def test_granite_without_attention_multiplier_has_llama_cpps_default(family, tmp_path):
    written(tmp_path, family, head_dim=32, attention_multiplier=0.5)
    config = read_without(tmp_path / "model.gguf", f"{family}.attention.scale")
    assert config["attention_multiplier"] == 32**-0.5


@pytest.mark.parametrize(("mixed", "taken"), [(1.0, True), (-1.0, True), (0.5, False), (0.0, False)])
def test_unsupported_yarn_ramps_are_refused(mixed, taken, tmp_path):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    written(tmp_path, "qwen3", rope_parameters=yarn)
    checkpoint = GgufCheckpoint(tmp_path / "model.gguf")
    checkpoint.files[0].metadata["qwen3.rope.scaling.yarn_ext_factor"] = mixed
    if taken:
        assert checkpoint.config["rope_parameters"]["rope_type"] == "yarn"
    else:
        with pytest.raises(ConfigError, match=rf"yarn_ext_factor is {mixed}, and only 1 is supported"):
            assert checkpoint.config


@pytest.mark.parametrize(("factor", "times"), [(None, None), (0.1 * np.log(4) + 1, None), (1.2, 1.2)])
def test_yarns_magnitude_is_written_as_llama_cpp_reads_it(factor, times, tmp_path):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    yarn |= {"beta_fast": 16.0, "beta_slow": 2.0} | ({} if factor is None else {"attention_factor": float(factor)})
    metadata, _ = written(tmp_path, "qwen3", rope_parameters=yarn)
    found = {key.removeprefix("qwen3.rope.scaling."): value for key, value in metadata.items() if ".scaling." in key}
    assert (found["yarn_beta_fast"], found["yarn_beta_slow"]) == (16, 2)
    assert found.get("yarn_attn_factor") == (None if factor is None else pytest.approx(factor))
    assert found.get("attn_factor") == (None if times is None else pytest.approx(times / (0.1 * np.log(4) + 1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", UNTIED)
def test_a_tied_head_is_written_where_llama_cpp_needs_one(family, dtype, tmp_path):
    source = random_checkpoint(tmp_path / "source", family, dtype=dtype, tie_word_embeddings=True)
    convert(source, tmp_path / "model.gguf", "gguf")
    convert(tmp_path / "model.gguf", tmp_path / "back", "safetensors")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(back["lm_head.weight"], back["model.embed_tokens.weight"])
    assert torch.equal(logits(tmp_path / "model.gguf"), logits(source))


OTHERS = [family for family in FAMILIES if f"{family}forcausallm" not in {name.lower() for name in LINES}]


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_refused_by_name_before_any_work(family, tmp_path):
    """The weights are not read: the folder has none."""
    source = random_checkpoint(tmp_path / "source", family)
    (source / "model.safetensors").unlink()
    words = r"ForCausalLM cannot be written as GGUF; these can: LlamaForCausalLM.*--to safetensors.*convert_hf_to_gguf"
    with pytest.raises(RequestError, match=words):
        convert(source, tmp_path / "x.gguf", "gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(("format", "type"), [("int4", "Q4_0"), ("iq4_nl", "IQ4_NL")])
def test_4_bit_types_keep_the_same_numbers(tmp_path, format, type):
    source = random_checkpoint(tmp_path / "source", "llama", dtype=torch.bfloat16, **SIZES)
    quantize_folder(source, tmp_path / "small", format)
    convert(tmp_path / "small", tmp_path / "model.gguf", "gguf")
    assert torch.equal(logits(tmp_path / "model.gguf"), logits(tmp_path / "small"))
    (stored,) = (
        tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors if tensor.name == "blk.0.ffn_up.weight"
    )
    assert stored.tensor_type.name == type
    up = onward.load(tmp_path / "small").model.params.layers[0].feed_forward.up_proj.weight
    assert np.array_equal(gguf.dequantize(stored.data, stored.tensor_type), up.to(dtype=torch.float32).dequantize())


def test_experts_in_int4_are_one_tensor_of_q4_0(tmp_path):
    widths = {"moe_intermediate_size": 32, "norm_topk_prob": True}
    source = random_checkpoint(tmp_path / "source", "qwen3moe", dtype=torch.bfloat16, **widths, **SIZES)
    quantize_folder(source, tmp_path / "int4", "int4")
    convert(tmp_path / "int4", tmp_path / "model.gguf", "gguf")
    assert torch.equal(logits(tmp_path / "model.gguf"), logits(tmp_path / "int4"))
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert stored["blk.0.ffn_up_exps.weight"].tensor_type.name == "Q4_0"
    config = json.loads((source / "config.json").read_text())
    names = [f"model.layers.0.mlp.experts.{expert}.up_proj.weight" for expert in range(2)]
    mixed = {names[0]: torch.ones(32, 64), names[1]: torch.ones(32, 64, dtype=torch.bfloat16)}
    with pytest.raises(RequestError, match=r"blk\.0\.ffn_up_exps\.weight: .* types F32 and BF16"):
        model_tensors(line_of(config), config, mixed)


@pytest.mark.parametrize("type", ["Q4_0", "Q8_0", "Q6_K", "BF16"])
def test_gguf_weights_become_floats_that_transformers_reads(type, tmp_path):
    _, twin = write_model(tmp_path / "model.gguf", "llama", type)
    convert(tmp_path / "model.gguf", tmp_path / "folder", "safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, twin[name]), name
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("llama", "bfloat16" if type == "BF16" else "float32")


def floats_of(tmp_path, family) -> tuple[Path, dict]:
    """A folder of safetensors that is made of a GGUF file, and its config.json."""
    tied = family.startswith("gemma")  # Gemma's head always is
    write_model(tmp_path / "model.gguf", family, "F32", tie_word_embeddings=tied)
    folder = convert(tmp_path / "model.gguf", tmp_path / "folder", "safetensors")
    return folder, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("family", MODELS)
def test_the_model_type_of_a_gguf_file_is_transformers(family, tmp_path):
    _, config = floats_of(tmp_path, family)
    assert [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]] == config["architectures"]


# Of LongRoPE transformers takes the factors of short texts here: docs/decisions/0003-dynamic-rope.md.
@pytest.mark.parametrize("family", [family for family in MODELS if family != "phi3 for long texts"])
def test_transformers_reads_converted_gguf_files(family, tmp_path):
    """Both compute in float32, whose 2**-24 grows to 1e-4 of a logit at most in two to six small layers."""
    folder, _ = floats_of(tmp_path, family)
    # transformers' own pad_token_id of some families lies outside so small a vocabulary.
    floats = {"dtype": torch.float32, "attn_implementation": "eager", "pad_token_id": None}
    theirs = AutoModelForCausalLM.from_pretrained(folder, **floats).eval()
    with torch.no_grad():
        assert (theirs(torch.tensor([IDS])).logits[0] - logits(folder)).abs().max() < 1e-4


@pytest.mark.parametrize("format", ["int8", "int4", "iq4_nl"])
def test_quantized_folders_become_floats_of_the_same_numbers(format, tmp_path):
    source = random_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    quantize_folder(source, tmp_path / "small", format)
    convert(tmp_path / "small", tmp_path / "floats", "safetensors")
    small, floats = (onward.load(tmp_path / name).model.params for name in ("small", "floats"))
    up = floats.layers[1].feed_forward.up_proj.weight
    assert torch.equal(
        up if isinstance(up, torch.Tensor) else up.unpack(), small.layers[1].feed_forward.up_proj.weight.dequantize()
    )
    convert(tmp_path / "small", tmp_path / "half", "safetensors", dtype=torch.bfloat16)
    assert onward.load(tmp_path / "half").model.params.norm.dtype == torch.bfloat16


def test_the_demo_model_survives_a_round_trip_through_gguf(tmp_path):
    convert("demo", tmp_path / "demo.gguf", "gguf")
    convert(tmp_path / "demo.gguf", tmp_path / "back", "safetensors")
    demo, file, back = (onward.load(source) for source in ("demo", tmp_path / "demo.gguf", tmp_path / "back"))
    text = "Once upon a time, there were 12 naïve robots.\n  They said: 'Hi!' 猫 <|endoftext|>"
    assert demo.encode(text) == file.encode(text) == back.encode(text)
    answers = [
        lm.chat([{"role": "user", "content": "Hi"}], temperature=0, max_new_tokens=20) for lm in (demo, file, back)
    ]
    assert len({answer.text for answer in answers}) == 1
    assert demo.defaults.eos == file.defaults.eos == back.defaults.eos
    for name in ("temperature", "top_k", "top_p", "min_p"):
        ours, theirs, again = (getattr(lm.defaults, name) for lm in (demo, file, back))
        assert theirs == again == pytest.approx(ours, rel=2**-24), name


def test_a_greedy_checkpoint_writes_no_sampling_defaults(tmp_path):
    source = random_checkpoint(tmp_path / "source", **SIZES)
    (source / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    convert(source, tmp_path / "model.gguf", "gguf")
    assert onward.load(tmp_path / "model.gguf").defaults.temperature == 0


def test_an_unwritable_destination_is_refused(tmp_path):
    source = random_checkpoint(tmp_path / "source", **SIZES)
    for to in ("gguf", "safetensors"):
        with pytest.raises(RequestError, match=r"x cannot be written, because .*config\.json is not a writable folder"):
            convert(source, source / "config.json" / "x", to)


def test_unsupported_content_is_refused_and_nothing_is_left(tmp_path):
    source = random_checkpoint(tmp_path / "source", **SIZES)
    quantize_folder(source, tmp_path / "int8", "int8")
    window = random_checkpoint(tmp_path / "window", "mistral", sliding_window=7, **SIZES)
    experts = random_checkpoint(tmp_path / "experts", "lfm2moe")
    for path, complaint in [
        (tmp_path / "int8", "no GGUF type holds int8 .*: choose a float dtype"),
        (window, "GGUF metadata cannot express its config.json"),
        (experts, "Lfm2MoeForCausalLM cannot be written as GGUF; these can: LlamaForCausalLM"),
    ]:
        with pytest.raises(RequestError, match=complaint):
            convert(path, tmp_path / "x.gguf", "gguf")
    convert(tmp_path / "int8", tmp_path / "floats.gguf", "gguf", dtype=torch.bfloat16)
    with pytest.raises(RequestError, match="already exists"):
        convert(source, tmp_path / "floats.gguf", "gguf")
    with pytest.raises(RequestError, match="is already GGUF"):
        convert(tmp_path / "floats.gguf", tmp_path / "x.gguf", "gguf")
    with pytest.raises(RequestError, match="safetensors or gguf; got 'onnx'"):
        convert(source, tmp_path / "x", "onnx")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".", "x"))]


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_of_any_family_are_still_read(family, tmp_path):
    source = random_checkpoint(tmp_path / "source", family)
    convert(source, tmp_path / "again", "safetensors")
    assert torch.equal(logits(tmp_path / "again"), logits(source))


@pytest.mark.parametrize("to", ["gguf", "safetensors"])
def test_weights_of_mixed_dtypes_keep_their_bits(to, tmp_path):
    """Float32 norms among bfloat16 matrices, as some checkpoints have them, and all GGUF files of floats."""
    source = random_checkpoint(tmp_path / "source", dtype=torch.bfloat16)
    mixed = load_file(source / "model.safetensors")
    mixed |= {name: 1 + torch.rand(weight.shape) for name, weight in mixed.items() if name.endswith("norm.weight")}
    save_file(mixed, source / "model.safetensors")
    converted = convert(source, tmp_path / "new.gguf", to)
    if to == "gguf":
        converted = convert(converted, tmp_path / "back", "safetensors")
    back = load_file(converted / "model.safetensors")
    assert back.keys() == mixed.keys()
    for name, weight in mixed.items():
        assert back[name].dtype == weight.dtype, name
        assert torch.equal(back[name], weight), name
    onward.load(converted).logits(IDS)
