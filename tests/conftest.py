"""Settings of the whole suite: deterministic, and independent of the number of cores.

ONWARD_TESTS=full runs every case of every test and all examples; by default the cases cover all pairs of values
(`tests/selection.py`), and a quarter of the examples run.
"""

import ast
import functools
import gc
import os
from collections.abc import Callable, Generator
from typing import Any
from unittest import TestCase

import hypothesis
import pytest
import torch
from tests.selection import selected

FULL = os.environ.get("ONWARD_TESTS") == "full"

# Copies of packed weights would outlive the suite.
os.environ["ONWARD_CACHE_DIR"] = ""

# Tests are of tiny models, on which a second thread is only overhead.
torch.set_num_threads(1)


def _without_collections(parse: Callable[..., ast.AST]) -> Callable[..., ast.AST]:
    """CPython 3.11's `ast.parse` raises SystemError if a finalizer that runs meanwhile parses too, as one that logs a
    traceback does (for its carets). hypothesis parses the sources of tests."""

    @functools.wraps(parse)
    def wrapped(*args: Any, **kwargs: Any) -> ast.AST:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return parse(*args, **kwargs)
        finally:
            if was_enabled:
                gc.enable()

    return wrapped


ast.parse = _without_collections(ast.parse)

# The same examples in every run; HYPOTHESIS_PROFILE=explore looks for new ones.
hypothesis.settings.register_profile("repeat", derandomize=True, deadline=None, database=None, max_examples=100)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "repeat")
hypothesis.settings.load_profile(PROFILE)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imported modules and collected tests live as long as the session, so the garbage collector never visits them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """After a module's tests no collection walks what they have imported and cached: `gc.collect` in a test or in a
    server that unloads a model would take a second in the second half of the suite."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "strength(n): by default, cases that cover n values together (2; 0: all)")
    config.addinivalue_line("markers", "stride(n): by default, every nth of these cases (1; 0: none, they run in full)")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A test that is named on the command line runs whole.
    if FULL or any("::" in argument for argument in config.args):
        return
    items[:], others = selected(items, _strength, _stride)
    config.hook.pytest_deselected(items=others)
    if PROFILE == "repeat":
        _take_fewer_examples({getattr(item, "function", None) for item in items})
        for machine in {item.cls for item in items if issubclass(getattr(item, "cls", None) or object, TestCase)}:
            if isinstance(getattr(machine, "settings", None), hypothesis.settings):  # of a RuleBasedStateMachine
                machine.settings = _of_fewer_examples(machine.settings)


def _strength(item: pytest.Item) -> int:
    mark = item.get_closest_marker("strength")
    return 2 if mark is None else mark.args[0]


def _stride(item: pytest.Item) -> int:
    mark = item.get_closest_marker("stride")
    return 1 if mark is None else mark.args[0]


def _take_fewer_examples(tests: set[Any]) -> None:
    """A quarter of the examples of each property, 10 at least."""
    for test in tests:
        settings = getattr(test, "_hypothesis_internal_use_settings", None)  # hypothesis has no public way
        if settings is not None:
            test._hypothesis_internal_use_settings = _of_fewer_examples(settings)


def _of_fewer_examples(settings: hypothesis.settings) -> hypothesis.settings:
    return hypothesis.settings(settings, max_examples=min(settings.max_examples, max(10, settings.max_examples // 4)))
