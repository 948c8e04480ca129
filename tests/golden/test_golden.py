"""This tree gives the recorded bits, programs and counts. The package's docstring describes streams and statuses."""

import json

import pytest
import torch
from tests.golden import RECORD, bits, cache, programs, recorded_isa

# One family of each kind of layer: the others are compared by `python -m tests.golden check`.
FAMILIES = ("gemma3", "gptoss", "deepseekv3", "qwen3next", "falconh1")


def recorded(name: str) -> dict:
    file = RECORD / f"{name}.json"
    if not file.is_file():
        pytest.skip(f"no record of this instruction set: {file.name}")
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", ["demo", *FAMILIES])
def test_bits_and_programs_equal_the_recorded_ones(name: str) -> None:
    key = f"{name} bfloat16"
    record = recorded(f"bits-{recorded_isa()}")
    assert bits.bits(bits.language_model(name, torch.bfloat16)) == record[key]
    assert programs.program_hashes(bits.language_model(name, torch.bfloat16)) == recorded("programs")[key]


@pytest.mark.parametrize("family", cache.FAMILIES)
def test_hits_evictions_and_preemptions_equal_the_recorded_ones(family: str) -> None:
    assert cache.counts(family) == recorded("cache")[family]
