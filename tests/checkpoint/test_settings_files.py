"""Folders from older libraries: separate settings files, other names of weights, no index."""

import json

import pytest
import torch
from quantized_forms import CT, IDS, awq, drawn, e4m3, fields, gptq, made, packed_ct, scales_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AutoQuantizationConfig

import onward
from onward.checkpoint import CheckpointFolder
from onward.checkpoint.formats import methods_of
from onward.errors import CheckpointError, ConfigError, OnwardWarning, TokenizerError
from onward.testing import random_checkpoint
from tiny_checkpoint import change_json, make_checkpoint, read_json, refused

pytestmark = pytest.mark.filterwarnings("ignore:.*become floats:onward.errors.OnwardWarning")

AUTO_GPTQ = {
    "bits": 4,
    "group_size": 32,
    "damp_percent": 0.01,
    "desc_act": False,
    "sym": True,
    "true_sequential": True,
    "model_name_or_path": None,
    "model_file_base_name": "gptq_model-4bit-32g",
}
AUTO_AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}


def same(folder, twin):
    expected = onward.load(twin, dtype="float32").logits(IDS)
    assert torch.equal(onward.load(folder, dtype="float32").logits(IDS), expected)


@pytest.mark.parametrize(
    ("file", "settings", "form"),
    [("quantize_config.json", AUTO_GPTQ, gptq), ("quant_config.json", AUTO_AWQ, awq)],
    ids=["AutoGPTQ", "AutoAWQ"],
)
def test_settings_files_next_to_config_json_are_read(tmp_path, file, settings, form):
    folder, twin = made(tmp_path, ({}, form))
    change_json(folder / "config.json", quantization_config=...)
    (folder / file).write_text(json.dumps(settings))
    same(folder, twin)
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-32g.safetensors")
    same(folder, twin)
    (folder / file).write_text("[]")
    with refused(ConfigError, file, "object"):
        onward.load(folder)


def test_quantization_config_takes_precedence_over_a_separate_file(tmp_path):
    folder, twin = made(tmp_path, "gptq")
    (folder / "quantize_config.json").write_text(json.dumps(AUTO_GPTQ | {"bits": 8}))
    same(folder, twin)


# ── weights without an index ──────────────────────────────────────────────────────────────────────────────────


def test_shards_without_an_index_are_read_by_their_numbers(tmp_path):
    folder = make_checkpoint(tmp_path)
    expected = onward.load(folder).logits([1, 2])
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    first, second = (folder / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    save_file({name: tensors[name] for name in names[:5]}, first)
    with refused(CheckpointError, "no weights", first.name):
        onward.load(folder)
    save_file({name: tensors[name] for name in names[5:]}, second)
    assert torch.equal(onward.load(folder).logits([1, 2]), expected)
    save_file({name: tensors[name] for name in names[4:]}, second)
    with refused(CheckpointError, names[4], first.name, second.name, "there is no"):
        onward.load(folder)


# ── a template of its own ─────────────────────────────────────────────────────────────────────────────────────


def test_a_processors_template_is_read_if_the_tokenizer_has_none(tmp_path):
    folder = make_checkpoint(tmp_path)
    change_json(folder / "tokenizer_config.json", chat_template=...)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "A"}))
    assert CheckpointFolder(folder).chat_template.sources == ("A",)
    change_json(folder / "tokenizer_config.json", chat_template="B")
    assert CheckpointFolder(folder).chat_template.sources == ("B",)


@pytest.mark.parametrize("file", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_the_error_for_another_tokenizer_format_explains_how_to_convert_it(tmp_path, file):
    folder = make_checkpoint(tmp_path)
    (folder / "tokenizer.json").rename(folder / file)
    with pytest.warns(OnwardWarning, match=f"{file} is not supported.*AutoTokenizer"):
        lm = onward.load(folder)
    with refused(TokenizerError, "tokenizer.json"):
        lm.encode("Hi")
    assert len(lm.logits([1, 2])) == 2


# ── layers of two kinds ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "types",
    [
        None,
        ["sliding_attention", "full_attention"],
        ["full_attention", "sliding_attention"],
        ["full_attention", "full_attention"],
        ["sliding_attention", "sliding_attention"],
    ],
    ids=str,
)
def test_layer_types_of_mistral_equal_transformers(tmp_path, types):
    folder = random_checkpoint(
        tmp_path, "mistral", sliding_window=4, **({} if types is None else {"layer_types": types})
    )
    ids = torch.arange(1, 17)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    torch.testing.assert_close(onward.load(folder, dtype="float32").logits(ids.tolist()), expected, rtol=0, atol=1e-4)


# ── a head of its own ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_differing_tied_head_is_used_as_in_transformers(tmp_path):
    folder = make_checkpoint(tmp_path, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="they are not tied"):
        lm = onward.load(folder, dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([[1, 2, 3]])).logits[0]
    torch.testing.assert_close(lm.logits([1, 2, 3]), expected, rtol=0, atol=1e-4)
    change_json(folder / "config.json", tie_word_embeddings=False)
    assert torch.equal(onward.load(folder, dtype="float32").logits([1, 2, 3]), lm.logits([1, 2, 3]))


def test_a_base_model_with_a_tied_head_is_a_language_model(tmp_path):
    folder = make_checkpoint(tmp_path, tie_word_embeddings=True)
    expected = onward.load(folder).logits([1, 2])
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    change_json(folder / "config.json", architectures=["LlamaModel"])
    assert torch.equal(onward.load(folder).logits([1, 2]), expected)
    assert read_json(folder / "config.json")["architectures"] == ["LlamaModel"]


# ── forms of quantized weights ────────────────────────────────────────────────────────────────────────────────

WIDE = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 32, "num_attention_heads": 4}


def of_groups(group=128, **more):
    weights = {"num_bits": 4, "group_size": group, "strategy": "group"} | more
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


def uneven(outputs, inputs, seed, group=128):
    """192 inputs are a group of 128 and one of 64, and not two of 96."""
    codes, scales = drawn((outputs, inputs), 0, 16, seed), scales_of((outputs, -(-inputs // group)), seed).bfloat16()
    weight = (codes - 8) * scales.float().repeat_interleave(group, dim=1)[:, :inputs]
    return {"weight_packed": fields(codes, 4, 1), "weight_scale": scales}, weight


def unset_order(outputs, inputs, seed):
    tensors, weight = packed_ct(outputs, inputs, seed)
    return tensors | {"weight_g_idx": torch.full((inputs,), -1, dtype=torch.int32)}, weight


def plain_zeros(outputs, inputs, seed):
    tensors, weight = packed_ct(outputs, inputs, seed)
    zeros = drawn(tuple(tensors["weight_scale"].shape), -8, 8, seed + 3)
    shift = zeros.repeat_interleave(32, dim=1) * tensors["weight_scale"].float().repeat_interleave(32, dim=1)
    return tensors | {"weight_zero_point": zeros.to(torch.int8)}, weight - shift


def fp8_of_one(outputs, inputs, seed):
    codes, scale = e4m3((outputs, inputs), seed), torch.full((1, 1), 0.01 + 0.001 * seed)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_by_rows(outputs, inputs, seed):
    codes, scales = e4m3((outputs, inputs), seed), scales_of((outputs, 1), seed)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


@pytest.mark.parametrize(
    ("settings", "form"),
    [
        (of_groups(), uneven),
        (of_groups(32), unset_order),
        (of_groups(32), plain_zeros),
        ({"quant_method": "compressed-tensors", "config_groups": {"W4A16": ["Linear"]}}, packed_ct),
        (of_groups(32, block_structure="128x128"), packed_ct),
        ({"quant_method": "fp8"}, fp8_of_one),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_by_rows),
    ],
    ids=["uneven groups", "order not set", "plain zeros", "preset", "block as text", "[1, 1]", "fbgemm"],
)
def test_formats_of_older_versions_give_the_same_weights(tmp_path, settings, form):
    same(*made(tmp_path, (settings, form), WIDE))
    method, (tensors, weight) = methods_of({"quantization_config": settings}).of("module"), form(64, 192, 1)
    stored = method.decode(tensors.__getitem__, method.parts(set(tensors)), (64, 192))
    packed = stored.packed(torch.bfloat16)
    assert packed is not None
    assert torch.equal(packed.to(dtype=torch.float32).dequantize(), weight)


@pytest.mark.parametrize(
    ("settings", "form", "words"),
    [
        (of_groups(64), uneven, ("groups of 64", "2 scales")),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, gptq, ("groups of 128", "scales")),
        ({"quant_method": "gptq", "bits": 4}, gptq, ("groups of 128", "scales")),
    ],
    ids=["compressed-tensors", "gptq", "gptq, size not said"],
)
def test_a_group_size_that_contradicts_the_scales_is_an_error(tmp_path, settings, form, words):
    folder, _ = made(tmp_path, (settings, form), WIDE if form is uneven else {**WIDE, "hidden_size": 128})
    with refused(CheckpointError, *words):
        onward.load(folder)


@pytest.mark.parametrize(
    "groups", [["Linear"], {"g": {"weights": "int4"}}, {"g": {"weights": {"block_structure": "128"}}}], ids=str
)
def test_other_kinds_of_groups_are_refused(tmp_path, groups):
    folder, _ = made(tmp_path, (CT | {"config_groups": groups}, packed_ct))
    with refused(ConfigError, "config_groups" if "128" not in str(groups) else "block_structure"):
        onward.load(folder)


NUMBERS = {
    "gptq": {"bits": 4, "group_size": 32},
    "awq": {"bits": 4, "group_size": 32},
    "auto-round": {"bits": 4, "group_size": 32},
    "compressed-tensors": of_groups(32),
    "fp8": {"weight_block_size": [48, 40]},
}


def as_text(value):
    """Every way to write one whole number of the settings as text."""
    if isinstance(value, int):
        yield str(value)
    elif isinstance(value, dict | list):
        for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
            for changed in as_text(part):
                copy = value.copy()
                copy[key] = changed
                yield copy


@pytest.mark.parametrize("method", NUMBERS)
def test_a_number_written_as_text_is_an_error(method):
    settings = {"quant_method": method} | NUMBERS[method]
    assert methods_of({"quantization_config": settings})
    wrong = list(as_text(settings))
    assert wrong
    for each in wrong:
        with refused(ConfigError, "quantization_config", "got", "'"):
            methods_of({"quantization_config": each})


@pytest.mark.parametrize("method", ["GPTQ", "Awq", "FP8"])
def test_method_names_in_capitals_are_refused_as_in_transformers(method):
    with pytest.raises(ValueError, match="Unknown quantization type"):
        AutoQuantizationConfig.from_dict({"quant_method": method})
    with refused(ConfigError, repr(method), "gptq"):
        methods_of({"quantization_config": {"quant_method": method, "bits": 4}})
