"""The wheel in dist/, installed in a fresh environment, does the main job. `make wheel-test` builds it and runs this.

It isn't named test_…, so that `make test` leaves it out: the compiler takes a minute or more.
"""

import zipfile
from pathlib import Path

import pytest
from fresh_environment import ROOT, install, run_main_job

import onward


@pytest.fixture
def wheel() -> Path:
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    assert len(wheels) == 1, f"dist/ has {[wheel.name for wheel in wheels]}; `make wheel` puts one wheel there"
    return wheels[0]


def test_one_wheel_serves_every_python(wheel: Path) -> None:
    name, version, python, abi, _platform = wheel.stem.split("-")
    assert (name, version, python, abi) == ("onward", onward.__version__, "py3", "none")


def test_the_wheel_only_contains_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    package = {name.removeprefix("onward/") for name in names if name.startswith("onward/")}
    libraries = {name for name in package if name.startswith("native/lib/")}
    sources = ROOT / "src" / "onward"
    assert package - libraries == {
        path.relative_to(sources).as_posix()
        for path in sources.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "native/lib/libonward_portable.so" in libraries
    assert all(name.startswith(("onward/", f"onward-{onward.__version__}.dist-info/")) for name in names)


def test_the_wheel_works_outside_the_clone_and_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    """No program is on PATH: neither a compiler nor CMake. It loads kernels all the same."""
    (tmp_path / "no programs").mkdir()
    path = {"PATH": str(tmp_path / "no programs")}
    python = install(wheel, tmp_path / "environment", **path)
    output = run_main_job(python, tmp_path, **path)
    assert f"in {tmp_path / 'environment'} works; kernels: " in output
    assert "portable" in output
