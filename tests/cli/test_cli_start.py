"""Help, version, and a start that waits for nothing it does not need."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from command_line import ENVIRONMENT, Cli

import onward

HELP = [(), ("generate",), ("chat",), ("info",)]


@pytest.mark.parametrize("command", HELP)
def test_help_fits_80_columns_and_gives_an_example(cli: Cli, command: tuple[str, ...]) -> None:
    result = cli(*command, "--help")
    assert (result.code, result.err) == (0, "")
    assert all(len(line) <= 80 for line in result.out.splitlines())
    assert "Example: onward" in result.out
    assert cli(*command, "-h") == result


def test_no_command_is_a_question_for_help(cli: Cli) -> None:
    assert cli() == cli("--help")


def test_version_is_the_packages(cli: Cli) -> None:
    assert cli("--version") == (0, f"onward {onward.__version__}\n", "")


def test_the_script_is_this_program() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["scripts"] == {"onward": "onward.cli.main:main"}


def in_a_new_python(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=120).stdout


def test_help_imports_nothing_heavy() -> None:
    loaded = in_a_new_python(
        "import sys; from onward.cli.main import run; run(['--help']); run(['chat', '--help']); print(*sys.modules)"
    ).split()
    assert "typer" in loaded
    assert not {"torch", "prompt_toolkit", "huggingface_hub", "tokenizers", "transformers", "numpy"} & set(loaded)


def test_importing_onward_is_quick_and_its_names_are_there() -> None:
    in_a_new_python(
        "import sys, onward\n"
        "assert 'torch' not in sys.modules\n"
        "import onward.loading\n"
        "assert callable(onward.load)\n"
        "assert onward.ops.rms_norm and onward.errors.OnwardError and onward.testing.tiny_model\n"
        "assert set(onward.__all__) <= set(dir(onward))\n"
        "from onward import *\n"
        "assert load is onward.load and Model is onward.Model and stream is onward.stream\n"
    )


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = onward.lode
