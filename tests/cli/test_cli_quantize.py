"""`onward quantize`, `--quantize` and `load(quantize=)` are one thing."""

from pathlib import Path

import pytest
from command_line import Cli

import onward


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_written_folder_is_the_model_quantized_while_loading(cli: Cli, tmp_path: Path, format: str) -> None:
    folder = tmp_path / format
    written = cli("quantize", "demo", str(folder), "--format", format)
    assert (written.code, written.err) == (0, "")
    assert "embed_tokens" in written.out
    options = {"max_new_tokens": 40, "temperature": 0.0}
    texts = {
        onward.load(folder).generate("Once upon a time", **options).text,
        onward.load("demo", quantize=format).generate("Once upon a time", **options).text,
        onward.quantize(onward.load("demo"), format).generate("Once upon a time", **options).text,
        cli("generate", "Once upon a time", "-m", str(folder), "-n", "40", "-t", "0").out,
        cli("generate", "Once upon a time", "--quantize", format, "-n", "40", "-t", "0").out,
    }
    assert len(texts) == 1


def test_a_full_folder_is_not_overwritten(cli: Cli, tmp_path: Path) -> None:
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


def test_a_quantized_folder_is_not_quantized_otherwise(cli: Cli, tmp_path: Path) -> None:
    cli("quantize", "demo", str(tmp_path / "q"))
    result = cli("generate", "x", "-m", str(tmp_path / "q"), "--quantize", "int4")
    assert result.code == 2
    assert "int8 already" in result.err
