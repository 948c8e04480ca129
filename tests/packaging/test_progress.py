"""native/progress.py: an install is never silent, and a failure shows the output."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_environment import ROOT

PROGRESS = ROOT / "native" / "progress.py"
sys.path.insert(0, str(PROGRESS.parent))
import progress  # noqa: E402

NINJA = "  [12/129] Building CXX object CMakeFiles/onward_avx512.dir/src/linear/lora.cpp.o"


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("Collecting tokenizers>=0.21 (from onward==0.1.0)", "finding tokenizers"),
        (
            "  Downloading numpy-2.4.6-cp311-cp311-linux.whl (16 MB)",
            "downloading numpy-2.4.6-cp311-cp311-linux.whl (16 MB)",
        ),
        ("  Downloading https://files.example/a/b/rich-15.0.0.whl", "downloading rich-15.0.0.whl"),
        ("Processing /opt/wheels/torch-2.13.0-cp311.whl (from onward==0.1.0)", "reading torch-2.13.0-cp311.whl"),
        (NINJA, "compiling [12/129] avx512 linear/lora.cpp"),
        ("[ 40%] Building CXX object CMakeFiles/onward_avx2.dir/src/norm.cpp.o", "compiling [40%] avx2 norm.cpp"),
        ("[129/129] Linking CXX shared library libonward_avx512.so", "linking [129/129] libonward_avx512.so"),
        ("  Running command Preparing editable metadata (pyproject.toml)", "Preparing editable metadata"),
        ("Installing collected packages: torch", "unpacking torch"),
        ("Installing collected packages: mpmath, torch, onward", "unpacking 3 packages"),
        (
            "WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by 'NewConnectionError('<urllib3 "
            "object at 0x7f>: [Errno -2] Name or service not known')': /whl/cpu/torch/",
            "no answer for /whl/cpu/torch/, trying again",
        ),
        ("Link requires a different Python (3.11.7 not in: '>=3.12'): https://files.example/x.whl", ""),
    ],
)
def test_a_line_reports_the_step(line: str, step: str) -> None:
    assert progress.step_in(line) == step


def run(folder: Path, script: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PROGRESS, "working", sys.executable, "-c", script]
    return subprocess.run(command, cwd=folder, text=True, capture_output=True, **options)  # type: ignore[call-overload]


def test_a_silent_command_reports_its_progress(tmp_path: Path) -> None:
    """In a log: a command that prints one line and sleeps. The interval is patched, the rest is what make runs."""
    script = f"print({NINJA!r}, flush=True); import time; time.sleep(2)"
    patched = (
        "import sys, runpy; sys.argv = sys.argv[1:]; import progress; progress.SECONDS_BETWEEN_LINES = 0.5; "
        "raise SystemExit(progress.main(*sys.argv))"
    )
    result = subprocess.run(
        [sys.executable, "-c", patched, "working", sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PROGRESS.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    first, *steps, last = result.stdout.splitlines()
    assert (first, last.split(":")[0]) == ("working …", "working")
    assert len(steps) >= 2
    assert {line.split(" s  ")[1] for line in steps} <= {"working", "compiling [12/129] avx512 linear/lora.cpp"}
    assert NINJA in (tmp_path / "build" / "progress.log").read_text()


def test_lines_in_a_log_are_less_than_ten_seconds_apart() -> None:
    assert progress.SECONDS_BETWEEN_LINES <= 5


def test_a_failure_shows_the_output_and_its_exit_status(tmp_path: Path) -> None:
    result = run(tmp_path, "print('ERROR: no torch'); raise SystemExit(3)")
    assert result.returncode == 3
    assert result.stdout.splitlines()[2] == "ERROR: no torch"
    assert "build/progress.log" in result.stdout


def test_missing_kernels_are_reported(tmp_path: Path) -> None:
    message = "*** onward is installed without native kernels: no C++17 compiler works here"
    assert message in run(tmp_path, f"print('  {message}')").stdout.splitlines()
    assert message in (ROOT / "native" / "backend.py").read_text()


def test_a_terminal_has_one_line_rewritten_in_place(tmp_path: Path) -> None:
    parent, child = pty.openpty()
    command = [
        sys.executable,
        str(PROGRESS),
        "working",
        sys.executable,
        "-c",
        f"print({NINJA!r}); import time; time.sleep(1)",
    ]
    with subprocess.Popen(command, cwd=tmp_path, stdout=child):
        os.close(child)
        shown = b""
        while True:
            try:
                data = os.read(parent, 4096)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            shown += data
    os.close(parent)
    rewritten = [line for line in shown.decode().split("\r\033[K") if "compiling [12/129]" in line]
    assert rewritten
    assert not any("\n" in line for line in rewritten)
