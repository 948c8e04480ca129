"""`onward serve` with several models: they share one --cache-memory."""

from pathlib import Path
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
        check_response_store=lambda settings: None,
        bound=lambda host, port: SimpleNamespace(close=lambda: None),
        create_app=lambda engines, settings, on_demand=None: None,
        OnDemand=SimpleNamespace,
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
def test_models_share_the_cache_memory(cli: Cli, engines: list[int | None], count: int, gib: float | None) -> None:
    models = [word for at in range(count) for word in ("--model", f"m{at}=demo")]
    assert cli("serve", *models, *([] if gib is None else ["--cache-memory", str(gib)])).code == 0
    assert len(engines) == count
    assert len(set(engines)) == 1
    if count == 1 and gib is None:
        assert engines == [None]  # the engine's own default
    else:
        total = memory_limit() // 4 if gib is None else gib * 2**30
        assert total - count < sum(filter(None, engines)) <= total


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("gib", [None, 3])
def test_models_on_demand_share_it_too(
    cli: Cli, engines: list[int | None], tmp_path: Path, count: int, gib: float | None
) -> None:
    models = [word for at in range(count) for word in ("--model", f"m{at}=demo")]
    more = [] if gib is None else ["--cache-memory", str(gib)]
    assert cli("serve", *models, "--models-dir", str(tmp_path), "--models-max", "3", *more).code == 0
    assert len(engines) == count
    total = memory_limit() // 4 if gib is None else gib * 2**30
    assert engines == [total // (count + 3)] * count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models-dir", "none"], "the folder of models 'none' cannot be read: No such file or directory"),
        (["--models-dir", ".", "--merge", "x"], "--merge, --name-map and --pipeline are for one model"),
        (["--models-dir", ".", "--adapter", "x=y"], "--adapter is for a model on the command line"),
        (["--models-dir", ".", "--models-max", "0"], "--models-max must be a whole number of 1 or more; got 0"),
        (["--models-dir", ".", "--models-memory", "0"], "--models-memory must be a number of GiB above 0; got 0"),
        (["--models-dir", ".", "--models-ttl", "nan"], "--models-ttl must be a number of 0 or more; got nan"),
        (["--models-max", "2"], "--models-max, --models-ttl and --models-memory need --models-dir"),
        (["--adapters-dir", "none"], "adapters_dir must be a folder; got 'none'"),
        (["--weights-dir", "none"], "weights_dir must be a folder; got 'none'"),
    ],
)
def test_options_of_models_on_demand_are_checked(cli: Cli, arguments: list[str], message: str) -> None:
    done = cli("serve", *arguments, "--port", "0")
    assert done.code == 2
    assert message in done.err
