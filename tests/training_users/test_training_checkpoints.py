"""Decoding from a training checkpoint: the weights equal those of an export, for any layout of the trainer."""

import json
import pickle

import pytest
import torch
from dcp_folders import (
    META_NAMES,
    in_metas_names,
    rewrite_metadata,
    save,
    stock_checkpoint,
    write_map,
    write_sharded,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import onward
from onward.errors import CheckpointError, ConfigError, RequestError

PROMPT = [5, 77, 130, 9]
HEAD_DIM = 16


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return stock_checkpoint(tmp_path_factory.mktemp("stock") / "llama")


@pytest.fixture(scope="module")
def expected(stock):
    return onward.load(stock[0]).logits(PROMPT)


def same(lm, expected):
    return torch.equal(lm.logits(PROMPT), expected)


def test_a_distributed_checkpoint_equals_its_export(tmp_path, stock, expected):
    path, tensors = stock
    folder = save(tmp_path / "step-10", path, tensors)
    lm = onward.load(folder)
    assert same(lm, expected)
    exported = onward.load(path).generate(PROMPT, max_new_tokens=12, temperature=0.9, seed=4)
    assert lm.generate(PROMPT, max_new_tokens=12, temperature=0.9, seed=4).token_ids == exported.token_ids


def test_training_state_next_to_the_weights_is_ignored(tmp_path, stock, expected):
    path, tensors = stock
    moments = {"state": {name: {"exp_avg": tensor + 1, "step": torch.tensor(3.0)} for name, tensor in tensors.items()}}
    state = {"app": {"model": tensors, "optim": moments}, "step": 12, "dataloader": {"rng": torch.ones(3)}}
    folder = save(tmp_path / "run", path, state)
    write_map(folder / "name_map.json", {"app.model.": ""})
    assert same(onward.load(folder), expected)


def test_wrapper_prefixes_are_removed_from_names(tmp_path, stock, expected):
    path, tensors = stock
    renamed = {
        name.replace("layers.1.", "layers.1._checkpoint_wrapped_module."): tensor for name, tensor in tensors.items()
    }
    state = {f"_orig_mod.{name}": tensor for name, tensor in renamed.items()}
    assert same(onward.load(save(tmp_path / "compiled", path, state)), expected)


def test_metas_names_and_rotation_by_a_name_map(tmp_path, stock, expected):
    path, tensors = stock
    folder = save(tmp_path / "titan", path, {"model": in_metas_names(tensors, HEAD_DIM)})
    names = {"model.": ""} | META_NAMES
    assert same(onward.load(folder, name_map=names), expected)
    assert same(onward.load(folder, name_map=write_map(tmp_path / "names.json", names)), expected)


def test_fused_matrices_are_split(tmp_path, stock, expected):
    path, tensors = stock
    fused = dict(tensors)
    for layer in range(2):
        at = f"model.layers.{layer}."
        q, k, v = (fused.pop(f"{at}self_attn.{name}_proj.weight") for name in "qkv")
        fused[f"{at}self_attn.qkv.weight"] = torch.cat([q, k, v])
        gate, up = (fused.pop(f"{at}mlp.{name}_proj.weight") for name in ("gate", "up"))
        fused[f"{at}mlp.gate_up.weight"] = torch.cat([up, gate])
    parts = "model.layers.{}.self_attn."
    names = {
        f"{parts}qkv.weight": [f"{parts}{name}_proj.weight" for name in "qkv"],
        "model.layers.{}.mlp.gate_up.weight": [f"model.layers.{{}}.mlp.{name}_proj.weight" for name in ("up", "gate")],
    }
    folder = save(tmp_path / "fused", path, fused)
    assert same(onward.load(folder, name_map=names), expected)
    del fused["model.layers.1.mlp.gate_up.weight"]
    fused["model.layers.1.mlp.gate_up.weight"] = torch.ones(95, 32)
    folder = save(tmp_path / "short", path, fused)
    with pytest.raises(CheckpointError, match=r"\[95, 32\], but is mapped to 48 \+ 48 rows"):
        onward.load(folder, name_map=names)


def sharded(tensors):
    """A mesh of two by two: matrices cut both ways, one cut unevenly, vectors in halves, over four files."""
    cuts = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            half = tensor.shape[0] // 2
            cuts[name] = [("__0_0.distcp", [0], [half]), ("__3_0.distcp", [half], [tensor.shape[0] - half])]
        else:
            rows, columns = tensor.shape[0] // 3, tensor.shape[1] // 2
            cuts[name] = [
                (f"__{2 * i + j}_0.distcp", [r, c], [h, w])
                for i, (r, h) in enumerate([(0, rows), (rows, tensor.shape[0] - rows)])
                for j, (c, w) in enumerate([(0, columns), (columns, tensor.shape[1] - columns)])
            ]
    return cuts


def test_shards_of_ranks_are_assembled(tmp_path, stock, expected):
    path, tensors = stock
    folder = write_sharded(tmp_path / "mesh", path, tensors, sharded(tensors))
    assert len(list(folder.glob("*.distcp"))) == 4
    assert same(onward.load(folder), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_and_quantization_equal_those_of_an_export(tmp_path, stock, dtype):
    path, tensors = stock
    folder = write_sharded(tmp_path / "mesh", path, tensors, sharded(tensors))
    assert same(onward.load(folder, dtype=dtype), onward.load(path, dtype=dtype).logits(PROMPT))
    assert same(onward.load(folder, quantize="int8"), onward.load(path, quantize="int8").logits(PROMPT))


def test_a_tied_head_may_be_stored_but_not_differ(tmp_path):
    path, tensors = stock_checkpoint(tmp_path / "tied", "qwen3", tie_word_embeddings=True)
    expected = onward.load(path).logits(PROMPT)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    assert same(onward.load(save(tmp_path / "both", path, tensors | head)), expected)
    head["lm_head.weight"][0, 0] += 1
    with pytest.raises(CheckpointError, match="differs from it"):
        onward.load(save(tmp_path / "differs", path, tensors | head))


# ── weights that do not fit ───────────────────────────────────────────────────────────────────────────────────


def test_the_error_for_missing_weights_lists_the_stored_ones(tmp_path, stock):
    path, tensors = stock
    folder = save(tmp_path / "titan", path, in_metas_names(tensors, HEAD_DIM))
    with pytest.raises(
        CheckpointError, match=r"21 weights are missing, such as 'model\.embed_tokens\.weight'.*'tok_emb"
    ):
        onward.load(folder)
    names = {name: target for name, target in META_NAMES.items() if "w2" not in name}
    with pytest.raises(
        CheckpointError, match=r"2 weights are missing, such as 'model\.layers\.0\.mlp\.down_proj\.weight'"
    ):
        onward.load(folder, name_map=names)


def test_surplus_weights_are_an_error_unless_ignored(tmp_path, stock, expected):
    path, tensors = stock
    extra = {"ema.shadow": torch.ones(2), "model.layers.2.mlp.up_proj.weight": torch.ones(2)}
    folder = save(tmp_path / "extra", path, tensors | extra)
    with pytest.raises(CheckpointError, match=r"2 tensors that config.json does not describe, such as 'ema\.shadow'"):
        onward.load(folder)
    with pytest.raises(CheckpointError, match=r"1 tensors .*'model\.layers\.2"):
        onward.load(folder, name_map={"ema.": None})
    assert same(onward.load(folder, name_map={"ema.": None, "model.layers.2.": None}), expected)
    assert same(onward.load(folder, name_map={"ema.shadow": None, "model.layers.2.mlp.up_proj.weight": None}), expected)


def test_a_wrong_shape_or_dtype_is_named(tmp_path, stock):
    path, tensors = stock
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=r"has shape \[48, 31\], but config.json expects \[48, 32\]"):
        onward.load(save(tmp_path / "shape", path, tensors | {name: torch.ones(48, 31)}))
    with pytest.raises(CheckpointError, match=r"is torch\.int8; convert it"):
        onward.load(save(tmp_path / "dtype", path, tensors | {name: torch.ones(48, 32, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match="above float16's maximum of 65504"):
        onward.load(save(tmp_path / "large", path, tensors | {name: torch.full((48, 32), 1e5)}), dtype="float16")


def test_two_tensors_for_one_weight_are_refused(tmp_path, stock):
    path, tensors = stock
    folder = save(tmp_path / "twice", path, {"model": tensors, "ema": tensors})
    with pytest.raises(CheckpointError, match=r"both 'model\.lm_head\.weight' and 'ema\.lm_head\.weight'|both 'ema"):
        onward.load(folder, name_map={"model.": "", "ema.": ""})


def test_scalars_are_ignored(tmp_path, stock, expected):
    """Trainers store the step as a tensor next to the weights."""
    path, tensors = stock
    state = tensors | {"step": torch.tensor(3), "loss": torch.tensor(0.5)}
    assert same(onward.load(save(tmp_path / "run", path, state)), expected)


def proposed(error) -> dict:
    """The name map that an error ends with."""
    _, proposal = str(error).split("they all fit with the name map ")
    return json.loads(proposal)


BARE = {
    "causal model in a wrapper": lambda name: f"model.{name}",
    "deeper": lambda name: f"state.module.{name}",
    "inner model": lambda name: name.removeprefix("model."),
    "inner model in a wrapper": lambda name: f"net.{name.removeprefix('model.')}",
}


@pytest.mark.parametrize("form", BARE)
def test_the_error_suggests_a_name_map_that_works(tmp_path, stock, expected, form):
    path, tensors = stock
    state = {BARE[form](name): tensor for name, tensor in tensors.items()}
    state |= {"step": torch.tensor([3]), "ema.shadow": torch.ones(2), "ema.more": torch.ones(2)}
    folder = save(tmp_path / "run", path, state)
    with pytest.raises(CheckpointError, match="give a name map") as caught:
        onward.load(folder)
    names = proposed(caught.value)
    assert {name for name, target in names.items() if target is None} <= {"step", "model.step", "ema."}
    assert same(onward.load(folder, name_map=names), expected)


def test_the_error_for_surplus_weights_suggests_ignoring_them(tmp_path, stock, expected):
    path, tensors = stock
    folder = save(tmp_path / "run", path, {"app": tensors, "step": torch.tensor([3]), "rng": torch.ones(9)})
    with pytest.raises(CheckpointError, match=r'for example \{"rng": null\}') as caught:
        onward.load(folder, name_map={"app.": ""})
    assert proposed(caught.value) == {"app.": "", "step": None, "rng": None}
    assert same(onward.load(folder, name_map=proposed(caught.value)), expected)


def test_mismatched_names_are_not_suggested(tmp_path, stock):
    path, tensors = stock
    state = {f"model.{name}": tensor for name, tensor in tensors.items()}
    state["model.model.layers.1.mlp.up_proj.weight"] = torch.ones(48, 31)
    with pytest.raises(CheckpointError) as caught:
        onward.load(save(tmp_path / "run", path, state))
    assert "name map {" not in str(caught.value)


# ── damage ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def mesh(tmp_path, stock):
    return write_sharded(tmp_path / "mesh", *stock, sharded(stock[1]))


def test_a_missing_or_truncated_shard(mesh):
    shard = mesh / "__2_0.distcp"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"__2_0\.distcp is truncated"):
        onward.load(mesh)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"__2_0\.distcp is missing"):
        onward.load(mesh)


def test_bytes_that_are_no_tensor(mesh):
    shard = mesh / "__1_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: tensor .* cannot be read"):
        onward.load(mesh)


def test_swapped_parts_of_two_tensors(mesh):
    def exchange(metadata):
        one, other = (
            MetadataIndex(f"model.layers.0.{name}.weight", [0, 0]) for name in ("mlp.up_proj", "mlp.down_proj")
        )
        where = metadata.storage_data
        where[one], where[other] = where[other], where[one]

    rewrite_metadata(mesh, exchange)
    with pytest.raises(CheckpointError, match=r"should be torch\.float32 \[\d+, \d+\] according to the metadata; got"):
        onward.load(mesh)


@pytest.mark.parametrize("offsets", [[0, 0], [80, 0], [85, 0]], ids=["twice", "overlapping", "gap and outside"])
def test_chunks_that_do_not_cover_their_tensor(mesh, offsets):
    def move(metadata):
        tensor = metadata.state_dict_metadata["lm_head.weight"]
        at = next(i for i, chunk in enumerate(tensor.chunks) if chunk.offsets == (86, 0))
        info = metadata.storage_data.pop(MetadataIndex("lm_head.weight", [86, 0]))
        tensor.chunks[at] = ChunkStorageMetadata(torch.Size(offsets), tensor.chunks[at].sizes)
        metadata.storage_data.setdefault(MetadataIndex("lm_head.weight", offsets), info)

    rewrite_metadata(mesh, move)
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' do not cover its shape \[258, 32\] once"):
        onward.load(mesh)


def test_an_unfinished_save(mesh):
    (mesh / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"no \.metadata, which is written last: the save did not finish"):
        onward.load(mesh)


def test_the_error_for_a_missing_config_says_what_to_add(mesh):
    (mesh / "config.json").unlink()
    with pytest.raises(ConfigError, match="beside the training checkpoint"):
        onward.load(mesh)


def test_every_truncation_of_the_metadata_is_refused(mesh):
    file = mesh / ".metadata"
    whole = file.read_bytes()
    for end in range(0, len(whole), 97):
        file.write_bytes(whole[:end])
        with pytest.raises(CheckpointError):
            onward.load(mesh)


@pytest.mark.parametrize("file", ["../outside.distcp", "/etc/hostname", "a\\b"])
def test_a_file_outside_the_folder(mesh, file):
    def lead_out(metadata):
        next(iter(metadata.storage_data.values())).relative_path = file

    rewrite_metadata(mesh, lead_out)
    with pytest.raises(CheckpointError, match="is outside its folder"):
        onward.load(mesh)


@pytest.mark.parametrize("value", [[], {}, 7, None, "x", {"state_dict_metadata": {}}], ids=repr)
def test_a_pickle_of_something_else(mesh, value):
    (mesh / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises(CheckpointError, match="is not the metadata of"):
        onward.load(mesh)


def test_a_transformed_tensor_is_refused(mesh):
    def compress(metadata):
        next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]

    rewrite_metadata(mesh, compress)
    with pytest.raises(CheckpointError, match=r"was transformed when it was saved: \['zstd'\]"):
        onward.load(mesh)


# ── name maps ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"a.{}.b": "c"}, "has 1 parts that are {}"),
        ({"a.{}.b": "c.{}{}"}, "has 1 parts that are {}"),
        ({"a": 3}, "needs a name, a list of names, null"),
        ({"a": []}, "needs a name, a list of names, null"),
        ({"a": {"to": "b", "rope": "halves"}}, "needs a name, a list of names, null"),
        ({"a": {"to": "b", "transpose": True}}, "needs a name, a list of names, null"),
        ({"a": {"to": "v_proj.weight", "rope": "interleaved"}}, "is not rotated"),
        ({"a.": "b"}, "is a prefix of names"),
        ({"a.{}.": "b."}, "is a prefix of names"),
        ({3: "b"}, "a name must be text"),
    ],
)
def test_invalid_name_map_entries(mesh, entries, says):
    with pytest.raises(ConfigError) as caught:
        onward.load(mesh, name_map=entries)
    assert says in str(caught.value)


def test_unreadable_name_maps(mesh, tmp_path, stock):
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        onward.load(mesh, name_map=tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="must be a JSON object; got list"):
        onward.load(mesh, name_map=str(tmp_path / "list.json"))
    with pytest.raises(RequestError, match="a JSON file or a mapping; got int"):
        onward.load(mesh, name_map=3)
    assert same(onward.load(stock[0], name_map={}), onward.load(stock[0]).logits(PROMPT))
