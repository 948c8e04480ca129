"""Every test of a session runs with the definitions and with the kernels of this machine."""

from collections.abc import Iterator

import pytest

from onward import native, ops


@pytest.fixture(autouse=True, params=["definition", *native.available_isas()[:1]])
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    before = ops.choice()
    ops.choose(request.param)
    yield request.param
    ops.choose("definition" if before.form == "definition" else before.isa)
