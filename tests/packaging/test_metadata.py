"""What is said about the package in more than one place is the same in each."""

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


def test_the_version_is_the_same_everywhere() -> None:
    [cited] = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == PROJECT["version"] == onward.__version__


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==")[0] for line in lines if not line.startswith("#")]
    assert len(pins) == len(set(map(canonical, pins)))
    assert required() <= set(map(canonical, pins))


def test_every_dependency_has_its_reason() -> None:
    words = {
        canonical(word) for word in re.findall(r"[\w.-]+\w", (ROOT / "docs/decisions/0006-dependencies.md").read_text())
    }
    assert required() <= words
