"""A quantized folder loads the weights that were written, mapped; a faulty one gives a clear error."""

import json
from pathlib import Path

import pytest
import torch
from quantized_cases import FORMATS, documented_functions
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

import onward
from onward import ops
from onward.checkpoint import CheckpointFolder, read_weights
from onward.checkpoint import quantized_folder as quantized
from onward.checkpoint.convert import convert
from onward.checkpoint.quantized_folder import read_manifest, write_quantized
from onward.errors import CheckpointError, ConfigError, OnwardError, RequestError
from onward.language_model import Calibration, quantize, quantize_folder
from onward.models import Linear, build_model, read_config
from onward.ops import QuantizedWeight
from onward.quantization import quantize_params, quantize_weight
from onward.testing import random_checkpoint
from tiny_checkpoint import FEW_EXPERTS

# Sizes that fill no block, no group and no line.
ODD = {"hidden_size": 36, "intermediate_size": 50, "vocab_size": 259, "head_dim": 6}
MATRIX = "model.layers.1.mlp.down_proj.weight"


def read(folder, dtype=None):
    """(config, params), as a load does it."""
    checkpoint = CheckpointFolder(folder)
    config = read_config(checkpoint.config)
    manifest = read_manifest(folder, checkpoint.config)
    assert manifest is not None
    return config, read_weights(folder, config, dtype=dtype, device=torch.device("cpu"), manifest=manifest)


def logits(model):
    return onward.LanguageModel(model).logits(list(range(50)))


def leaves(params):
    return [leaf for leaf in pytree.tree_leaves(params) if leaf is not None]


def mapped_addresses(file):
    """The ranges of memory at which a file is mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(file)):
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            yield range(begin, end)


@pytest.fixture
def folder(tmp_path):
    """A quantized folder of a tiny model, for one test to damage."""
    source = random_checkpoint(tmp_path / "source", **ODD)
    quantize_folder(source, tmp_path / "small", "int4")
    return tmp_path / "small"


def change_manifest(folder, **fields):
    """Set fields of the manifest; those set to `...` are removed."""
    config = json.loads((folder / "config.json").read_text())
    changed = config[quantized.MANIFEST] | fields
    config[quantized.MANIFEST] = {name: value for name, value in changed.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder, **tensors):
    """Replace tensors of the weights, or remove those that are None; names with `.` written as `__`."""
    stored = load_file(folder / "model.safetensors") | {name.replace("__", "."): t for name, t in tensors.items()}
    save_file({name: t for name, t in stored.items() if t is not None}, folder / "model.safetensors")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "sizes"),
    [("qwen3", ODD), ("qwen2", {}), ("llama", ODD | {"tie_word_embeddings": True}), ("mistral", {})],
    ids=["qwen3", "qwen2", "llama", "mistral"],
)
def test_a_written_model_equals_the_model(tmp_path, form, format, dtype, family, sizes):
    source = random_checkpoint(tmp_path / "source", family, dtype=dtype, **sizes)
    quantize_folder(source, tmp_path / "small", format)
    config, params = read(tmp_path / "small")
    in_memory = quantize(onward.load(source), format).model
    loaded, expected = leaves(params), leaves(in_memory.params)
    assert all(torch.equal(*pair) for pair in zip(loaded, expected, strict=True))
    assert torch.equal(logits(build_model(config, params)), logits(in_memory))


def test_a_folder_of_a_recurrent_model_equals_quantizing_in_memory(tmp_path):
    source = random_checkpoint(tmp_path / "source", "qwen3_5")
    quantize_folder(source, tmp_path / "small", "int8")
    want = quantize(onward.load(source).model, "int8")
    assert torch.equal(onward.load(tmp_path / "small").logits(list(range(50))), logits(want))


@pytest.mark.parametrize("family", ["qwen3moe", "qwen3_5", "lfm2moe", "deepseekv3"])
def test_unquantized_weights_are_written_as_in_the_checkpoint(tmp_path, family):
    """A calibration runs the packed model, of which routers, convolutions and latents are unpacked."""
    source = random_checkpoint(tmp_path / "source", family, **FEW_EXPERTS.get(family, {}))
    calibration = Calibration(ids=torch.arange(40, dtype=torch.int32).view(2, 20))
    quantize_folder(source, tmp_path / "small", "iq4_nl", calibrate=calibration)
    want = quantize(onward.load(source).model, "iq4_nl", calibrate=calibration)
    assert torch.equal(onward.load(tmp_path / "small").logits(list(range(50))), logits(want))
    stored, stock = (load_file(folder / "model.safetensors") for folder in (tmp_path / "small", source))
    assert all(torch.equal(tensor, stock[name]) for name, tensor in stored.items() if tensor.dtype != torch.uint8)


@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_mapped_pages_of_the_file_aligned_to_64(tmp_path, format):
    source = random_checkpoint(tmp_path / "source", dtype=torch.bfloat16, **ODD)
    quantize_folder(source, tmp_path / "small", format)
    _, params = read(tmp_path / "small")
    ranges = list(mapped_addresses(tmp_path / "small" / "model.safetensors"))
    for leaf in leaves(params):
        assert any(leaf.data_ptr() in addresses for addresses in ranges)
        assert leaf.data_ptr() % (64 if leaf.dtype == torch.uint8 else leaf.element_size()) == 0


def test_a_tied_pair_is_in_the_file_once(tmp_path):
    source = random_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    reports = quantize_folder(source, tmp_path / "small", "int8")
    assert "lm_head.weight" not in load_file(tmp_path / "small" / "model.safetensors")
    _, params = read(tmp_path / "small")
    assert params.lm_head.weight is params.embed_tokens.weight
    assert [report.name for report in reports].count("embed_tokens.weight") == 1


def test_the_dtype_of_activations_can_be_chosen(folder):
    for dtype in (torch.float32, torch.bfloat16):
        config, params = read(folder, dtype)
        assert params.embed_tokens.weight.dtype == params.norm.dtype == dtype
        assert build_model(config, params).new_cache(1, 4).keys[0].dtype == dtype


def test_config_and_small_files_are_copied(tmp_path):
    source = random_checkpoint(tmp_path / "source")
    names = ("generation_config.json", "tokenizer.json", "chat_template.jinja", "LICENSE")
    names += ("additional_chat_templates/tool_use.jinja",)
    for name in names:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(json.dumps(name))
    reports = quantize_folder(source, tmp_path / "deep" / "small", "int4")
    copy = tmp_path / "deep" / "small"
    assert all((copy / name).read_text() == json.dumps(name) for name in names)
    config = json.loads((copy / "config.json").read_text())
    manifest = config.pop("onward_quantization")
    assert config == json.loads((source / "config.json").read_text())
    assert (manifest["version"], manifest["format"], manifest["group"]) == (1, "int4", 32)
    error = {report.name: report.relative_rms_error for report in reports}["layers.1.feed_forward.down_proj.weight"]
    assert manifest["tensors"][MATRIX] == {"shape": [32, 48], "relative_rms_error": pytest.approx(error, rel=1e-3)}
    assert len(manifest["tensors"]) == len(reports)


def test_a_matrix_may_stay_in_floats(folder):
    """As a converter may leave it: neither packed nor in the manifest."""
    stock = load_file(folder.parent / "source" / "model.safetensors")[MATRIX]
    shapes = json.loads((folder / "config.json").read_text())[quantized.MANIFEST]["tensors"]
    change_manifest(folder, tensors={name: entry for name, entry in shapes.items() if name != MATRIX})
    change_tensors(folder, **{MATRIX.replace(".", "__"): stock})
    config, params = read(folder)
    assert torch.equal(params.layers[1].feed_forward.down_proj.weight, stock)
    assert isinstance(params.layers[1].feed_forward.up_proj.weight, QuantizedWeight)
    logits(build_model(config, params))


def test_the_documented_writer_writes_a_folder(tmp_path, folder):
    stock = load_file(folder.parent / "source" / "model.safetensors")
    matrices = {name: quantize_weight(tensor, "int4") for name, tensor in stock.items() if tensor.dim() == 2}
    others = {name: tensor for name, tensor in stock.items() if tensor.dim() < 2}
    (tmp_path / "theirs").mkdir()
    config = json.loads((folder.parent / "source" / "config.json").read_text())
    documented_functions()["write_folder"](tmp_path / "theirs", config, matrices, others)
    theirs, ours = leaves(read(tmp_path / "theirs")[1]), leaves(read(folder)[1])
    assert all(torch.equal(*pair) for pair in zip(theirs, ours, strict=True))


def test_unaligned_bytes_are_copied_to_aligned_memory(folder):
    expected = [leaf.clone() for leaf in leaves(read(folder)[1])]
    change_tensors(folder)  # written by safetensors itself, floats first
    got = leaves(read(folder)[1])
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    assert all(leaf.data_ptr() % 64 == 0 for leaf in got if leaf.dtype == torch.uint8)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"version": 3}, "is version 3, and this Onward reads versions 1 and 2: quantize the checkpoint again"),
        ({"version": ...}, "is version None"),
        ({"version": True}, "is version True"),
        ({"version": 1.0}, "is version 1.0"),
        ({"group": 32.0}, "int4 requires group 32; got 32.0"),
        ({"format": "int3"}, "format must be 'int8', 'int4' or 'iq4_nl'; got 'int3'"),
        ({"format": ["int4"]}, r"format must be 'int8', 'int4' or 'iq4_nl'; got \['int4'\]"),
        ({"group": 64}, "int4 requires group 32; got 64"),
        ({"format": "iq4_nl", "group": ...}, "iq4_nl requires group 32; got None"),
        ({"tensors": ...}, "'tensors' must map names"),
        ({"tensors": {}}, "'tensors' must map names"),
        ({"tensors": {"x": {"shape": [3]}}}, r"x must have a 'shape' of two sizes; got \[3\]"),
        ({"tensors": {"x": {"shape": [3, -1]}}}, r"a 'shape' of two sizes; got \[3, -1\]"),
        ({"tensors": {"x": 3}}, "a 'shape' of two sizes; got None"),
    ],
)
def test_an_invalid_manifest_is_refused(folder, fields, complaint):
    change_manifest(folder, **fields)
    with pytest.raises(ConfigError, match=complaint):
        read(folder)


def test_a_manifest_must_be_an_object(folder):
    config = json.loads((folder / "config.json").read_text()) | {quantized.MANIFEST: "int4"}
    with pytest.raises(ConfigError, match="must be an object; got 'int4'"):
        read_manifest(folder, config)


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ({MATRIX: ...}, f"'{MATRIX}' is packed bytes, but onward_quantization has no entry"),
        ({MATRIX: {"shape": [36, 51]}}, rf"tensor '{MATRIX}' has shape \[36, 51\].*expects \[36, 50\]"),
        ({"model.extra.weight": {"shape": [1, 1]}}, "does not describe, such as 'model.extra.weight'"),
    ],
)
def test_a_manifest_of_another_model_is_refused(folder, entries, complaint):
    tensors = json.loads((folder / "config.json").read_text())[quantized.MANIFEST]["tensors"] | entries
    change_manifest(folder, tensors={name: entry for name, entry in tensors.items() if entry is not ...})
    with pytest.raises(CheckpointError, match=complaint):
        read(folder)


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({MATRIX: torch.zeros(3, 64, dtype=torch.uint8)}, r"is torch.uint8 \[3, 64\], but int4 packs \[36, 50\] into"),
        ({MATRIX: torch.zeros(36, 50)}, r"is torch.float32 \[36, 50\], but int4 packs"),
        ({MATRIX: None}, f"'{MATRIX}' of onward_quantization is missing from model.safetensors"),
        ({"model.norm.weight": None}, "'model.norm.weight' of shape .* is missing"),
        ({"model.extra": torch.zeros(3)}, "does not describe, such as 'model.extra'"),
    ],
)
def test_weights_that_contradict_the_manifest_are_refused(folder, tensors, complaint):
    change_tensors(folder, **{name.replace(".", "__"): tensor for name, tensor in tensors.items()})
    with pytest.raises(CheckpointError, match=complaint):
        read(folder)


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_a_truncated_file_is_refused(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        read(folder)


def test_missing_weights_are_named(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(OnwardError, match=r"neither model\.safetensors nor"):
        read(folder)


def test_a_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    source = random_checkpoint(tmp_path / "source")

    def fail(tensors, file):
        file.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quantized, "write_safetensors", fail)
    with pytest.raises(RequestError, match="small cannot be written: No space left on device"):
        quantize_folder(source, tmp_path / "small", "int8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_an_unwritable_destination_is_refused_before_the_work(tmp_path):
    source = random_checkpoint(tmp_path / "source")
    for place in (source / "config.json" / "small", source / "config.json" / "deep" / "small"):
        with pytest.raises(
            RequestError, match=r"small cannot be written, because .*config\.json is not a writable folder"
        ):
            quantize_folder(source, place, "int8", progress=lambda report: pytest.fail("work was done"))


def test_only_an_absent_or_empty_folder_is_written(tmp_path):
    source = random_checkpoint(tmp_path / "source")
    (tmp_path / "empty").mkdir()
    quantize_folder(source, tmp_path / "empty", "int8")
    for taken in (tmp_path / "empty", source, source / "config.json"):
        with pytest.raises(RequestError, match="already exists: give a folder that is absent or empty"):
            quantize_folder(source, taken, "int8")


def test_quantized_and_unknown_models_are_not_quantized(tmp_path, folder):
    with pytest.raises(RequestError, match="is already int4: quantize the original checkpoint"):
        quantize_folder(folder, tmp_path / "again", "int8")
    with pytest.raises(RequestError, match="must be 'int8', 'int4' or 'iq4_nl'; got 'q4'"):
        quantize_folder(tmp_path / "source", tmp_path / "again", "q4")
    convert(tmp_path / "source", tmp_path / "model.gguf", "gguf")
    with pytest.raises(RequestError, match=r"model\.gguf is a GGUF file, .* onward convert --to safetensors"):
        quantize_folder(tmp_path / "model.gguf", tmp_path / "again", "int8")
    assert not (tmp_path / "again").exists()


def test_only_quantized_params_are_written(tmp_path):
    source = CheckpointFolder(random_checkpoint(tmp_path / "source", tie_word_embeddings=True))
    config = read_config(source.config)
    stock = read_weights(source.path, config, dtype=None, device=torch.device("cpu"))
    small, _ = quantize_params(stock, "int8")
    packed = stock._replace(lm_head=Linear(ops.pack(stock.lm_head.weight)))
    for params, complaint in [
        (stock, "holds quantized weights; got none"),
        (packed, "lm_head.weight is packed for this machine|embed_tokens.weight is packed for this machine"),
        (
            small._replace(lm_head=Linear(quantize_weight(stock.lm_head.weight, "int8"))),
            "they differ in the params",
        ),
    ]:
        with pytest.raises(RequestError, match=complaint):
            write_quantized(source, config, params, tmp_path / "small")
    assert not (tmp_path / "small").exists()
