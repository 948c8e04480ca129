"""One server for each variant, for all tests of this folder."""

from collections.abc import Iterator

import pytest
from tests.hostile.program import Standing
from tests.hostile.running import GROWTH


@pytest.fixture(scope="package")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    """A server that requires API keys, with the demo under every template."""
    with Standing(tmp_path_factory.mktemp("keyed")) as standing:
        yield standing
        _check_memory(standing)


@pytest.fixture(scope="package")
def keyless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    """A server without keys: all its clients have one address."""
    with Standing(tmp_path_factory.mktemp("keyless"), keyed=False, templates=()) as standing:
        yield standing
        _check_memory(standing)


def _check_memory(standing: Standing) -> None:
    """Check that all tests together have left no memory behind."""
    growth = standing.program.memory() - standing.program.idle_memory
    assert growth < GROWTH, f"{growth:.0f} MB"
