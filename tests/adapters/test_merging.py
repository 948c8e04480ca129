"""A merged adapter computes the same as the adapter in peft."""

import json

import pytest
import torch
from peft_adapters import FORMS, adapted, base, saved
from safetensors.torch import load_file, save_file

import onward
from onward.errors import CheckpointError, RequestError

# As in tests/models/transformers_reference.py: some hundred float32 roundings in another order leave about 3e-6 of
# logits of order 1, and a wrong scale or place shifts them by 1e-2 or more.
TOLERANCE = 1e-4
IDS = [5, 17, 99, 3, 42, 8]


@torch.no_grad()
def theirs(model):
    return model(torch.tensor([IDS])).logits[0]


DENSE = [form for form in FORMS if form not in ("recurrent layers", "saved convolutions")]


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *((family, form) for family in ("llama", "qwen3") for form in DENSE),
        ("qwen3_5", "recurrent layers"),
        ("falcon_h1", "Mamba2"),
        ("falcon_h1", "saved convolutions"),
    ],
)
def test_merged_logits_equal_peft(tmp_path, family, form):
    model = base(family)
    source = saved(model, tmp_path / "model")
    before = theirs(model)
    wrapped = adapted(model, form)
    expected = theirs(wrapped)
    folder = saved(wrapped, tmp_path / "adapter")
    assert (expected - before).abs().max() > 0.05, "the adapter does something"
    lm = onward.load(source, merge=folder)
    torch.testing.assert_close(lm.logits(IDS), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_tied_head_keeps_its_weight_if_an_adapter_changes_the_embedding(tmp_path):
    model = base(tie_word_embeddings=True)
    source = saved(model, tmp_path / "model")
    wrapped = adapted(model, "head and embedding")
    expected = theirs(wrapped)
    lm = onward.load(source, merge=saved(wrapped, tmp_path / "adapter"))
    torch.testing.assert_close(lm.logits(IDS), expected, rtol=0, atol=TOLERANCE)


def test_merging_happens_before_quantizing(tmp_path):
    model = base()
    source, folder = saved(model, tmp_path / "model"), saved(adapted(base(), "plain"), tmp_path / "adapter")
    whole = onward.load(source, merge=folder)
    small = onward.load(source, merge=folder, quantize="int8")
    assert torch.equal(small.logits(IDS), onward.quantize(whole, "int8").logits(IDS))
    with pytest.raises(RequestError, match="merge it before quantizing"):
        onward.load(source, quantize="int8").merge(folder)


@pytest.fixture
def folders(tmp_path):
    model = base()
    return saved(model, tmp_path / "model"), saved(adapted(model, "plain"), tmp_path / "adapter")


def change_config(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(folder, change):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def rename(tensors, module, *names):
    """Give the two tensors of the first layer's q_proj other names, of `module`."""
    for old, new in zip(("lora_A.weight", "lora_B.weight"), names, strict=True):
        tensors[f"base_model.model.{module}.{new}"] = tensors.pop(NAME.replace("lora_A.weight", old))


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "'LORA' is supported; got 'IA3'"),
        ({"r": 0}, "'r' must be a positive integer; got 0"),
        ({"r": 5}, "but rank 5 in adapter_config.json"),
        ({"lora_alpha": "8"}, "'lora_alpha' must be a positive number; got '8'"),
        ({"rank_pattern": []}, None),
        ({"rank_pattern": {"(": 3}}, "not a valid regular expression"),
        ({"use_dora": True}, "has no lora_magnitude_vector"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the model's own"),
        ({"init_lora_weights": "OLoRA"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "gaussian"}, None),
    ],
)
def test_unusable_configs_raise_a_clear_error(folders, fields, message):
    source, folder = folders
    change_config(folder, **fields)
    if message is None:
        onward.load(source, merge=folder)
        return
    with pytest.raises(CheckpointError, match=message.replace("(", r"\(")):
        onward.load(source, merge=folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME), "q_proj has no lora_A.weight"),
        (lambda t: t.update({NAME: t[NAME][:, :5].clone()}), r"\[32, 5\], and the model's weight \[32, 32\]"),
        (lambda t: t.update({NAME: t[NAME] * torch.inf}), "finite floats"),
        (lambda t: t.update({NAME.replace("layers.0", "layers.9"): t.pop(NAME)}), "has no lora_B|has no lora_A"),
        (lambda t: t.update({"base_model.model.model.prompt": torch.zeros(2)}), "not a LoRA tensor"),
        (lambda t: t.update({"base_model.model.extra.weight": torch.zeros(2)}), "such as 'extra'"),
        (lambda t: t.update({"base_model.model.model.norm.bias": torch.zeros(32)}), "norm.bias is for another kind"),
        (lambda t: t.update({"base_model.model.model.embed_tokens.bias": torch.zeros(32)}), "bias is for another kind"),
        (lambda t: rename(t, "model.norm", "lora_A.weight", "lora_B.weight"), "model.norm is for another kind"),
        (lambda t: rename(t, "model.embed_tokens", "lora_A.weight", "lora_B.weight"), "tokens is for another kind"),
        (lambda t: rename(t, "lm_head", "lora_embedding_A", "lora_embedding_B"), "lm_head is for another kind"),
        (
            lambda t: t.update(
                {
                    "base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(5, 101),
                    "base_model.model.model.embed_tokens.lora_embedding_B": torch.zeros(32, 5),
                }
            ),
            r"but rank 4 in adapter_config.json: they must be \[4, vocabulary\]",
        ),
    ],
)
def test_mismatched_tensors_raise_a_clear_error(folders, change, message):
    source, folder = folders
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message):
        onward.load(source, merge=folder)
    with pytest.raises(CheckpointError, match=message):
        onward.load(source, adapters={"it": folder})


def test_invalid_adapters_raise_a_clear_error(folders, tmp_path):
    source, folder = folders
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        onward.load(source, merge=tmp_path)
    (folder / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        onward.load(source, merge=folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no adapter_model\.safetensors"):
        onward.load(source, merge=folder)
