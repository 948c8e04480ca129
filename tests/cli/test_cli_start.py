"""Help, version, and a start that imports nothing unnecessary."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from command_line import ENVIRONMENT, PROGRAM, Cli

import onward
from onward.util.options import LENGTH, OUTPUT, REPETITION, SAMPLING, STRUCTURE, TEXTS

COMMANDS = ("generate", "chat", "serve", "deploy", "batch", "score", "eval", "quantize", "convert", "bench", "info")
HELP = [(), *((command,) for command in COMMANDS)]


@pytest.mark.parametrize("command", HELP)
def test_help_fits_80_columns_and_gives_an_example(cli: Cli, command: tuple[str, ...]) -> None:
    result = cli(*command, "--help")
    assert (result.code, result.err) == (0, "")
    assert all(len(line) <= 80 for line in result.out.splitlines())
    # Names that are too wide push every text of the help below its own.
    assert all(line == line.rstrip() for line in result.out.splitlines())
    assert "Example: onward" in result.out
    assert cli(*command, "-h") == result


def test_no_command_points_to_help(cli: Cli) -> None:
    assert cli() == cli("--help")


def test_options_are_grouped_with_the_model_near_the_top(cli: Cli) -> None:
    lines = cli("generate", "--help").out.splitlines()
    sections = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert sections[:3] == ["Arguments:", "Input:", "Model:"]
    assert {f"{group}:" for group in (LENGTH, SAMPLING, REPETITION, STRUCTURE, TEXTS, OUTPUT)} <= set(sections)
    place = {text: at for at, line in enumerate(lines) for text in ("Model:", "--top-p", "Sampling:") if text in line}
    assert place["Model:"] < 30
    assert place["Sampling:"] < place["--top-p"] < place["Sampling:"] + 12


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_is_installed(shell: str) -> None:
    environment = ENVIRONMENT | {"_ONWARD_COMPLETE": f"source_{shell}"}
    done = subprocess.run(PROGRAM, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "_ONWARD_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("onward ge", {"generate"}),
        ("onward generate --top-", {"--top-k", "--top-p"}),
        ("onward bench --compile c", {"cuda"}),
        ("onward generate --quantize i", {"int8", "int4", "iq4_nl"}),
    ],
)
def test_words_are_completed(typed: str, offered: set[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_ONWARD_COMPLETE": "complete_bash"}
    done = subprocess.run(PROGRAM, env=ENVIRONMENT | words, capture_output=True, text=True, timeout=120)
    assert set(done.stdout.split()) == offered, done.stderr


def test_the_package_runs_as_a_module(cli: Cli) -> None:
    command = [sys.executable, "-m", "onward", "--version"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == cli("--version")


def test_version_is_the_packages(cli: Cli) -> None:
    assert cli("--version") == (0, f"onward {onward.__version__}\n", "")


def test_the_script_is_this_program() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["scripts"] == {"onward": "onward.cli.main:main"}


def in_a_new_python(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=120).stdout


HEAVY = {"torch", "prompt_toolkit", "huggingface_hub", "tokenizers", "transformers", "numpy", "jinja2", "llguidance"}


def loaded_by(*arguments: str) -> set[str]:
    """The modules that a process has imported after a command line."""
    program = f"import sys; from onward.cli.main import run; run({list(arguments)}); print(); print(*sys.modules)"
    return set(in_a_new_python(program).splitlines()[-1].split())


def test_the_list_of_commands_imports_no_command() -> None:
    for arguments in (["--help"], ["--version"]):
        loaded = loaded_by(*arguments)
        assert "typer" in loaded
        assert not (HEAVY | {"pydantic", "rich", "asyncio"}) & loaded
    own = {name for name in loaded_by("--help") if name.startswith("onward.")}
    assert own == {"onward.cli", "onward.cli.main", "onward.cli.terminal", "onward.errors"}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_imports_only_that_command(command: str) -> None:
    loaded = loaded_by(command, "--help")
    assert not HEAVY & loaded
    module = {"deploy": "serve", "score": "evaluate", "eval": "evaluate", "quantize": "convert"}.get(command, command)
    modules = {"batch", "bench", "chat", "convert", "embed", "evaluate", "generate", "prefix_cache", "serve", "verify"}
    others = {f"onward.cli.{name}" for name in modules - {module}}
    assert f"onward.cli.{module}" in loaded
    assert not others & loaded


def test_generating_imports_neither_compilers_nor_servers() -> None:
    loaded = loaded_by("generate", "--model", "demo", "-n", "1", "Once")
    assert {"torch", "onward.loading"} <= loaded
    assert not {"torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "sympy", "networkx"} & loaded
    assert not {"transformers", "huggingface_hub", "datasets", "pandas", "pyarrow", "ray", "lm_eval", "trl"} & loaded
    assert not {"fastapi", "starlette", "uvicorn", "httpx", "prompt_toolkit", "rich", "yaml"} & loaded
    others = ("server", "protocols", "engine", "cluster", "batches", "integrations")
    assert not {f"onward.{name}" for name in others} & loaded


def test_importing_onward_is_quick_and_exports_its_names() -> None:
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


def test_an_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = onward.lode


def test_imported_objects_are_in_the_oldest_generation() -> None:
    in_a_new_python(
        "import gc, onward\n"
        "load = onward.load\n"
        "assert gc.isenabled()\n"
        "old = {id(each) for each in gc.get_objects(generation=2)}\n"
        "assert id(onward.loading.__dict__) in old and id(load) in old\n"
        "assert gc.get_freeze_count() == 0\n"
        "assert gc.get_stats()[2]['collections'] == 0\n"
    )


def test_objects_frozen_by_the_program_stay_frozen() -> None:
    in_a_new_python(
        "import gc, onward\n"
        "gc.freeze()\n"
        "count = gc.get_freeze_count()\n"
        "assert onward.errors.OnwardError and onward.OnwardError\n"
        "assert gc.get_freeze_count() >= count and gc.isenabled()\n"
    )
