"""Tests with quantized weights run with each form: the definition, and every library here."""

import pytest

from onward import native, ops


@pytest.fixture(params=["definition", *native.available_isas()])
def form(request):
    before = ops.choice()
    ops.choose(request.param)
    yield request.param
    ops.choose("definition" if before.form == "definition" else before.isa)
