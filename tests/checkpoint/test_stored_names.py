"""Names of weights other than Hugging Face's: prefixes of wrappers and base models, tied heads, and name maps."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import onward
from onward.errors import CheckpointError, RequestError
from tiny_checkpoint import make_checkpoint, read_json, refused, split_into_shards, write_json

IDS = [1, 17, 99, 3]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def logits(folder, **options):
    return onward.load(folder, **options).logits(IDS)


def rename(folder, new_name, **metadata):
    """Save model.safetensors with other names; None leaves a tensor out."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {new_name(name): tensor for name, tensor in tensors.items() if new_name(name) is not None}
    save_file(renamed, folder / "model.safetensors", metadata=metadata or None)


def without(prefix):
    return lambda name: name.removeprefix(prefix)


FORMS = {
    "without model.": without("model."),
    "module.": "module.{}".format,
    "_orig_mod.": "_orig_mod.{}".format,
    "module._orig_mod.": "module._orig_mod.{}".format,
    "_orig_mod inside": lambda name: name.replace("model.", "model._orig_mod.", 1),
    "base_model.model.": "base_model.model.{}".format,
    "transformer.": lambda name: name.replace("model.", "transformer.", 1),
    "language_model.": "language_model.{}".format,
    "model.model.": "model.{}".format,
    "a trainer's": "net.lm.{}".format,
    "wrapped base": lambda name: "module." + name.removeprefix("model."),
}


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
@pytest.mark.parametrize("form", FORMS)
def test_prefixes_are_found(tmp_path, form, tied):
    folder = make_checkpoint(tmp_path, tokenizer=False, tie_word_embeddings=tied)
    expected = logits(folder)
    rename(folder, FORMS[form])
    assert torch.equal(logits(folder), expected)
    split_into_shards(folder)
    assert torch.equal(logits(folder), expected)


def test_the_error_lists_the_stored_names_and_a_name_map_fixes_it(tmp_path):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    expected = logits(folder)
    rename(folder, lambda name: name.replace("layers", "blocks").replace("self_attn", "attn"))
    with refused(CheckpointError, "'lm_head.weight', 'model.blocks.0", "name_map="):
        onward.load(folder)
    parts = {
        *(f"self_attn.{part}_proj" for part in "qkvo"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"),
    }
    names = {
        f"model.blocks.{{}}.{part.replace('self_attn', 'attn')}.weight": f"model.layers.{{}}.{part}.weight"
        for part in parts
    }
    assert torch.equal(logits(folder, name_map=names), expected)
    write_json(tmp_path / "names.json", names)
    assert torch.equal(logits(folder, name_map=tmp_path / "names.json"), expected)
    with refused(CheckpointError, "18 weights are missing", "'model.blocks."):
        onward.load(folder, name_map={})


def test_a_name_map_splits_a_safetensors_tensor_by_rows(tmp_path):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    expected = logits(folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        rows = [tensors.pop(f"model.layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
        tensors[f"model.layers.{layer}.self_attn.wqkv.weight"] = torch.cat(rows)
    save_file(tensors, folder / "model.safetensors")
    targets = [f"model.layers.{{}}.self_attn.{part}_proj.weight" for part in "qkv"]
    assert torch.equal(logits(folder, name_map={"model.layers.{}.self_attn.wqkv.weight": targets}), expected)


def test_a_name_map_for_quantized_weights_is_refused(tmp_path):
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    folder = make_checkpoint(tmp_path, tokenizer=False, quantization_config=settings)
    with refused(RequestError, "name map", "quantized"):
        onward.load(folder, name_map={})


def test_two_names_of_one_weight_are_an_error(tmp_path):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    both = {f"module.{name}": tensor for name, tensor in tensors.items()} | {
        "_orig_mod.lm_head.weight": tensors[HEAD] + 1
    }
    save_file(both, folder / "model.safetensors")
    with refused(CheckpointError, "'module.lm_head.weight'", "'_orig_mod.lm_head.weight'", "the same weight"):
        onward.load(folder)


# ── a tied head ───────────────────────────────────────────────────────────────────────────────────────────────


def head_for_embedding(name):
    return HEAD if name == EMBEDDING else name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("shards", [False, True])
def test_a_tied_model_that_stores_only_its_head(tmp_path, shards):
    folder = make_checkpoint(tmp_path, tokenizer=False, tie_word_embeddings=True)
    expected = logits(folder)
    rename(folder, head_for_embedding, **{EMBEDDING: HEAD, "format": "pt"})
    if shards:
        split_into_shards(folder)
    assert torch.equal(logits(folder), expected)
    assert torch.equal(logits(folder, name_map={}), expected)
    dcp.save(load_all(folder), checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    write_json(tmp_path / "dcp" / "config.json", read_json(folder / "config.json"))
    assert torch.equal(logits(tmp_path / "dcp"), expected)


def load_all(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_an_untied_head_is_no_embedding(tmp_path):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    rename(folder, lambda name: None if name == EMBEDDING else name)
    with refused(CheckpointError, repr(EMBEDDING), "missing"):
        onward.load(folder)


@pytest.mark.parametrize("absent", [EMBEDDING, HEAD])
@pytest.mark.parametrize("tied", [False, True])
def test_an_index_that_names_a_tied_weight_that_no_shard_has(tmp_path, absent, tied):
    folder = make_checkpoint(tmp_path, tokenizer=False, tie_word_embeddings=True)
    expected = logits(folder)
    if absent == EMBEDDING:
        rename(folder, head_for_embedding)
    split_into_shards(folder)
    index = read_json(folder / "model.safetensors.index.json")
    index["weight_map"][absent] = next(iter(index["weight_map"].values()))
    index["metadata"] = {"total_size": 1}  # of no consequence
    write_json(folder / "model.safetensors.index.json", index)
    if tied:
        assert torch.equal(logits(folder), expected)
        return
    write_json(folder / "config.json", read_json(folder / "config.json") | {"tie_word_embeddings": False})
    with refused(CheckpointError, repr(absent), "where it is missing"):
        onward.load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.cos_cached",
        "model.layers.0.self_attn.rotary_emb.sin_cached",
        "model.layers.0.self_attn.masked_bias",
    ],
)
def test_legacy_buffers_are_ignored(tmp_path, name):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    expected = logits(folder)
    save_file(load_file(folder / "model.safetensors") | {name: torch.ones(2)}, folder / "model.safetensors")
    assert torch.equal(logits(folder), expected)
