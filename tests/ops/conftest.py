"""Every test of an op runs with each of its forms: the definition, and the kernels of every library.

A module sets KERNELS_ALONE = True if its tests are about properties that the definitions don't guarantee.
"""

import pytest

from onward import native, ops


def pytest_generate_tests(metafunc):
    forms = [] if getattr(metafunc.module, "KERNELS_ALONE", False) else ["definition"]
    metafunc.parametrize("form", [*forms, *native.available_isas()], indirect=True)


@pytest.fixture(autouse=True)
def form(request):
    before, threads = ops.choice(), native.num_threads()
    ops.choose(request.param)
    yield request.param
    native.set_num_threads(threads)
    ops.choose("definition" if before.form == "definition" else before.isa)
