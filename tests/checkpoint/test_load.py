"""`onward.load`: its arguments, and the language model that it returns."""

import os
import pathlib
import shutil

import pytest
import torch

import onward
from onward.checkpoint import find_folder
from onward.errors import ContextOverflowError, OnwardWarning, RequestError, SourceError
from tiny_checkpoint import make_checkpoint, refused


def dtype_of(lm):
    return lm.model.params.embed_tokens.weight.dtype


@pytest.mark.parametrize("name", ["demo", "demo-draft"])
def test_the_bundled_models_load_and_generate(name):
    lm = onward.load(name)
    completion = lm.generate("Once upon a time", max_new_tokens=4, seed=1, ignore_eos=True)
    assert len(completion.token_ids) == 4
    assert completion.text == lm.decode(completion.token_ids)
    assert lm.chat([{"role": "user", "content": "Hi"}], max_new_tokens=2, seed=1).token_ids
    assert lm.defaults.eos


def test_the_bundled_models_share_a_tokenizer():
    target, draft = onward.load("demo"), onward.load("demo-draft")
    text = "Once upon a time, naïve café 東京 🦊"
    assert target.encode(text) == draft.encode(text)
    assert draft.model.num_parameters < target.model.num_parameters / 4


def test_a_folder_named_demo_is_loaded_by_its_path(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    bundled = find_folder("demo")
    assert bundled.parent.name == "demo"
    assert find_folder("./demo").resolve() == tmp_path / "demo"
    assert find_folder(pathlib.Path("demo")).resolve() == tmp_path / "demo"


class Elsewhere(os.PathLike):
    def __init__(self, path):
        self._path = path

    def __fspath__(self):
        return str(self._path)


def test_a_source_is_a_string_or_a_path(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    expected = onward.load(folder).logits([1, 2])
    for source in (str(folder), f"{folder}/", Elsewhere(folder), "~/tiny", pathlib.Path("~/tiny")):
        assert torch.equal(onward.load(source).logits([1, 2]), expected)


def test_a_folder_may_be_a_symlink(folder, tmp_path):
    """As in the hub's cache, where every file is a link to a blob."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in folder.iterdir():
        (linked / file.name).symlink_to(shutil.copy(file, tmp_path / f"blob-{file.name}"))
    assert torch.equal(onward.load(linked).logits([1, 2]), onward.load(folder).logits([1, 2]))


@pytest.mark.parametrize("source", [None, 5, b"bytes", ["demo"]], ids=str)
def test_invalid_sources(source):
    with refused(RequestError, "source", repr(source)):
        onward.load(source)


def test_an_empty_string_is_not_the_current_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with refused(SourceError, "''"):
        onward.load("")


# ── dtype and device ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, torch.float32),
        ("bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        ("float16", torch.float16),
        ("f16", torch.float16),
        ("float32", torch.float32),
        ("f32", torch.float32),
        (torch.float32, torch.float32),
    ],
)
def test_dtypes_by_name_and_by_value(asked, expected, folder):
    assert dtype_of(onward.load(folder, dtype=asked)) == expected


@pytest.mark.parametrize("dtype", ["int8", "float64", "", "half", torch.int8, torch.float64, 16, True, [], {}], ids=str)
def test_invalid_dtypes(dtype, folder):
    with refused(RequestError, "dtype", "bfloat16, float16 or float32", repr(dtype)):
        onward.load(folder, dtype=dtype)


@pytest.mark.parametrize("device", ["auto", "cpu", torch.device("cpu")], ids=str)
def test_available_devices(device, folder):
    lm = onward.load(folder, device=device)
    expected = "cuda" if device == "auto" and torch.cuda.is_available() else "cpu"
    assert lm.model.device.type == expected
    assert lm.model.params.embed_tokens.weight.device.type == expected


def test_an_unavailable_device_is_a_one_line_error(folder):
    with pytest.raises(RequestError) as error:
        onward.load(folder, device="xla")
    assert str(error.value) == "device 'xla' cannot be used here (this PyTorch has no xla backend): try 'auto' or 'cpu'"


@pytest.mark.skipif(torch.cuda.is_available(), reason="wants a machine without CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), 0], ids=str)
def test_cuda_on_a_machine_without_it(device, folder):
    with refused(RequestError, "device", str(device), "'cpu'"):
        onward.load(folder, device=device)


@pytest.mark.parametrize(
    "device",
    ["", "gpu", "cpu:x", "meta", "mps" if not torch.backends.mps.is_available() else "xla", None, 1.5, True],
    ids=str,
)
def test_invalid_devices(device, folder):
    with refused(RequestError, "device", repr(str(device))):
        onward.load(folder, device=device)


# ── the context ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_context_defaults_to_the_checkpoints(folder):
    assert onward.load(folder).model.max_seq_len == 64


def test_a_shorter_context_applies(folder):
    lm = onward.load(folder, max_seq_len=10)
    assert lm.model.max_seq_len == 10
    assert len(lm.generate([1, 2, 3], max_new_tokens=7, ignore_eos=True).token_ids) == 7
    with refused(ContextOverflowError, "11", "10"):
        lm.generate([1, 2, 3], max_new_tokens=8)


def test_a_context_beyond_the_trained_one_works_with_a_warning(folder):
    with pytest.warns(OnwardWarning, match=r"max_seq_len 100 .* 64") as caught:
        lm = onward.load(folder, max_seq_len=100)
    assert [warning.filename for warning in caught] == [__file__]
    assert lm.logits(list(range(100))).isfinite().all()


def test_dynamic_rope_extends_the_context_without_a_warning(tmp_path):
    folder = make_checkpoint(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert onward.load(folder, max_seq_len=100).logits(list(range(100))).isfinite().all()


@pytest.mark.parametrize("value", [0, -1, True, False, 1.5, "64", [64]], ids=repr)
def test_invalid_contexts(value, folder):
    with refused(RequestError, "max_seq_len", repr(value)):
        onward.load(folder, max_seq_len=value)


def test_bad_arguments_are_refused_before_any_lookup():
    for options in ({"dtype": "int8"}, {"device": "gpu"}, {"max_seq_len": 0}, {"adapters": ["poet"]}):
        with refused(RequestError, *options):
            onward.load("/nowhere", **options)
