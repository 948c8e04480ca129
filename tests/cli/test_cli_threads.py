"""`--threads`: on every command that loads a model, with precedence over the environment."""

import os
import subprocess

import pytest
import torch
from command_line import ENVIRONMENT, PROGRAM, Cli

import onward


@pytest.fixture(autouse=True)
def threads_as_before():
    ours, torchs = onward.num_threads(), torch.get_num_threads()
    yield
    onward.set_num_threads(ours)
    torch.set_num_threads(torchs)


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "Once", "-n", "2"),
        ("chat",),
        ("score", "Once upon a time"),
        ("bench", "--prompt-tokens", "2", "--new-tokens", "2", "--rounds", "1"),
    ],
)
def test_every_command_that_loads_a_model_takes_threads(cli: Cli, arguments: tuple[str, ...]) -> None:
    result = cli(*arguments, "--threads", "3", input="Hello\n" if arguments == ("chat",) else "")
    assert result.code == 0, result.err
    assert (onward.num_threads(), torch.get_num_threads()) == (3, 3)


def test_info_reports_the_number_of_threads_and_why() -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "ONWARD_NUM_THREADS"}
    shown = subprocess.run([*PROGRAM, "info"], env=environment, capture_output=True, text=True, check=True).stdout
    if onward.native.built_isas():
        assert "1 (OMP_NUM_THREADS)" in shown


@pytest.mark.parametrize(
    ("arguments", "variable", "expected"),
    [
        (["generate", "x"], "²", "ONWARD_NUM_THREADS must be an integer in 1 … 256, got '²'"),
        (["info"], "many", "ONWARD_NUM_THREADS must be an integer in 1 … 256, got 'many'"),
        (["generate", "x", "--threads", "0"], "1", "--threads must be a whole number from 1 to 256; got 0"),
    ],
)
def test_an_invalid_number_of_threads_is_one_line(arguments: list[str], variable: str, expected: str) -> None:
    environment = os.environ | {"ONWARD_NUM_THREADS": variable}
    result = subprocess.run([*PROGRAM, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"error: {expected}\n"
