"""A real uvicorn on a loopback port, in a thread, with engines that are checked at the end."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from live_server import LiveServer

import onward


@pytest.fixture(scope="session")
def lm() -> onward.LanguageModel:
    # Torch's operators round a row of a batch as they like: in float32 that shows in no token here.
    return onward.load("demo", dtype=None if onward.ops.choice().form == "native" else "float32")


@pytest.fixture(scope="module")
def server(lm: onward.LanguageModel) -> Iterator[LiveServer]:
    """One server for the tests of a module."""
    with LiveServer({"demo": lm}) as live:
        yield live


@pytest.fixture
def start() -> Iterator[Callable[..., LiveServer]]:
    """start({"demo": lm}, engine={...}, **settings): a server of one's own."""
    with ExitStack() as stack:
        yield lambda models, **options: stack.enter_context(LiveServer(models, **options))


@pytest.fixture(autouse=True)
def nothing_is_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test nothing runs in the module's server, and its blocks have come back."""
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").wait_idle()
