"""Unknown options and commands: one line that names the one that was probably meant."""

import dataclasses
import inspect
import re

import pytest
from command_line import Cli
from typer.main import get_command

import onward
from onward.cli.command import PYTHON_ONLY
from onward.cli.main import app

COMMANDS = get_command(app).commands
FLAGS = {
    name: sorted(flag for param in command.params for flag in param.opts if flag.startswith("--") and flag != "--help")
    for name, command in COMMANDS.items()
}
PAIRS = [(command, flag) for command, flags in FLAGS.items() for flag in flags]
LONG = [(command, flag) for command, flag in PAIRS if len(flag) >= 8]


def refused(cli: Cli, *arguments: str) -> str:
    result = cli(*arguments)
    assert (result.code, result.out) == (2, ""), arguments
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    return result.err.removeprefix("error: ").strip()


@pytest.mark.parametrize(("command", "flag"), LONG, ids="{0[0]}{0[1]}".format)
def test_a_misspelled_flag_is_suggested(cli: Cli, command: str, flag: str) -> None:
    middle = len(flag) // 2
    for typo in (flag[:middle] + flag[middle + 1 :], flag[:middle] + flag[middle] + flag[middle:]):
        if typo not in FLAGS[command]:
            assert refused(cli, command, typo) == f"no option {typo}; did you mean {flag}?"


@pytest.mark.parametrize("command", FLAGS)
def test_a_flag_with_underscores_is_suggested(cli: Cli, command: str) -> None:
    for flag in FLAGS[command]:
        spelled = f"--{flag[2:].replace('-', '_')}"
        if spelled != flag:
            assert refused(cli, command, spelled) == f"no option {spelled}; did you mean {flag}?"


def python_options() -> set[str]:
    functions = (onward.load, onward.Engine, onward.LanguageModel)
    names = {field.name for field in dataclasses.fields(onward.GenerateOptions)}
    keywords = (each for function in functions for each in inspect.signature(function).parameters.values())
    return names | {each.name for each in keywords if each.default is not each.empty}


# Objects that a command makes itself.
MADE_BY_COMMANDS = {"tokenizer", "chat_template", "defaults", "embedding"}


@pytest.mark.parametrize("command", FLAGS)
def test_every_python_option_is_a_flag_or_explained(cli: Cli, command: str) -> None:
    for name in sorted(python_options() - MADE_BY_COMMANDS):
        flag = f"--{name.replace('_', '-')}"
        if flag in FLAGS[command]:
            continue
        answer = refused(cli, command, flag)
        assert re.search(r"; did you mean --|; .* (has|have) --|; only Python has it: ", answer), answer


def test_python_only_options_are_no_flags() -> None:
    names = {name for command in COMMANDS.values() for param in command.params for name in (param.name, *param.opts)}
    assert not names & {*PYTHON_ONLY, *(f"--{name.replace('_', '-')}" for name in PYTHON_ONLY)}
    functions = {"generate": onward.LanguageModel.request, "load": onward.load}
    functions |= {"Engine": onward.Engine, "LanguageModel": onward.LanguageModel}
    for name, function in PYTHON_ONLY.items():
        known = {field.name for field in dataclasses.fields(onward.GenerateOptions)}
        assert name in (known if function == "generate" else inspect.signature(functions[function]).parameters)


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["generate", "x", "--load-in-8bit"], "did you mean --quantize int8?"),
        (["generate", "x", "--num-return-sequences", "2"], "did you mean --samples?"),
        (["generate", "x", "--n-predict", "9"], "did you mean --max-new-tokens?"),
        (["generate", "x", "--max_length", "9"], "did you mean --max-new-tokens (it does not count the prompt)?"),
        (["generate", "x", "--tensor-parallel-size", "2"], "did you mean --pipeline (it spreads the layers"),
        (["generate", "x", "-ngl", "99"], "no option -ngl; all layers run on one device, which --device selects"),
        (["generate", "x", "--n-gpu-layers", "99"], "all layers run on one device"),
        (["generate", "-p", "x"], "no option -p; the prompt is an argument: onward generate"),
        (["serve", "--max-model-len", "9"], "did you mean --max-seq-len?"),
        (["serve", "--max-num-seqs", "9"], "did you mean --max-sequences?"),
        (["serve", "--gpu-memory-utilization", "0.9"], "did you mean --cache-memory (in GiB)?"),
        (["serve", "--served-model-name", "x"], "did you mean --model NAME=SOURCE?"),
        (["deploy", "--served-model-name", "x"], "did you mean --name?"),
        (["eval", "x", "--num_fewshot", "3"], "did you mean --shots?"),
        (["eval", "x", "--output_path", "f"], "did you mean --output?"),
        (["serve", "--temperature", "1"], "for onward serve; generate and chat have --temperature"),
        (["score", "x", "--replicas", "2"], "for onward score; deploy and batch have --replicas"),
        (["--verison"], "did you mean --version?"),
    ],
    ids=" ".join,
)
def test_options_of_other_programs_and_commands(cli: Cli, arguments: list[str], answer: str) -> None:
    assert answer in refused(cli, *arguments)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("serv", "no command serv; did you mean onward serve?"),
        ("evaluate", "no command evaluate; did you mean onward eval?"),
        ("run", "no command run; did you mean onward generate or onward chat?"),
        ("pull", "no command pull; models are downloaded from the hub on first use"),
        ("Once upon a time", "no command; did you mean onward generate PROMPT?"),
        ("frobnicate", "no command frobnicate (see onward --help)"),
    ],
)
def test_unknown_commands(cli: Cli, name: str, answer: str) -> None:
    assert refused(cli, name) == answer


def test_a_value_may_look_like_another_programs_option(cli: Cli) -> None:
    assert "'-ngl'" in refused(cli, "generate", "--max-new-tokens", "-ngl")


def test_text_with_spaces_needs_quotes(cli: Cli) -> None:
    assert "too many arguments, from 'upon' on; put a text with spaces in quotes" in refused(
        cli, "generate", "Once", "upon"
    )
    assert refused(cli, "generate", "--max-new-tokens") == "option --max-new-tokens needs a value"
