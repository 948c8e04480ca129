"""Settings of quantized checkpoints: zero points of every width, rules by module, tensors without effect."""

import pytest
import torch
from quantized_forms import (
    CT,
    IDS,
    SHAPES,
    awq,
    change_config,
    drawn,
    fp8_blocks,
    gptq,
    made,
    nf4,
    packed_ct,
    scales_of,
)
from safetensors.torch import load_file, save_file

import onward
from onward.checkpoint.formats import bitsandbytes, compressed_tensors, fp8, methods_of
from onward.checkpoint.formats import gptq as gptq_module
from onward.checkpoint.formats.stored import unpacked
from onward.errors import CheckpointError, ConfigError
from tiny_checkpoint import change_json, read_json, write_json

pytestmark = pytest.mark.filterwarnings("ignore:.*become floats")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


def same(folder, twin):
    return torch.equal(onward.load(folder).logits(IDS), onward.load(twin).logits(IDS))


def stream(values, bits):
    """int32: whole numbers as one stream of bits along the first dimension, written out bit by bit."""
    rows, columns = values.shape
    packed = torch.zeros(rows * bits // 32, columns, dtype=torch.int64)
    for row in range(rows):
        for bit in range(bits):
            place = row * bits + bit
            packed[place // 32] |= ((values[row] >> bit) & 1).long() << (place % 32)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def gptq_of(bits, *, stored_is_zero=False, extremes=True):
    """GPTQ whose zero points are the least, the greatest and others, packed bit by bit."""

    def quantize(outputs, inputs, seed):
        codes = drawn((inputs, outputs), 0, 2**bits, seed)
        zeros = drawn((inputs // 32, outputs), 0, 2**bits, seed + 1)
        if extremes:
            zeros[:, ::3], zeros[:, 1::3] = 0, 2**bits - 1
        scales = scales_of(zeros.shape, seed).half()
        stored = zeros if stored_is_zero else (zeros - 1) & (2**bits - 1)
        groups = torch.arange(inputs) // 32
        tensors = {"qweight": stream(codes, bits), "qzeros": stream(stored.T, bits).T, "scales": scales}
        return tensors, ((codes - zeros[groups]).float() * scales.float()[groups]).T

    return quantize


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_zero_points_of_every_value(tmp_path, bits, version):
    quantize = gptq_of(bits, stored_is_zero=version == "gptq_v2")
    assert same(*made(tmp_path, (GPTQ | {"bits": bits, "checkpoint_format": version}, quantize)))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_packed_fields_of_every_width_are_unpacked(bits, dim):
    values = drawn((96, 64), 0, 2**bits, bits)
    packed = stream(values, bits) if dim == 0 else stream(values.T, bits).T
    assert torch.equal(unpacked(packed, bits, dim), values.to(torch.int32))


def mixed(tmp_path, settings, maker_of):
    """A checkpoint whose modules are made by `maker_of(name)`; a module without a maker stays in floats."""
    folder, twin = made(tmp_path, (settings, lambda n, k, seed: gptq(n, k, seed)))
    floats = load_file(twin / "model.safetensors")
    tensors = {name: tensor for name, tensor in floats.items() if not name.endswith("_proj.weight")}
    for seed, name in enumerate(sorted(set(floats) - set(tensors))):
        module = name.removesuffix(".weight")
        maker = maker_of(module)
        if maker is None:
            tensors[name] = floats[name]
            continue
        parts, floats[name] = maker(*floats[name].shape, seed)
        tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, twin / "model.safetensors")
    save_file(tensors, folder / "model.safetensors")
    return folder, twin


def test_dynamic_rules_override_settings_per_module(tmp_path):
    rules = {
        "-:.*\\.o_proj": {},
        "+:model\\.layers\\.1\\.mlp\\.down": {"bits": 8, "group_size": 64, "sym": True, "desc_act": True},
        ".*down_proj": {"bits": 2},
        "+:.*layers\\.0.*q_proj": {"checkpoint_format": "gptq_v2"},
    }

    def maker(module):
        if module.endswith("o_proj"):
            return None
        if module.endswith("1.mlp.down_proj"):
            return lambda *shape: gptq(*shape, bits=8, group=64, ordered=True)
        if module.endswith("down_proj"):
            return lambda *shape: gptq(*shape, bits=2)
        return lambda *shape: gptq(*shape, added=0 if module.endswith("0.self_attn.q_proj") else 1)

    assert same(*mixed(tmp_path, GPTQ | {"dynamic": rules}, maker))


@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:gptqmodel"])
def test_auto_round_reads_each_packing_format(tmp_path, packing):
    extra = {"model.layers.0.mlp.down_proj": {"bits": 16}, ".*v_proj": {"group_size": 64}, "lm_head": {"bits": 16}}
    quantize = awq if "awq" in packing else lambda *shape, **own: gptq(*shape, added="auto_gptq" in packing, **own)

    def maker(module):
        if module.endswith("0.mlp.down_proj"):
            return None
        return lambda *shape: quantize(*shape, group=64 if module.endswith("v_proj") else 32)

    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "extra_config": extra}
    settings |= {"packing_format": packing, "data_type": "int", "autoround_version": "0.5.1", "iters": 200}
    assert same(*mixed(tmp_path, settings, maker))


def test_a_quantized_head_is_read(tmp_path):
    folder, twin = made(tmp_path, (GPTQ | {"lm_head": True}, gptq), SHAPES | {"vocab_size": 256})
    tensors, floats = (load_file(at / "model.safetensors") for at in (folder, twin))
    del tensors["lm_head.weight"]
    parts, floats["lm_head.weight"] = gptq(256, 64, 5)
    tensors |= {f"lm_head.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, twin / "model.safetensors")
    assert same(folder, twin)


@pytest.mark.parametrize("form", ["gptq", "awq", "fp8", "nf4", "int-quantized"])
def test_zero_biases_are_dropped_and_others_refused(tmp_path, form):
    folder, twin = made(tmp_path, form)
    tensors = load_file(folder / "model.safetensors")
    biases = {f"model.layers.0.{name}.bias": torch.zeros(64).half() for name in ("self_attn.q_proj", "mlp.down_proj")}
    save_file(tensors | biases, folder / "model.safetensors")
    assert same(folder, twin)
    biases["model.layers.0.mlp.down_proj.bias"][3] = 1
    save_file(tensors | biases, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"does not describe, such as 'model\.layers\.0\.mlp\.down_proj\.bias'"):
        onward.load(folder)
    # A bias of a layer that is not quantized is no leftover of a quantizer.
    save_file(tensors | {"model.norm.bias": torch.zeros(64)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model\.norm\.bias'"):
        onward.load(folder)


CACHE_SCALES = (
    *("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "attn.k_scale", "attn.v_scale"),
    *("k_proj.k_scale", "v_proj.v_scale", "k_proj.output_scale", "v_proj.output_scale", "q_proj.output_scale"),
    *("k_proj.output_zero_point", "k_zero_point", "v_zero_point", "prob_output_scale"),
)


@pytest.mark.parametrize("form", ["fp8", "float-quantized by block", "int-quantized", "gptq", "pack-quantized"])
def test_cache_and_activation_scales_change_nothing(tmp_path, form):
    folder, twin = made(tmp_path, form)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.{i}.self_attn.{name}": torch.tensor([0.37]) for i in range(2) for name in CACHE_SCALES}
    if form == "fp8":
        tensors |= {f"model.layers.{i}.mlp.up_proj.input_scale": torch.tensor(0.2) for i in range(2)}
    save_file(tensors, folder / "model.safetensors")
    if form in ("fp8", "float-quantized by block"):
        change_config(folder, kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True})
    assert same(folder, twin)


def test_cache_scales_of_unquantized_models_are_refused(tmp_path):
    _, twin = made(tmp_path, "fp8")
    tensors = load_file(twin / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.k_scale": torch.ones(1)}, twin / "model.safetensors")
    with pytest.raises(CheckpointError, match="k_scale"):
        onward.load(twin)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), "rows", "rows, 1"])
@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_fp8_with_a_scale_per_tensor_or_row(tmp_path, shape, method):
    def quantize(outputs, inputs, seed):
        codes = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)
        of_rows = {"rows": (outputs,), "rows, 1": (outputs, 1)}
        scale = scales_of(of_rows.get(shape, shape), seed)
        weight = codes.float() * (scale.view(-1, 1) if scale.numel() > 1 else scale.view(1, 1))
        return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, weight

    settings = {"quant_method": method} | ({"activation_scheme": "static"} if method == "fp8" else {})
    assert same(*made(tmp_path, (settings, quantize)))


def test_fp8_with_scales_that_are_exponents(tmp_path):
    def quantize(outputs, inputs, seed):
        tensors, _ = fp8_blocks(outputs, inputs, seed)
        scale = tensors["weight_scale_inv"].to(torch.float8_e8m0fnu)
        factors = scale.float().repeat_interleave(48, 0).repeat_interleave(40, 1)[:outputs, :inputs]
        return tensors | {"weight_scale_inv": scale}, tensors["weight"].float() * factors

    settings = {"quant_method": "fp8", "weight_block_size": [48, 40], "scale_fmt": "ue8m0", "fmt": "e4m3"}
    assert same(*made(tmp_path, (settings, quantize)))


@pytest.mark.parametrize("storage", ["uint8", "int8", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("nested", [False, True])
def test_nf4_in_every_storage(tmp_path, storage, nested):
    def quantize(outputs, inputs, seed):
        tensors, weight = nf4(outputs, inputs, seed, nested=nested)
        stored = tensors["weight"].flatten().view(getattr(torch, storage)).unsqueeze(1)
        return tensors | {"weight": stored}, weight

    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": storage}
    assert same(*made(tmp_path, (settings | {"llm_int8_skip_modules": ["lm_head"]}, quantize)))


def test_tiled_int8_of_bitsandbytes_is_refused(tmp_path):
    folder, twin = made(tmp_path, "int8 of bitsandbytes")
    tensors = load_file(folder / "model.safetensors")
    formats = {f"{name.removesuffix('.SCB')}.weight_format": 0 for name in tensors if name.endswith(".SCB")}
    for value in (0, 1):
        tiles = {name: torch.tensor(value, dtype=torch.uint8) for name in formats}
        save_file(tensors | tiles, folder / "model.safetensors")
        if value == 0:
            assert same(folder, twin)
        else:
            with pytest.raises(CheckpointError, match="weight_format"):
                onward.load(folder)


@pytest.mark.parametrize("bits", [3, 5, 6, 7, 8])
def test_packed_widths_that_do_not_divide_a_word(tmp_path, bits):
    """7 bits are packed into as many words as 8: num_bits tells them apart."""

    def quantize(outputs, inputs, seed):
        tensors, _ = packed_ct(outputs, inputs, seed, bits=8)
        codes = drawn((outputs, inputs), 0, 2**bits, seed)
        each = 32 // bits
        filled = torch.nn.functional.pad(codes, (0, -inputs % each)).view(outputs, -1, each)
        packed = (filled << (torch.arange(each) * bits)).sum(-1)
        tensors["weight_packed"] = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
        scales = tensors["weight_scale"].float().repeat_interleave(32, 1)
        return tensors, (codes - 2 ** (bits - 1)).float() * scales

    groups = {"group_0": {"weights": {"num_bits": bits, "type": "int", "group_size": 32}}}
    assert same(*made(tmp_path, (CT | {"config_groups": groups}, quantize)))


@pytest.mark.parametrize(
    ("form", "settings", "message"),
    [
        ("gptq", {"dynamic": {"+:.*down_proj": {"bits": 5}}}, "got 5"),
        ("gptq", {"dynamic": {"+:(": {"bits": 8}}}, "not a regular expression"),
        ("gptq", {"dynamic": {".*": 3}}, "must have an object of settings; got 3"),
        ("gptq", {"group_size": 0}, "group_size must be a positive integer"),
        ("gptq", {"pack_dtype": "int64"}, "pack_dtype 'int64'"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format is True"),
        ("gptq", {"adapter": {"lora": {"rank": 8}}}, "adapter is"),
        ("gptq", {"format": "marlin"}, "got 'marlin'"),
        ("awq", {"version": None, "format": "gemv"}, "version 'gemv'"),
        ("awq", {"backend": "llm-awq"}, "llm-awq"),
        ("gptq", {"quant_method": "auto-round", "packing_format": "auto_round:fp8"}, "packing_format"),
        ("gptq", {"quant_method": "auto-round", "data_type": "mx_fp"}, "data_type"),
        ("gptq", {"quant_method": "auto-round", "extra_config": {"a": {"bits": 7}}}, "got 7"),
        ("int-quantized", {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config is"),
        ("fp8", {"fmt": "e5m2"}, "e5m2"),
    ],
)
def test_unsupported_settings_are_refused_by_name(tmp_path, form, settings, message):
    folder, _ = made(tmp_path, form)
    change_config(folder, **settings)
    with pytest.raises(ConfigError, match=message):
        onward.load(folder)


def test_unknown_settings_are_named_in_a_warning(tmp_path):
    folder, twin = made(tmp_path, "gptq")
    change_config(folder, sorcery=3, meta={"quantizer": "gptqmodel:5.0"}, lm_head=False)
    with pytest.warns(UserWarning, match=r"unknown fields, which are ignored: sorcery"):
        assert same(folder, twin)


READERS = {
    "GPTQConfig": gptq_module.FIELDS,
    "AwqConfig": gptq_module.AWQ_FIELDS,
    "AutoRoundConfig": gptq_module.AUTO_ROUND_FIELDS,
    "BitsAndBytesConfig": bitsandbytes.FIELDS,
    "CompressedTensorsConfig": compressed_tensors.FIELDS,
    "FineGrainedFP8Config": fp8.FIELDS,
}


@pytest.mark.parametrize("name", READERS)
def test_every_setting_of_transformers_is_known(name):
    """Every setting that `transformers` accepts for a method is read, refused, or listed as having no effect."""
    import inspect

    from transformers.utils import quantization_config

    parameters = inspect.signature(getattr(quantization_config, name).__init__).parameters.values()
    theirs = {one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD} - {"self"}
    assert theirs <= READERS[name].known


def test_settings_of_the_text_config_are_found(tmp_path):
    folder, _ = made(tmp_path, "gptq")
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"text_config": {"quantization_config": config["quantization_config"]}})
    change_json(folder / "config.json", quantization_config=...)
    methods = methods_of(read_json(folder / "config.json"))
    assert methods is not None
    assert methods.name == "gptq"
    with pytest.raises(ConfigError, match=r"text_config\.quantization_config has the unsupported quant_method 'novel'"):
        methods_of({"text_config": {"quantization_config": {"quant_method": "novel"}}})


@pytest.mark.parametrize("form", ["gptq", "fp8"])
def test_a_quantized_tied_model_that_stores_only_its_head(tmp_path, form):
    folder, twin = made(tmp_path, form, SHAPES | {"tie_word_embeddings": True})
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors")
    assert same(folder, twin)


def test_rules_use_the_module_names_of_the_file(tmp_path):
    rules = {"+:module\\.model\\.layers\\.0\\.mlp\\.down_proj": {"bits": 8}}
    folder, twin = mixed(
        tmp_path,
        GPTQ | {"dynamic": rules},
        lambda module: lambda *shape: gptq(*shape, bits=8 if module.endswith("0.mlp.down_proj") else 4),
    )
    tensors = load_file(folder / "model.safetensors")
    save_file({f"module.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert same(folder, twin)
