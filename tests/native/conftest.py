"""Every kernel test runs with every library that this machine supports."""

from collections.abc import Iterator

import pytest

from onward import native


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        isas = native.available_isas()
        skip = pytest.param("none", marks=pytest.mark.skip(reason=f"no library in {native.library_folder()}"))
        metafunc.parametrize("isa", isas or [skip], indirect=True)


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the library in use during the test."""
    before, threads = native.isa(), native.num_threads()
    native.select_isa(request.param)
    yield request.param
    native.select_isa(before)
    native.set_num_threads(threads)
