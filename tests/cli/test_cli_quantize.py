"""`onward quantize`, `--quantize` and `load(quantize=)` give the same weights."""

from pathlib import Path

import pytest
from command_line import Cli

import onward


@pytest.mark.parametrize("format", ["int8", "int4", "iq4_nl"])
def test_a_quantized_folder_equals_quantizing_while_loading(cli: Cli, tmp_path: Path, format: str) -> None:
    folder = tmp_path / format
    result = cli("quantize", "demo", str(folder), "--format", format)
    assert (result.code, result.err) == (0, "")
    assert "embed_tokens" in result.out
    options = {"max_new_tokens": 40, "temperature": 0.0}
    texts = {
        onward.load(folder).generate("Once upon a time", **options).text,
        onward.load("demo", quantize=format).generate("Once upon a time", **options).text,
        onward.quantize(onward.load("demo"), format).generate("Once upon a time", **options).text,
        cli("generate", "Once upon a time", "-m", str(folder), "-n", "40", "-t", "0").out,
        cli("generate", "Once upon a time", "--quantize", format, "-n", "40", "-t", "0").out,
    }
    assert len(texts) == 1


def test_calibration_reports_the_errors_of_outputs(cli: Cli, tmp_path: Path) -> None:
    result = cli("quantize", "demo", str(tmp_path / "fed"), "--format", "int4", "--calibrate", "--seed", "3")
    assert (result.code, result.err) == (0, "")
    lines = [line.split() for line in result.out.splitlines()[:-1]]
    assert [line[1] for line in lines] == ["bits"] * 43  # 7 matrices in each of 6 layers, and the tied head
    rms, of_outputs = (sum(float(line[column].rstrip("%")) for line in lines) for column in (2, 3))
    assert of_outputs < rms
    cli("quantize", "demo", str(tmp_path / "nearest"), "--format", "int4")
    fed, nearest = (onward.load(tmp_path / name).model.params for name in ("fed", "nearest"))
    assert fed.lm_head.weight.nbytes == nearest.lm_head.weight.nbytes
    assert not fed.lm_head.weight.data.equal(nearest.lm_head.weight.data)


def test_a_bit_budget_is_enforced_and_costs_are_listed(cli: Cli, tmp_path: Path) -> None:
    result = cli("quantize", "demo", str(tmp_path / "mixed"), "--bits", "5.5")
    assert (result.code, result.err) == (0, "")
    *matrices, last = result.out.splitlines()
    assert all("nats" in line for line in matrices)
    assert {line.split()[0].partition(".")[0] for line in matrices} == {"4", "8"}
    bits = float(last.split(" bits per weight")[0].rpartition(" ")[2])
    assert 5.3 < bits <= 5.5
    assert "int8 and iq4_nl" in last
    assert "int8 and iq4_nl" in cli("info", str(tmp_path / "mixed")).out
    assert cli("generate", "Once", "-m", str(tmp_path / "mixed"), "-n", "5", "-t", "0").code == 0
    assert "leave out --format" in cli("quantize", "demo", "x", "--bits", "5", "--format", "int4").err
    assert (
        "this model's matrices take at least 4.5 bits per weight; got a limit of 4"
        in cli("quantize", "demo", str(tmp_path / "x"), "--bits", "4").err
    )


def test_a_seed_without_texts_is_an_error(cli: Cli, tmp_path: Path) -> None:
    result = cli("quantize", "demo", str(tmp_path / "x"), "--seed", "3")
    assert (result.code, result.out) == (2, "")
    assert "--seed needs --calibrate" in result.err
    assert not (tmp_path / "x").exists()


def test_a_budget_of_zero_bits_is_refused(cli: Cli, tmp_path: Path) -> None:
    result = cli("quantize", "demo", str(tmp_path / "x"), "--bits", "0")
    assert (result.code, result.out) == (2, "")
    assert "got a limit of 0" in result.err


def test_a_nonempty_folder_is_not_overwritten(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    result = cli("quantize", "demo", str(tmp_path))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_other_formats_are_refused(cli: Cli, tmp_path: Path) -> None:
    for arguments in (["generate", "x", "--quantize", "int3"], ["quantize", "demo", str(tmp_path), "--format", "int3"]):
        result = cli(*arguments)
        assert (result.code, result.out) == (2, "")
        assert "int8" in result.err
        assert "int3" in result.err


def test_a_quantized_folder_is_not_requantized(cli: Cli, tmp_path: Path) -> None:
    cli("quantize", "demo", str(tmp_path / "q"))
    result = cli("generate", "x", "-m", str(tmp_path / "q"), "--quantize", "int4")
    assert result.code == 2
    assert "already quantized (int8)" in result.err
