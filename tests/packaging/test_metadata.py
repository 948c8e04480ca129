"""Metadata of the package that is in several places is the same in each."""

import re
import tomllib
from itertools import chain

from fresh_environment import ROOT

import onward

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def canonical(name: str) -> str:
    """The name of a package as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required() -> set[str]:
    """The packages that pyproject.toml names: needed, and by extra."""
    requirements = chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    names = {re.match(r"[\w.-]+", requirement) for requirement in requirements}
    return {canonical(name.group()) for name in names if name}


def test_the_version_is_defined_once() -> None:
    """In src/onward/__init__.py. test_sdist.py compares the built version."""
    assert PROJECT["dynamic"] == ["version"]
    assert "version" not in PROJECT
    assert not re.search(r"^version:", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", onward.__version__)


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [re.fullmatch(r"([\w.-]+)==[\w.+]+(; .+)?", line) for line in lines if not line.startswith("#")]
    named = [(canonical(pin[1]), pin[2]) for pin in pins if pin]
    assert len(named) == len(pins) == len(set(named))
    assert required() <= {name for name, _ in named}


def test_torch_is_pinned_to_its_cpu_build() -> None:
    """On Linux, where PyPI has gigabytes of CUDA: pip takes those where the index of PyTorch does not answer."""
    pins = re.findall(r"^torch==(.+); sys_platform (.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (linux, on_linux), (elsewhere, not_on_linux) = pins
    assert (on_linux, not_on_linux) == ('== "linux"', '!= "linux"')
    assert linux == f"{elsewhere}+cpu"


def test_every_dependency_has_its_reason() -> None:
    words = {
        canonical(word) for word in re.findall(r"[\w.-]+\w", (ROOT / "docs/decisions/0006-dependencies.md").read_text())
    }
    assert required() <= words
