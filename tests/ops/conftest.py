"""Every test of an op runs with each of its forms: the definition, and the kernels of every library here."""

import pytest

from onward import native, ops


@pytest.fixture(autouse=True, params=["definition", *native.available_isas()])
def form(request):
    before = ops.choice()
    ops.choose(request.param)
    yield request.param
    ops.choose("definition" if before.form == "definition" else before.isa)
