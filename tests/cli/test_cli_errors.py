"""Bad input: one line on stderr, exit code 2, no traceback, no partial output."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from command_line import ENVIRONMENT, PROGRAM, Cli, Result

import onward
from onward.checkpoint import find_folder


def assert_one_line(result: Result, *expected: str) -> None:
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert result.err.endswith("\n")
    assert result.err.count("\n") == 1
    for text in expected:
        assert text in result.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["x", "--model", "/no/such/folder"], "/no/such/folder"),
        (["x", "--temperature", "-1"], "temperature"),
        (["x", "--temperature", "warm"], "--temperature"),
        (["x", "--top-p", "-1"], "[0, 1]"),
        (["x", "--min-p", "2"], "--min-p"),
        (["x", "--top-k", "-1"], "--top-k"),
        (["x", "--seed", "-1"], "seed"),
        (["x", "--max-new-tokens", "-1"], "--max-new-tokens"),
        (["x", "--stop", ""], "stop"),
        (["x", "--no-such-option"], "--no-such-option"),
        (["x", "--dtype", "int3"], "int3"),
        (["x", "--device", "abacus"], "abacus"),
        (["x", "--max-seq-len", "0"], "--max-seq-len"),
        (["x", "y"], "onward generate --help"),
        (["x", "--file", "y"], "use one of them"),
        (["x", "--system", "Be brief."], "--chat"),
        (["1", "--chat", "--ids"], "--ids"),
        (["1 two", "--ids"], "'two'"),
        (["99999999", "--ids"], "99999999"),
        (["--file", "/no/such/file"], "No such file"),
        (["--file", "/"], "directory"),
        (["--file", "~nobody-here/x"], "~nobody-here"),
        (["word " * 3000], "1,024"),
        (["x", "-n", "5000"], "5000"),
        (["x", "--eos", "99999999"], "99999999"),
    ],
)
def test_bad_requests(cli: Cli, arguments: list[str], expected: str) -> None:
    assert_one_line(cli("generate", *arguments), expected)


@pytest.mark.parametrize(
    ("command", "flag", "meant"),
    [
        ("generate", "--temp", "--temperature"),
        ("generate", "--temprature", "--temperature"),
        ("generate", "--max_tokens", "--max-new-tokens"),
        ("generate", "--max-tokens", "--max-new-tokens"),
        ("generate", "--repeat-penalty", "--repetition-penalty"),
        ("generate", "--num-beams", "--beams"),
        ("generate", "--n", "--samples"),
        ("generate", "--adapters", "--adapter"),
        ("generate", "--top", "--top-k or --top-p"),
        ("score", "--lora", "--adapter"),
        ("serve", "--ctx-size", "--max-seq-len"),
    ],
)
def test_an_unknown_flag_suggests_the_intended_one(cli: Cli, command: str, flag: str, meant: str) -> None:
    assert_one_line(cli(command, "x", flag, "1"), f"no option {flag}; did you mean {meant}?")


def test_an_unknown_flag_suggests_nothing_dissimilar(cli: Cli) -> None:
    result = cli("generate", "x", "--zzz")
    assert_one_line(result, "no option --zzz (see onward generate --help)")


def test_a_file_of_prompts_is_referred_to_batch(cli: Cli) -> None:
    assert_one_line(cli("generate", "--jsonl", "-"), "no option --jsonl; for a file of prompts, use onward batch")


def test_bad_commands(cli: Cli) -> None:
    assert_one_line(cli("generat"), "did you mean onward generate?")
    assert_one_line(cli("chat", "--temperature", "-1"), "temperature")
    assert_one_line(cli("info", "/no/such/folder"), "/no/such/folder")
    assert_one_line(cli("info", "demo", "--context", "0"), "--context")
    assert_one_line(cli("info", "--batch", "2"), "SOURCE")
    assert_one_line(cli("generate", "x", "--samples", "0"), "--samples")
    assert_one_line(cli("serve", "--api-key-file", "/no/file"), "cannot be read: No such file or directory\n")


def test_a_model_may_be_given_without_a_flag_but_not_twice(cli: Cli) -> None:
    for command in ("bench", "chat", "info"):
        assert_one_line(cli(command, "/no/such/folder"), "/no/such/folder")
        assert_one_line(cli(command, "demo", "--model", "/no/such/folder"), "two models", "give one")
    assert cli("info", "-m", "demo", "--json").code == 0


def test_a_tilde_is_the_home_directory_in_every_file_name(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    onward.testing.random_checkpoint(tmp_path / "x")
    (tmp_path / "prompt.txt").write_text("1 2 3")
    ask = ("generate", "--ids", "--file", "~/prompt.txt", "-n", "2")
    assert cli(*ask, "--model", "~/x").code == 0
    assert cli(*ask, "--model", "~/x", "--draft", "~/x").code == 0
    assert cli("info", "~/x").code == 0
    assert_one_line(cli(*ask, "--model", "~/x", "--name-map", "~/map.json"), str(tmp_path / "map.json"), "name map")
    assert cli("quantize", "~/x", "~/y").code == 0
    assert (tmp_path / "y" / "config.json").exists()


def test_input_that_is_not_utf8(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("dommage, raté".encode("latin-1"))
    assert_one_line(cli("generate", "--file", str(tmp_path / "latin")), "UTF-8", "byte 12")
    assert_one_line(cli("generate", input=b"\xff"), "UTF-8")
    assert_one_line(cli("generate", "\udcff"), "Unicode")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("secret")
    (tmp_path / "mine").chmod(0)
    assert_one_line(cli("generate", "--file", str(tmp_path / "mine")), "Permission denied")


def test_no_prompt_at_all(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.cli.inputs.is_terminal", lambda stream: True)
    assert_one_line(cli("generate"), "no text", "--file")


def test_an_empty_input_is_no_prompt(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for command in ("generate", "score"):
        assert_one_line(cli(command), "standard input is empty", f"onward {command} ", "--file")
        assert_one_line(cli(command, "-", input="\n"), "standard input is empty")
        assert_one_line(cli(command, "--file", str(tmp_path / "empty")), "empty is empty")
    assert cli("generate", "", "-n", "1").code == 0, "an empty prompt on purpose"
    assert_one_line(cli("chat"), "standard input is empty", "one message per line")


def test_numbers_are_checked_before_a_model_is_loaded(cli: Cli) -> None:
    assert_one_line(cli("generate", "x", "-n", "ten"), "--max-new-tokens must be a whole number; got 'ten'")
    assert_one_line(cli("generate", "x", "--top-k", "1.5"), "--top-k must be a whole number; got '1.5'")
    assert_one_line(cli("generate", "x", "--eos", "2", "--eos", "x"), "--eos must be a whole number; got 'x'")
    assert_one_line(cli("serve", "--port", "70000"), "--port must be a whole number from 0 to 65535; got 70000")
    assert_one_line(cli("serve", "--drain", "nan"), "--drain must be a number of 0 or more; got nan")
    assert_one_line(cli("bench", "--rounds", "0"), "--rounds must be a whole number of 1 or more; got 0")


def test_an_error_about_an_option_names_the_flag(cli: Cli) -> None:
    assert_one_line(cli("generate", "x", "--dtype", "int3"), "--dtype must be bfloat16, float16 or float32")
    assert_one_line(cli("generate", "x", "--quantize", "int3"), "--quantize must be 'int8', 'int4' or 'iq4_nl'")
    assert_one_line(cli("generate", "x", "--device", "abacus"), "--device 'abacus' cannot be used here")
    assert_one_line(cli("convert", "demo", "x", "--to", "onnx"), "--to must be safetensors or gguf; got 'onnx'")
    assert_one_line(cli("serve", "--cache-memory", "1e-6"), "--cache-memory must be at least one block")
    assert_one_line(cli("serve", "--limit", "texs=3"), "unknown limit 'texs': did you mean texts?")


def test_an_empty_prompt_without_a_bos(cli: Cli, tmp_path: Path) -> None:
    folder = _copy_of_the_demo(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": None}))
    assert_one_line(cli("generate", "", "--model", str(folder)), "empty", "BOS")


def test_unsupported_architecture(cli: Cli, tmp_path: Path) -> None:
    folder = _copy_of_the_demo(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["AbacusForCausalLM"]}))
    for command in (["generate", "x", "-m"], ["chat", "-m"], ["info"]):
        assert_one_line(cli(*command, str(folder)), "AbacusForCausalLM", "Qwen3")


def test_a_chat_without_a_template(cli: Cli, tmp_path: Path) -> None:
    folder = str(onward.testing.random_checkpoint(tmp_path))
    assert_one_line(cli("chat", "-m", folder), "chat template", "onward generate")
    assert_one_line(cli("generate", "--chat", "x", "-m", folder), "chat template")


def test_a_hub_id_while_offline(tmp_path: Path) -> None:
    environment = ENVIRONMENT | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [*PROGRAM, "generate", "x", "-m", "nobody/nothing"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert_one_line(Result(done.returncode, done.stdout, done.stderr), "nobody/nothing", "HF_HUB_OFFLINE")


def test_a_warning_is_one_line_too(cli: Cli) -> None:
    result = cli("generate", "x", "-n", "1", "--max-seq-len", "2000")
    assert result.code == 0
    assert result.err.startswith("warning: max_seq_len 2000")
    assert result.err.count("\n") == 1


def test_internal_errors_keep_their_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **named: object) -> str:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("onward.cli.generate.read_prompt", broken)
    with pytest.raises(ZeroDivisionError, match="a defect"):
        cli("generate", "x")


def _copy_of_the_demo(tmp_path: Path) -> Path:
    bundled = find_folder("demo")
    return Path(shutil.copytree(bundled, tmp_path / "model"))
