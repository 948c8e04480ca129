"""`onward serve` with several models: they share one --cache-memory."""

from types import SimpleNamespace

import pytest
from command_line import Cli

import onward
from onward.cli import serve as command
from onward.native.machine import memory_limit


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The cache_memory of each engine that the command makes. It serves nothing."""
    made: list[int | None] = []

    class Engine:
        def __init__(self, lm: object, *, cache_memory: int | None = None, **limits: object) -> None:
            made.append(cache_memory)

        def fingerprint_with(self, adapter: None) -> str:
            return ""

        def close(self, drain: bool) -> None:
            pass

    package = SimpleNamespace(
        Settings=SimpleNamespace,
        bound=lambda host, port: SimpleNamespace(close=lambda: None),
        create_app=lambda engines, settings: None,
        log_to_stderr=lambda: None,
        run=lambda app, address, ready: None,
    )
    monkeypatch.setattr(onward, "Engine", Engine)
    monkeypatch.setattr(command, "_server_package", lambda: package)
    monkeypatch.setattr(command, "load_model", lambda *flags: None)
    monkeypatch.setattr("dataclasses.replace", lambda settings, **changes: settings)
    return made


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("gib", [None, 3, 0.5])
def test_models_share_the_memory_of_caches(cli: Cli, engines: list[int | None], count: int, gib: float | None) -> None:
    models = [word for at in range(count) for word in ("--model", f"m{at}=demo")]
    assert cli("serve", *models, *([] if gib is None else ["--cache-memory", str(gib)])).code == 0
    assert len(engines) == count
    assert len(set(engines)) == 1
    if count == 1 and gib is None:
        assert engines == [None]  # the engine's own default
    else:
        total = memory_limit() // 4 if gib is None else gib * 2**30
        assert total - count < sum(filter(None, engines)) <= total
