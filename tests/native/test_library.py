"""Finding and choosing a library of kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onward import native
from onward.errors import NativeUnavailableError, RequestError
from onward.native import loader


def run_python(code: str, **environment: str) -> str:
    """The output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() + done.stderr.strip()


def test_the_chosen_library_answers(isa: str) -> None:
    assert native.isa() == isa
    library = native.library()
    assert library is not None
    assert library.onward_isa_name().decode() == isa


def test_environment_variables_choose_isa_and_threads(isa: str) -> None:
    code = "from onward import native; print(native.isa(), native.num_threads())"
    assert run_python(code, ONWARD_ISA=isa, ONWARD_NUM_THREADS="3") == f"{isa} 3"
    assert run_python(code, ONWARD_ISA="none", ONWARD_NUM_THREADS="1") == "none 1"
    assert "unknown instruction set 'sse9'" in run_python(code, ONWARD_ISA="sse9")
    assert "must be an integer in 1 … 256, got 'many'" in run_python(code, ONWARD_NUM_THREADS="many")


def test_without_libraries_imports_work_and_report_it(tmp_path: Path) -> None:
    code = "from onward import native; print(native.isa(), native.library(), native.available_isas())"
    assert run_python(code, ONWARD_NATIVE_DIR=str(tmp_path), ONWARD_ISA="auto") == "none None []"
    code = "from onward import native; native.select_isa('portable')"
    assert f"it was not built. Available: none (in {tmp_path})" in run_python(code, ONWARD_NATIVE_DIR=str(tmp_path))


def test_an_isa_that_the_machine_lacks_is_refused(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "available_isas", list)
    with pytest.raises(NativeUnavailableError, match=f"'{isa}' cannot be used: this processor cannot run it"):
        native.select_isa(isa)
    assert native.isa() == isa


def test_a_library_built_from_other_sources_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "stub.c"
    source.write_text('const char *onward_isa_name(void) { return "stub"; }')
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "stub.so"), str(source)], check=True)
    with pytest.raises(NativeUnavailableError, match="it was built from other sources"):
        loader.Library(tmp_path / "stub.so")


@pytest.mark.parametrize("count", [0, -1, 257, 1.5, True])
def test_invalid_number_of_threads(isa: str, count: int) -> None:
    with pytest.raises(RequestError, match="must be an integer in 1 … 256"):
        native.set_num_threads(count)


def test_the_number_of_threads_survives_a_change_of_library(isa: str) -> None:
    native.set_num_threads(3)
    for other in native.available_isas():
        native.select_isa(other)
        assert native.num_threads() == 3
