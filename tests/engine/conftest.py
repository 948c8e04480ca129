"""After every test: each engine's generations have ended, its blocks are free or cached, and its thread is gone."""

import threading

import pytest
from checked_engine import OPEN


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    engines, OPEN[:] = list(OPEN), []
    for engine in engines:
        engine.close(drain=False)
    for engine in engines:
        engine.check()
    names = [thread.name for thread in threading.enumerate()]
    assert "onward-engine" not in names
