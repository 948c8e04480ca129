"""Benchmarks run seldom, so they could ask the package for names that it no longer has."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if path.name != "__main__.py"
)


@pytest.mark.parametrize("module", MODULES)
def test_a_benchmark_finds_what_it_imports(module):
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] in ("onward", "benchmarks"):
            raise
        pytest.skip(f"{error.name} is not installed")
