"""Instruction sets that compute the same bits stand in for each other: fingerprints, receipts, sessions and beams."""

import dataclasses
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby, permutations
from pathlib import Path

import pytest
import torch

import onward
from onward import native, ops
from onward.language_model.fingerprint import bits_fingerprint, build_fingerprint, computed_by
from onward.testing import tiny_model

GROUPS = [list(sets) for _, sets in groupby(sorted(native.available_isas(), key=native.bits_of), native.bits_of)]
PAIRS = [pair for group in GROUPS for pair in permutations(group, 2)]
PROMPT = "Once upon a time there was a fox"
REQUESTS = (
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0.9, "seed": 1, "logprobs": 2},
    {"temperature": 1.3, "seed": 2, "top_p": 0.9, "top_k": 50, "min_p": 0.02},
    {"temperature": 1.0, "seed": 3, "typical_p": 0.8, "xtc_probability": 0.4, "xtc_threshold": 0.1},
    {"temperature": 1.1, "seed": 4, "dry_multiplier": 0.8, "frequency_penalty": 0.3},
)

pytestmark = pytest.mark.skipif(not PAIRS, reason="no two instruction sets of this machine have the same bits")


@contextmanager
def using(isa: str) -> Iterator[None]:
    before, threads = native.isa(), native.num_threads()
    native.select_isa(isa)
    try:
        yield
    finally:
        native.select_isa(before)
        native.set_num_threads(threads)


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_a_receipt_of_one_set_is_verified_by_the_other(first: str, second: str, quantize: str | None) -> None:
    with using(first):
        lm = onward.load("demo", quantize=quantize)
        receipts = [lm.receipt(lm.generate(PROMPT, max_new_tokens=40, **options)) for options in REQUESTS]
        beams = lm.generate(PROMPT, max_new_tokens=20, beams=4, temperature=0)
    with using(second):
        other = onward.load("demo", quantize=quantize)
        assert all(other.verify(receipt).is_verified for receipt in receipts)
        again = other.generate(PROMPT, max_new_tokens=20, beams=4, temperature=0)
    assert [each.token_ids for each in again.choices] == [each.token_ids for each in beams.choices]
    assert again.score == beams.score


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_session_of_one_set_continues_on_the_other(first: str, second: str, tmp_path: Path) -> None:
    options = {"max_new_tokens": 20, "temperature": 1.0, "seed": 5}
    with using(first):
        session = onward.Session(onward.load("demo"))
        session.generate(PROMPT, **options)
        session.save(tmp_path / "session")
        expected = session.generate(" and", **options).token_ids
    with using(second), warnings.catch_warnings(action="error"):
        loaded = onward.Session.load(tmp_path / "session", onward.load("demo"))
        assert loaded.generate(" and", **options).token_ids == expected


def texts() -> object:
    lm = onward.load("demo")
    completions = [lm.generate(PROMPT, max_new_tokens=30, **options) for options in REQUESTS]
    beams = lm.generate(PROMPT, max_new_tokens=20, beams=4, temperature=0)
    return [[each.token_ids, str(each.logprobs)] for each in completions], beams.token_ids, beams.score


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="torch has one form of its functions")
def test_the_bits_do_not_depend_on_the_instructions_of_torch() -> None:
    code = f"""
import sys, torch
sys.path[:0] = {sys.path!r}
from test_shared_bits import texts
assert torch.backends.cpu.get_cpu_capability() == "AVX2"
print(texts())
"""
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    there = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert there.stdout == f"{texts()}\n"


def test_sets_with_other_bits_have_other_fingerprints() -> None:
    model = onward.load("demo").model
    found = set()
    for group in GROUPS:
        of_group = set()
        for isa in group:
            with using(isa):
                of_group.add((bits_fingerprint(model), build_fingerprint(), computed_by(model)))
        assert len(of_group) == 1
        found |= of_group
    assert len(found) == len(GROUPS)


def test_forwards_that_call_torch_name_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    family = tiny_model("qwen3")
    custom = dataclasses.replace(family, forward=lambda *arguments: family.forward(*arguments))
    before = computed_by(family), computed_by(custom)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "SVE256")
    assert computed_by(family) == before[0]
    assert computed_by(custom) == f"cpu native {native.bits_of(native.isa())} torch SVE256" != before[1]
    ops.choose("definition")
    try:
        assert computed_by(family) == "cpu definition none torch SVE256"
    finally:
        ops.choose(native.isa())
