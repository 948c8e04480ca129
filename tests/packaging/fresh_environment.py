"""An environment without the clone, with the packages that Onward needs."""

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def plain_environment() -> dict[str, str]:
    """The variables of this process without those that lead to other sources or kernels."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("ONWARD_", "PYTHON"))}


def install(wheel: Path, folder: Path, **variables: str) -> Path:
    """A new environment with `wheel` in it. Returns its Python.

    torch would take minutes to install once more, so a .pth file lends what this environment has. The .pth files
    that lie there are not read from there, so the clone of an editable install stays out of sight.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, wheel, **variables)
    [site_packages] = folder.glob("lib/python*/site-packages")
    lent = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    (site_packages / "lent.pth").write_text("\n".join(lent))
    return python


def run_main_job(python: Path, folder: Path, *arguments: str, **variables: str) -> str:
    """Runs main_job.py with `python` in `folder`, from a copy: a script's own folder is on its path."""
    script = folder / "main_job.py"
    script.write_bytes((ROOT / "tests" / "packaging" / "main_job.py").read_bytes())
    return run(python, script, *arguments, folder=folder, **variables)


def run(*command: str | Path, folder: Path | None = None, **variables: str) -> str:
    """The standard output of a command that must succeed, without the variables that lead to other sources."""
    result = subprocess.run(
        [str(word) for word in command], cwd=folder, env=plain_environment() | variables, capture_output=True, text=True
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout
