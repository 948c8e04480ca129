"""The differences that a fingerprint distinguishes, and those that it doesn't."""

import dataclasses
import shutil
import time
from pathlib import Path

import pytest
import torch
from checked_engine import CheckedEngine

import onward
from demo_adapters import demo_adapter
from onward import LanguageModel
from onward.engine.engine import probe
from onward.errors import RequestError
from onward.language_model import fingerprint as build
from onward.language_model.fingerprint import COMPUTING, PARTS, parts_that_differ
from onward.testing import ByteTokenizer, tiny_model


def fingerprint(model):
    with CheckedEngine(LanguageModel(model, ByteTokenizer())) as engine:
        return engine.fingerprint


def test_equal_models_have_equal_fingerprints_and_others_differ():
    first = fingerprint(tiny_model(seed=7))
    assert fingerprint(tiny_model(seed=7)) == first
    assert fingerprint(dataclasses.replace(tiny_model(seed=7), new_blocks=None)) == first, "blocks change no bits"
    others = {fingerprint(tiny_model(seed=8)), fingerprint(tiny_model("llama", seed=7)), fingerprint(_quantized())}
    assert len(others) == 3
    assert first not in others
    for other in others:
        assert [left == right for left, right in zip(first.split("-"), other.split("-"), strict=True)] == [
            False,
            *[True] * (len(PARTS) - 1),
        ]


def _quantized():
    return onward.quantize(LanguageModel(tiny_model(seed=7), ByteTokenizer()), "int8").model


def test_changed_weights_change_the_fingerprint():
    model = tiny_model(seed=7)
    with CheckedEngine(LanguageModel(model, ByteTokenizer())) as engine:
        before = engine.fingerprint
        assert engine.fingerprint == before
        with torch.no_grad():
            for tensor in torch.utils._pytree.tree_leaves(model.params):
                if isinstance(tensor, torch.Tensor):
                    tensor.mul_(1.5)
        assert engine.fingerprint != before


def test_another_instruction_set_is_detected_and_named():
    if "portable" not in onward.native.available_isas() or onward.native.isa() in ("portable", "none"):
        pytest.skip("there is one instruction set")
    chosen = onward.native.isa()
    with CheckedEngine(LanguageModel(tiny_model(seed=7), ByteTokenizer())) as engine:
        here = engine.fingerprint
        try:
            onward.ops.choose("portable")
            there = engine.fingerprint
        finally:
            onward.ops.choose(chosen)
        assert engine.fingerprint == here
        with pytest.raises(RequestError, match=r"different: the device or the instruction set.*: resume it where"):
            engine.resume("abc", emitted=[], fingerprint=there, max_new_tokens=1)
        assert engine.resume("abc", emitted=[], fingerprint=here, max_new_tokens=1).result(60)


def test_adapters_change_only_their_own_fingerprint(tmp_path):
    demo = onward.load("demo")
    demo.load_adapter("one", demo_adapter(tmp_path / "one", 1))
    demo.load_adapter("two", demo_adapter(tmp_path / "two", 2))
    options = {"max_new_tokens": 4, "temperature": 0.0}
    with CheckedEngine(demo) as engine:
        plain, one, two = (engine.fingerprint_with(name) for name in (None, "one", "two"))
        assert engine.fingerprint == plain
        assert len({plain, one, two}) == 3
        assert engine.resume("Once", emitted=[], adapter="one", fingerprint=one, **options).result(60)
        for wrong in (plain, two):
            with pytest.raises(RequestError, match=r"different: the adapter or the steering\): resume it where"):
                engine.resume("Once", emitted=[], adapter="one", fingerprint=wrong, **options)
        with pytest.raises(RequestError, match="three"):
            engine.fingerprint_with("three")


def test_a_file_replaced_after_the_start_has_a_unique_hash(tmp_path, monkeypatch):
    """A process may have loaded the library that had the name before."""
    file = tmp_path / "library.so"
    file.write_bytes(b"the same bytes")
    hash_of = build._hash_of.__wrapped__
    monkeypatch.setattr(build, "_STARTED", time.time() + 60)
    assert hash_of((file,)) == hash_of((file,))
    monkeypatch.setattr(build, "_STARTED", time.time() - 60)
    assert len({hash_of((file,)) for _ in range(3)}) == 3


# Modules that don't compute. A new folder or module must be added either here or to `COMPUTING`.
OUTSIDE = {
    "__init__.py", "__main__.py", "batches", "checkpoint", "cli", "cluster", "demo", "engine", "errors.py",
    "inferencer.py", "integrations", "loading.py", "prefix_store", "protocols", "quantization", "server", "testing",
    "util",
    *(f"distributed/{name}.py" for name in ("__init__", "__main__", "launchers", "links", "ranks")),
    *(f"language_model/{name}.py" for name in ("__init__", "base", "completion", "embedder", "fingerprint")),
    *(f"language_model/{name}.py" for name in ("lens", "weights_copy")),
    *(f"language_model/{name}.py" for name in ("generation_config", "language_model", "logprobs", "new_weights")),
    *(f"language_model/{name}.py" for name in ("options_dict", "prefix_disk", "quantize_model", "receipt")),
    *(f"language_model/{name}.py" for name in ("scoring", "session", "training")),
    *(f"language_model/{name}.py" for name in ("verification", "weights")),
}  # fmt: skip


def test_every_module_is_classified_as_computing_bits_or_not():
    package = Path(onward.__file__).parent
    parts = {name for name in package.iterdir() if name.name not in ("distributed", "language_model")}
    parts |= {file for folder in ("distributed", "language_model") for file in (package / folder).iterdir()}
    there = {str(part.relative_to(package)) for part in parts if part.suffix == ".py" or list(part.rglob("*.py"))}
    assert not OUTSIDE & set(COMPUTING)
    assert there | {"demo"} == OUTSIDE | set(COMPUTING)


def test_only_computing_sources_are_hashed(tmp_path, monkeypatch):
    package = tmp_path / "onward"
    shutil.copytree(Path(onward.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "lib", "*.bin"))
    monkeypatch.setattr(build, "_STARTED", time.time() + 60)

    def source_hash():
        build._hash_of.cache_clear()
        return build._sources.__wrapped__(package)

    before = source_hash()
    for name in (*COMPUTING, *sorted(OUTSIDE - {"demo"})):
        place = package / name
        file = place if place.suffix else max(place.rglob("*.py"))
        text = file.read_text()
        file.write_text(f"{text}# changed\n")
        assert (source_hash() != before) == (name in COMPUTING), name
        file.write_text(text)
    assert source_hash() == before
    build._hash_of.cache_clear()


def probed(model):
    with CheckedEngine(LanguageModel(model, ByteTokenizer())) as engine:
        assert probe(engine) == probe(engine)
        return probe(engine)


def test_a_probe_detects_a_single_number_outside_samples():
    model, damaged = tiny_model(seed=7), tiny_model(seed=7)
    before = probed(model)
    assert probed(tiny_model(seed=7)) == before
    assert probed(tiny_model(seed=8)) != before
    weight = damaged.params.layers[0].feed_forward.down_proj.weight
    assert isinstance(weight, onward.ops.NativeWeight | torch.Tensor)
    numbers = weight if isinstance(weight, torch.Tensor) else weight.data
    with torch.no_grad():
        numbers.view(-1)[3] += 1.0
    assert probed(damaged) != before


def test_a_probe_fits_any_context():
    for context in (2, 7, 64):
        model = dataclasses.replace(tiny_model(seed=7), max_seq_len=context)
        assert len(probed(model)) == 8
    assert probed(dataclasses.replace(tiny_model(seed=7), max_seq_len=None)) == probed(tiny_model(seed=7))


def test_differing_parts_are_named():
    assert parts_that_differ("1-2-3-4-5", "1-2-3-4-5") == ""
    assert parts_that_differ("1-2-3-4-5-6", "1-0-3-4-5-0") == (
        "the device or the instruction set and what they compute of one text"
    )


@pytest.mark.parametrize("text", ["", "abc", "12345678", 7])
def test_invalid_fingerprints_are_refused(text):
    with (
        CheckedEngine(LanguageModel(tiny_model(seed=7), ByteTokenizer())) as engine,
        pytest.raises(RequestError, match="a fingerprint is a text such as"),
    ):
        engine.resume("abc", emitted=[], fingerprint=text, temperature=0.0)
