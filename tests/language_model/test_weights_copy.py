"""Weights from a copy in the cache folder equal those of the checkpoint, bit for bit; invalid copies are ignored."""

import os
import shutil
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

import onward
from onward.checkpoint import quantized_folder
from onward.errors import OnwardWarning
from onward.language_model import prefix_disk, weights_copy
from onward.language_model.weights import WeightsReader
from onward.models import FAMILIES
from onward.native import machine
from onward.testing import random_checkpoint
from tiny_checkpoint import FEW_EXPERTS

WEIGHTS = "model.safetensors"
READS = []  # of checkpoints themselves
FAMILY_NAMES = [name.removesuffix("ForCausalLM").lower() for name in FAMILIES if name.endswith("ForCausalLM")]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of copies, which weights of any size and age get."""
    monkeypatch.setenv("ONWARD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(weights_copy, "MIN_NBYTES", 1)
    monkeypatch.setattr(prefix_disk, "_RECENT", -3600.0)
    monkeypatch.setattr(weights_copy, "has_huge_pages", lambda folder: True)
    read = WeightsReader._read
    monkeypatch.setattr(WeightsReader, "_read", lambda self: READS.append(self) or read(self))
    return tmp_path / "cache" / "weights"


def load(folder, **options):
    """Load a model, and wait until its copy has its name. is_from_copy: whether it was read from one."""
    before = len(READS)
    lm = onward.load(folder, **{"quantize": "int8"} | options)
    lm.is_from_copy = len(READS) == before
    for thread in threading.enumerate():
        if thread.name == "onward-weights-copy":
            thread.join()
    return lm


def copies(cache):
    return sorted(path for path in cache.iterdir() if not path.is_symlink()) if cache.exists() else []


def bits(lm):
    leaves, structure = pytree.tree_flatten(lm.model.params)
    return structure, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def assert_equal(one, other):
    (structure, leaves), (other_structure, other_leaves) = bits(one), bits(other)
    assert structure == other_structure
    for leaf, same in zip(leaves, other_leaves, strict=True):
        assert (leaf.dtype, leaf.shape) == (same.dtype, same.shape)
        assert torch.equal(leaf.view(torch.uint8), same.view(torch.uint8))
    assert torch.equal(one.logits(list(range(40))), other.logits(list(range(40))))


@pytest.mark.strength(1)
@pytest.mark.parametrize("quantize", ["int8", "iq4_nl", "int4", None])
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["copied", "mapped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_copy_has_the_bits_of_the_checkpoint(tmp_path, cache, monkeypatch, family, dtype, share, quantize):
    monkeypatch.setattr(quantized_folder, "read_in_huge_pages", lambda address, count: share)
    folder = random_checkpoint(tmp_path / "model", family, dtype=dtype, **FEW_EXPERTS.get(family, {}))
    first = load(folder, quantize=quantize)
    second = load(folder, quantize=quantize)
    assert not first.is_from_copy
    assert second.is_from_copy == bool(copies(cache))
    assert_equal(first, second)


@pytest.mark.parametrize("quantize", ["int8", None])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "deepseekv3", "lfm2", "qwen3_5"])
def test_families_without_experts_get_a_copy(tmp_path, cache, family, quantize):
    load(random_checkpoint(tmp_path / "model", family), quantize=quantize)
    has_experts = family == "deepseekv3"
    assert len(copies(cache)) == (0 if has_experts else 1)


def test_texts_from_a_copy_are_equal(tmp_path, cache):
    folder = random_checkpoint(tmp_path / "model", dtype=torch.bfloat16, shards=2)
    texts = [load(folder).generate([1, 2, 3], max_new_tokens=20, seed=3, temperature=1.0).token_ids for _ in range(2)]
    assert texts[0] == texts[1]
    assert load(folder).is_from_copy


def test_each_dtype_and_format_has_its_own_copy(tmp_path, cache):
    folder = random_checkpoint(tmp_path / "model", dtype=torch.bfloat16)
    for options in ({}, {"dtype": "float32"}, {"quantize": "int4"}, {"quantize": None}):
        load(folder, **options)
        assert_equal(load(folder, **options), load(folder, **options))
    assert len(copies(cache)) == 4
    for options in ({"cache_format": "int8"}, {"max_seq_len": 64}, {"compile": "eager"}):
        lm = load(folder, **options)
        assert lm.is_from_copy
    assert len(copies(cache)) == 4


def test_a_changed_checkpoint_is_read_again(tmp_path, cache):
    folder = random_checkpoint(tmp_path / "model", seed=1)
    first = load(folder)
    status = (folder / WEIGHTS).stat()
    other = random_checkpoint(tmp_path / "other", seed=2)
    (folder / WEIGHTS).write_bytes((other / WEIGHTS).read_bytes())
    os.utime(folder / WEIGHTS, ns=(status.st_atime_ns, status.st_mtime_ns))
    again = load(folder)
    assert not again.is_from_copy
    assert_equal(again, load(other))
    assert not torch.equal(first.logits([1, 2]), again.logits([1, 2]))


def test_equal_checkpoints_share_a_copy(tmp_path, cache):
    folder = random_checkpoint(tmp_path / "model")
    load(folder)
    shutil.copytree(folder, tmp_path / "again")
    assert not load(tmp_path / "again").is_from_copy
    assert len(copies(cache)) == 1
    assert load(tmp_path / "again").is_from_copy


@pytest.mark.parametrize("quantize", ["int8", None])
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["copied", "mapped"])
def test_changes_of_loaded_weights_do_not_reach_the_copy(tmp_path, cache, monkeypatch, share, quantize):
    monkeypatch.setattr(quantized_folder, "read_in_huge_pages", lambda address, count: share)
    folder = random_checkpoint(tmp_path / "model")
    first = load(folder, quantize=quantize)
    expected = first.logits([1, 2, 3])
    for lm in (first, load(folder, quantize=quantize), load(folder, quantize=quantize)):
        for leaf in bits(lm)[1]:
            leaf.zero_()
    assert torch.equal(load(folder, quantize=quantize).logits([1, 2, 3]), expected)


def test_floats_get_no_copy_without_huge_pages(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(weights_copy, "has_huge_pages", lambda folder: False)
    folder = random_checkpoint(tmp_path / "model", dtype=torch.bfloat16)
    first = load(folder, quantize=None)
    assert copies(cache) == []
    assert not load(folder, quantize=None).is_from_copy
    load(folder)
    assert load(folder).is_from_copy
    assert_equal(load(folder, quantize=None), first)


def test_a_process_that_ends_at_once_leaves_a_copy(tmp_path, cache):
    folder = random_checkpoint(tmp_path / "model")
    program = (
        "import onward\n"
        "from onward.language_model import prefix_disk, weights_copy\n"
        "weights_copy.MIN_NBYTES, weights_copy._PART, prefix_disk._RECENT = 1, 1000, -3600.0\n"
        f"onward.load({str(folder)!r}, quantize='int8')\n"
    )
    subprocess.run([sys.executable, "-c", program], env=os.environ, check=True, timeout=120)
    assert len(copies(cache)) == 1
    assert load(folder).is_from_copy


@pytest.mark.parametrize("quantize", ["int8", None])
@pytest.mark.parametrize("damage", ["cut", "no manifest", "no weights", "other shapes"])
def test_a_damaged_copy_is_not_used_and_is_written_again(tmp_path, cache, damage, quantize):
    folder = random_checkpoint(tmp_path / "model")
    first = load(folder, quantize=quantize)
    (place,) = copies(cache)
    if damage == "cut":
        os.truncate(place / WEIGHTS, 1000)
    elif damage == "no manifest":
        (place / "config.json").write_text("{}")
    elif damage == "no weights":
        (place / WEIGHTS).unlink()
    else:
        tensors = load_file(place / WEIGHTS)
        save_file({name: tensor[..., :1].contiguous() for name, tensor in tensors.items()}, place / WEIGHTS)
    assert_equal(load(folder, quantize=quantize), first)
    again = load(folder, quantize=quantize)
    assert again.is_from_copy
    assert_equal(again, first)


def test_progress_is_reported(tmp_path, cache):
    folder = random_checkpoint(tmp_path / "model", num_hidden_layers=3)
    fractions = [[], []]
    for each in fractions:
        load(folder, progress=each.append)
    assert fractions[0] == fractions[1] == [1 / 3, 2 / 3, 1.0]


@pytest.mark.parametrize("value", ["", None])
def test_nothing_is_written_without_a_folder(tmp_path, cache, monkeypatch, value):
    folder = random_checkpoint(tmp_path / "model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    if value is None:
        monkeypatch.delenv("ONWARD_CACHE_DIR")
    else:
        monkeypatch.setenv("ONWARD_CACHE_DIR", value)
    load(folder)
    assert not cache.exists()
    assert (tmp_path / "user" / "onward" / "weights").exists() == (value is None)


def test_small_weights_and_recent_files_get_no_copy(tmp_path, cache, monkeypatch):
    folder = random_checkpoint(tmp_path / "model")
    monkeypatch.setattr(weights_copy, "MIN_NBYTES", 10**9)
    load(folder)
    monkeypatch.setattr(weights_copy, "MIN_NBYTES", 1)
    monkeypatch.setattr(prefix_disk, "_RECENT", 3600.0)
    load(folder)
    assert copies(cache) == []


@pytest.mark.parametrize("quantize", ["int8", None])
@pytest.mark.parametrize("problem", ["full", "read-only", "of others"])
def test_an_unwritable_folder_is_one_warning(tmp_path, cache, monkeypatch, problem, quantize):
    monkeypatch.setattr("onward.errors._warned", set())
    folder = random_checkpoint(tmp_path / "model")
    if problem == "full":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 100, 0))
    elif problem == "read-only":
        cache.parent.write_text("a file where the folder would be")
    else:
        cache.mkdir(parents=True)
        cache.chmod(0o777)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, second = load(folder, quantize=quantize), load(folder, quantize=quantize)
    messages = [str(each.message) for each in caught if each.category is OnwardWarning]
    assert len(messages) == (0 if quantize is None else 1)
    assert all(each.startswith(f"the weights cannot be stored in {cache} for the next load") for each in messages)
    assert_equal(first, second)
    assert copies(cache) == []


def test_a_full_disk_leaves_no_partial_copy(tmp_path, cache, monkeypatch):
    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    folder = random_checkpoint(tmp_path / "model", seed=7)
    monkeypatch.setattr(weights_copy, "write_copy", fail)
    monkeypatch.setattr("onward.errors._warned", set())
    with pytest.warns(OnwardWarning, match="No space left on device"):
        load(folder)
    assert copies(cache) == []


def test_a_copy_writable_by_others_is_not_read(tmp_path, cache):
    folder = random_checkpoint(tmp_path / "model")
    load(folder)
    (place,) = copies(cache)
    assert [path.stat().st_mode & 0o777 for path in (cache, place)] == [0o700, 0o700]
    place.chmod(0o722)
    assert not load(folder).is_from_copy


def test_least_recently_used_copies_are_deleted_over_the_limit(tmp_path, cache, monkeypatch):
    folders = [random_checkpoint(tmp_path / f"model-{seed}", seed=seed) for seed in range(3)]
    load(folders[0])
    (place,) = copies(cache)
    nbytes = sum(file.stat().st_size for file in place.iterdir())
    monkeypatch.setattr(weights_copy, "MAX_NBYTES", int(2.5 * nbytes))
    load(folders[1])
    now = time.time()
    for path in copies(cache):
        os.utime(path, (now - 100, now - 100))
    assert load(folders[0]).is_from_copy  # used last
    unfinished = cache / ".0123456789abcdef"
    unfinished.mkdir()
    os.utime(unfinished, (now - 10_000, now - 10_000))
    load(folders[2])
    assert len(copies(cache)) == 2
    assert [load(folder).is_from_copy for folder in (folders[0], folders[2])] == [True, True]
    assert all(path.exists() for path in cache.iterdir())  # no link to a copy that is gone


def test_weights_over_the_limit_get_no_copy(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(weights_copy, "MAX_NBYTES", 1000)
    load(random_checkpoint(tmp_path / "model"))
    assert copies(cache) == []


def test_new_weights_replace_mapped_pages(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(quantized_folder, "read_in_huge_pages", lambda address, count: 1.0)
    sizes = {"hidden_size": 256, "intermediate_size": 16384, "vocab_size": 16384}  # matrices of 8 MB
    sizes |= {"dtype": torch.bfloat16, "tie_word_embeddings": False}
    folders = [random_checkpoint(tmp_path / f"model-{seed}", seed=seed, **sizes) for seed in range(2)]
    load(folders[0], quantize=None)
    lm, expected = load(folders[0], quantize=None), load(folders[1], quantize=None)
    assert lm.is_from_copy

    def is_mapped(tensor):
        middle = tensor.data_ptr() + tensor.nbytes // 2
        return any(start <= middle < start + size for start, size in machine.file_mappings())

    large = [leaf for leaf in bits(lm)[1] if leaf.nbytes >= 8 << 20]
    assert large
    assert all(map(is_mapped, large)) == (sys.platform == "linux")
    lm.update_weights(load_file(folders[1] / WEIGHTS))
    assert not any(map(is_mapped, large))
    assert_equal(lm, expected)
    lm.update_weights(load_file(folders[0] / WEIGHTS))
    assert_equal(lm, load(folders[0], quantize=None))
    lm = load(folders[0], quantize=None)
    own = lm.model.params.embed_tokens.weight
    assert is_mapped(own)
    lm.update_weights(load_file(folders[0] / WEIGHTS) | {"model.embed_tokens.weight": own})
    assert_equal(lm, load(folders[0], quantize=None))
