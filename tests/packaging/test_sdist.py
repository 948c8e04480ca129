"""The source distribution: its contents, and an install from it on a machine without a compiler."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from fresh_environment import ROOT, install, run, run_main_job

import onward

# The backend is called as an installer calls it, in the folder of the sources, without the isolation that would
# fetch it from the network: hook, folder, and for a wheel the metadata that was prepared.
BACKEND = (
    "import sys; sys.path.insert(0, 'native'); import backend; print(getattr(backend, sys.argv[1])(*sys.argv[2:]))"
)
WHEEL = BACKEND.replace("(*sys.argv[2:])", "(sys.argv[2], None, sys.argv[3])")

# For contributors with a clone, on its forge. The measurements are dated pages that no code reads.
ONLY_IN_A_CLONE = (".ci/", ".github/", ".gitignore", "benchmarks/results/")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-c", BACKEND, "build_sdist", folder, folder=ROOT)
    [archive] = folder.iterdir()
    return archive


@pytest.fixture(scope="module")
def sources(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    [top] = folder.iterdir()
    assert top.name == f"onward-{onward.__version__}" == sdist.name.removesuffix(".tar.gz")
    return top


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="what a clone has is known from git")
def test_the_sdist_has_every_file_except_those_for_the_forge(sources: Path) -> None:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    in_clone = {name for name in listing.stdout.decode().split("\0") if name and (ROOT / name).is_file()}
    in_sdist = {path.relative_to(sources).as_posix() for path in sources.rglob("*") if path.is_file()}
    assert in_sdist == {name for name in in_clone if not name.startswith(ONLY_IN_A_CLONE)} | {"PKG-INFO"}


def test_the_sdist_has_the_license_and_declares_it(sources: Path) -> None:
    assert (sources / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    lines = (sources / "PKG-INFO").read_text().splitlines()
    assert {"License-Expression: Apache-2.0", "License-File: LICENSE"} <= set(lines)


def test_installation_works_without_a_compiler(sources: Path, tmp_path: Path) -> None:
    metadata, no_compiler = tmp_path / "metadata", {"CC": "/bin/false", "CXX": "/bin/false"}
    metadata.mkdir()
    run(sys.executable, "-c", BACKEND, "prepare_metadata_for_build_wheel", metadata, folder=sources, **no_compiler)
    assert not (sources / "build").exists(), "nothing is compiled while metadata is prepared"
    [prepared] = metadata.iterdir()
    run(sys.executable, "-c", WHEEL, "build_wheel", tmp_path, prepared, folder=sources, **no_compiler)
    [wheel] = tmp_path.glob("*.whl")
    # Nothing in it is of one platform, and its name must not say so.
    assert wheel.name == f"onward-{onward.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
    python = install(wheel, tmp_path / "environment")
    assert "kernels: none" in run_main_job(python, tmp_path, "--no-kernels")
