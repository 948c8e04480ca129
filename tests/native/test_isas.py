"""Instruction sets: one header and one line each, and the sets that have the same bits (docs/decisions/0025)."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from kernel_calls import DTYPES, attention, use
from packed import Packed

from onward import native
from onward.native.interface import Format

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "native" / "src"
LIST = (ROOT / "native" / "CMakeLists.txt").read_text()
LINES = re.findall(r"^onward_(?:x86|arm|library)\((\w+) ", LIST, re.MULTILINE)
ALIKE = [isa for isa in native.available_isas() if native.bits_of(isa) in ("avx2", "neon")]
alike = pytest.mark.skipif(len(ALIKE) < 2, reason="no two libraries with the same bits run here")


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_kernels_do_not_depend_on_the_instruction_set_directly() -> None:
    for path in SOURCES.rglob("*.*"):
        if path.parent.name != "isa":
            asked = re.findall(r"__AVX\w*|__ARM_FEATURE\w*|_mm\d*_\w+|\bv\w+q_[fsu]\d+\b", path.read_text())
            assert not asked, f"{path}: {asked[0]}"


def test_every_isa_has_a_header_a_line_and_documentation() -> None:
    assert LINES
    for isa in LINES:
        assert (SOURCES / "isa" / f"{isa}.h").is_file()
        assert f"`{isa}`" in (ROOT / "docs" / "environment.md").read_text()
        assert f"| `{isa}` |" in (ROOT / "native" / "README.md").read_text()
    assert [isa for isa in LINES if isa in native.built_isas()] == native.built_isas()


@pytest.mark.skipif("avx512vnni" not in native.available_isas(), reason="runs AVX-VNNI in the encoding of AVX-512")
def test_every_operation_of_avxvnni_has_the_bits_of_avx2(tmp_path: Path) -> None:
    if (compiler := shutil.which(os.environ.get("CXX", "g++"))) is None:
        pytest.skip("needs a C++ compiler")
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-mavx2", "-mfma", "-mf16c", "-w", "-DONWARD_EVEX"]
    results = []
    for isa in ("avx2", "avxvnni"):
        program = tmp_path / isa
        source = [f"-I{SOURCES}", f'-DONWARD_ISA_HEADER="isa/{isa}.h"', str(ROOT / "tests/native/simd_bits.cpp")]
        subprocess.run([compiler, *flags, *source, "-o", str(program)], check=True)
        results.append(subprocess.run([program], check=True, capture_output=True, text=True).stdout)
    assert "dot_i8" in results[0]
    assert results[0] == results[1]


@alike
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", Format)
def test_products_with_weights_have_the_bits_of_avx2(fmt: Format, dtype: torch.dtype) -> None:
    chosen = native.isa()
    try:
        results = []
        for isa in ALIKE:
            use(isa)
            weight = Packed.random(fmt, 100, 352, drawn(3))
            x = torch.randn(21, 352, generator=drawn(4)).to(dtype)
            results.append(torch.cat([weight.linear(x[:rows], out=dtype) for rows in (1, 3, 21)]))
        assert all(torch.equal(each, results[0]) for each in results)
    finally:
        use(chosen)


@alike
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_has_the_bits_of_avx2(dtype: torch.dtype) -> None:
    chosen = native.isa()
    try:
        results = []
        for isa in ALIKE:
            use(isa)
            q, k, v = (torch.randn(2, h, 150, 80, generator=drawn(h)).to(dtype) for h in (8, 2, 4))
            v = v[:, :2]
            offsets = torch.tensor([0, 3], dtype=torch.int32)
            many = attention(q[:, :, :140], k, v, offsets)
            one = attention(q[:, :, :1].contiguous(), k, v, torch.tensor([120, 7], dtype=torch.int32))
            results.append((many, one))
        assert all(torch.equal(a, b) for each in results for a, b in zip(each, results[0], strict=True))
    finally:
        use(chosen)
