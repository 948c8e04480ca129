"""Heads from random checkpoints: those that load, and one clear error for those that don't."""

import json

import pytest
import torch
from head_checkpoints import LAYERS, eagle3_checkpoint, mtp_checkpoint
from safetensors.torch import load_file

import onward
from onward import Speculator
from onward.errors import (
    CheckpointError,
    ConfigError,
    DraftError,
    OnwardError,
    OptionError,
    RequestError,
    UnsupportedArchitectureError,
)
from onward.models import architecture_of
from onward.testing import random_checkpoint

IDS = torch.randint(3, 250, (70,), generator=torch.Generator().manual_seed(5)).tolist()
OPTIONS = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 0.9, "seed": 3}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=LAYERS)


def set_fields(folder, **fields):
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({name: x for name, x in config.items() if x is not ...}))


def drafts_as_plain(lm, plain, **options):
    lm.draft = Speculator(lm.draft.drafter, length=3)
    drafted = lm.generate(IDS, **OPTIONS, **options)
    assert drafted.token_ids == plain.generate(IDS, **OPTIONS, **options).token_ids
    assert drafted.speculation.rounds > 0


@pytest.mark.parametrize(
    "options",
    [
        {"quantize": "int8"},
        {"cache_format": "int8"},
        {"quantize": "int4", "cache_format": "int8", "dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        {"compile": "eager"},
        {"trainable": True},
        {"max_seq_len": 100},
    ],
    ids=str,
)
def test_a_head_is_loaded_like_its_model(target, options, tmp_path):
    lm = onward.load(target, draft=eagle3_checkpoint(tmp_path, target), **options)
    drafts_as_plain(lm, onward.load(target, **options))
    with onward.Engine(lm) as engine, onward.Engine(onward.load(target, **options)) as other:
        assert engine.memory > other.memory


def test_published_configs_that_name_a_llama_model_are_read(target, tmp_path):
    head = eagle3_checkpoint(tmp_path, target, architectures=["LlamaForCausalLM"], norm_before_residual=True)
    drafts_as_plain(onward.load(target, draft=str(head)), onward.load(target))


def test_a_config_chooses_the_layers(target, tmp_path):
    head = eagle3_checkpoint(tmp_path, target, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 7, 5]})
    lm = onward.load(target, draft=head)
    assert architecture_of(lm.model).cached_taps == ("layers.0", "layers.7", "layers.5")
    drafts_as_plain(lm, onward.load(target))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_head_of_a_tied_model_has_its_own_output_matrix(family, tmp_path):
    tied = random_checkpoint(tmp_path / "tied", family, num_hidden_layers=LAYERS, tie_word_embeddings=True)
    head = eagle3_checkpoint(tmp_path / "head", tied)
    lm = onward.load(tied, draft=head, dtype="float32")
    stored = load_file(head / "model.safetensors")["lm_head.weight"]
    assert torch.equal(lm.draft.drafter.params.lm_head.weight.unpack(), stored)
    drafts_as_plain(lm, onward.load(tied, dtype="float32"))


def test_a_head_of_all_ids_needs_no_table(target, tmp_path):
    def without_table(tensors):
        del tensors["d2t"], tensors["t2d"]

    head = eagle3_checkpoint(tmp_path, target, change=without_table, draft_vocab_size=258)
    drafts_as_plain(onward.load(target, draft=head), onward.load(target))


def test_the_ids_of_a_head_are_those_of_its_table(target, tmp_path):
    head = eagle3_checkpoint(tmp_path, target)
    stored = load_file(head / "model.safetensors")
    ids = onward.load(target, draft=head).draft.drafter.params.ids
    assert torch.equal(stored["t2d"].nonzero().flatten(), ids)


def test_a_head_follows_its_model_through_quantize_and_steering(target, tmp_path):
    lm = onward.load(target, draft=eagle3_checkpoint(tmp_path, target))
    steer = {"layers.2": torch.ones(32)}
    drafts_as_plain(lm, onward.load(target), steer=steer)
    assert lm.generate(IDS, **OPTIONS).token_ids != lm.generate(IDS, steer=steer, **OPTIONS).token_ids
    drafts_as_plain(onward.quantize(lm, "int8"), onward.quantize(onward.load(target), "int8"))


def test_a_prefix_on_disk_includes_the_features(target, tmp_path):
    head, plain = eagle3_checkpoint(tmp_path / "head", target), onward.load(target)
    for _ in range(2):
        lm = onward.load(target, draft=head, prefix_cache_dir=tmp_path / "disk")
        drafts_as_plain(lm, plain)
        with onward.Engine(lm) as engine:
            text = engine.submit(IDS, **OPTIONS).result()
        assert text.token_ids == plain.generate(IDS, **OPTIONS).token_ids


def test_fingerprints_and_receipts_do_not_depend_on_a_head(target, tmp_path):
    with onward.Engine(onward.load(target, draft=eagle3_checkpoint(tmp_path, target))) as engine:
        fingerprint = engine.fingerprint
    with onward.Engine(onward.load(target)) as engine:
        assert engine.fingerprint == fingerprint


def test_a_session_saved_without_the_head_is_refused(target, tmp_path):
    lm, plain = onward.load(target, draft=eagle3_checkpoint(tmp_path / "head", target)), onward.load(target)
    for one, other in ((lm, plain), (plain, lm)):
        session = onward.Session(one)
        session.generate(IDS, **OPTIONS)
        session.save(tmp_path / "session")
        assert onward.Session.load(tmp_path / "session", one).tokens == session.tokens
        with pytest.raises(onward.errors.SessionError, match="head as its draft"):
            onward.Session.load(tmp_path / "session", other)


def refused(kind: type[OnwardError], text: str, source, **options):
    with pytest.raises(kind, match=text) as raised:
        onward.load(source, **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"vocab_size": 300}, "its vocab_size is 300, and the model's vocab_size is 258"),
        ({"target_hidden_size": 64}, "its target_hidden_size is 64, and the model's hidden_size is 32"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"fc_norm": True}, "fc_norm"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 8]}}, "from 0 to 7"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 3]}}, "two or more layers"),
        ({"unheard_of": 3}, "'unheard_of' is 3"),
    ],
)
def test_a_head_of_another_model_is_refused(target, fields, text, tmp_path):
    head = eagle3_checkpoint(tmp_path, target)
    set_fields(head, **fields)
    refused(ConfigError, text, target, draft=head)


def test_a_head_of_another_hidden_size_is_refused(target, tmp_path):
    other = random_checkpoint(tmp_path / "other", "llama", num_hidden_layers=LAYERS, hidden_size=48)
    head = eagle3_checkpoint(tmp_path / "head", other)
    refused(ConfigError, "its hidden_size is 48, and the model's hidden_size is 32", target, draft=head)


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight"])
def test_a_missing_tensor_of_a_head_is_named(target, name, tmp_path):
    head = eagle3_checkpoint(tmp_path, target, change=lambda tensors: tensors.pop(name))
    refused(CheckpointError, f"tensor '{name}' of shape .* is missing", target, draft=head)


def test_a_surplus_tensor_is_named(target, tmp_path):
    head = eagle3_checkpoint(tmp_path, target, change=lambda tensors: tensors.update({"fc_norm.0": torch.ones(32)}))
    refused(CheckpointError, "such as 'fc_norm.0'", target, draft=head)


@pytest.mark.parametrize(
    "table", [None, torch.zeros(99, dtype=torch.int64), torch.full((100,), 159), -torch.arange(100)]
)
def test_an_invalid_id_table_is_refused(target, table, tmp_path):
    def change(tensors):
        del tensors["d2t"]
        if table is not None:
            tensors["d2t"] = table

    refused(
        CheckpointError, "'d2t' of shape \\[100\\]", target, draft=eagle3_checkpoint(tmp_path, target, change=change)
    )


@pytest.mark.parametrize("family", ["qwen3next", "deepseekv3"])
def test_a_checkpoint_without_its_mtp_layer_is_refused(family, tmp_path):
    name = "mtp.fc.weight" if family == "qwen3next" else "model.layers.2.eh_proj.weight"
    folder = mtp_checkpoint(tmp_path, family, change=lambda tensors: tensors.pop(name))
    refused(CheckpointError, f"tensor '{name}' of shape .* is missing", folder, draft="mtp")


@pytest.mark.parametrize("name", ["shared_head.head.weight", "embed_tokens.weight"])
def test_an_mtp_layer_of_another_vocabulary_is_refused(name, tmp_path):
    def change(tensors):
        tensors[f"model.layers.2.{name}"] = torch.zeros(300, 32)

    folder = mtp_checkpoint(tmp_path, "deepseekv3", change=change)
    refused(CheckpointError, "another vocabulary or hidden size", folder, draft="mtp")


def test_a_model_without_an_mtp_layer_gets_the_list_of_those_with_one(target):
    refused(RequestError, "DeepSeek-V3, GLM-4.5, Qwen3-Next and Qwen3.5", target, draft="mtp")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle3", "LlamaForCausalLM"])
def test_a_head_in_place_of_a_model_is_refused(architecture, target, tmp_path):
    head = eagle3_checkpoint(tmp_path, target, architectures=[architecture])
    refused(UnsupportedArchitectureError, "this is a draft head, not a model", head)


def test_ranks_do_not_draft_with_heads_yet(target, tmp_path):
    head = eagle3_checkpoint(tmp_path, target)
    refused(RequestError, "pipeline= does not work with draft= yet", target, draft=head, pipeline=2)


def test_a_head_belongs_to_its_model(target, tmp_path):
    lm, plain = onward.load(target, draft=eagle3_checkpoint(tmp_path, target)), onward.load(target)
    with pytest.raises(OptionError, match=r"for the draft= of onward\.load"):
        plain.generate(IDS, draft="mtp", **OPTIONS)
    with pytest.raises(DraftError, match=r"load the model with draft="):
        plain.generate(IDS, draft=Speculator(lm.draft.drafter, length=3), **OPTIONS)
