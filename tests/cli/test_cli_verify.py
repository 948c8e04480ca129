"""`onward verify`, and the receipts of `onward generate`."""

import json
from pathlib import Path

import pytest
from command_line import Cli

RECEIPT = ["generate", "Once upon a time", "-n", "12", "-t", "0.8", "--seed", "7", "--receipt"]


@pytest.fixture
def receipt(cli: Cli, tmp_path: Path) -> Path:
    file = tmp_path / "receipt.json"
    assert cli(*RECEIPT, str(file)).code == 0
    return file


def changed(file: Path, **fields: object) -> Path:
    document = json.loads(file.read_text()) | fields
    other = file.with_name("changed.json")
    other.write_text(json.dumps({name: value for name, value in document.items() if value is not ...}))
    return other


def test_a_receipt_is_verified(cli: Cli, receipt: Path) -> None:
    result = cli("verify", str(receipt))
    assert (result.code, result.out, result.err) == (0, "this model and build generate this text, 12 tokens\n", "")


def test_a_different_text_exits_with_1_and_shows_the_position(cli: Cli, receipt: Path) -> None:
    ids = json.loads(receipt.read_text())["token_ids"]
    result = cli("verify", str(changed(receipt, token_ids=[*ids[:5], 9, *ids[6:]])))
    assert result.code == 1
    assert "do not generate this text: token 5 is id 9, but the sampler draws" in result.out
    as_json = cli("verify", str(changed(receipt, seed=8)), "--json")
    assert as_json.code == 1
    found = json.loads(as_json.out)
    assert (found["verified"], found["same_text"], found["difference"]) == (False, False, "token")


def test_the_same_text_of_another_build_exits_with_3(cli: Cli, receipt: Path) -> None:
    parts = json.loads(receipt.read_text())["fingerprint"].split("-")
    result = cli("verify", str(changed(receipt, fingerprint="-".join([*parts[:2], "00000000", *parts[3:]]))))
    assert result.code == 3
    assert "the receipt is of another build or model (different: the build (Onward or its kernels))" in result.out


def test_a_receipt_without_its_prompt_takes_one(cli: Cli, receipt: Path) -> None:
    without = str(changed(receipt, prompt_ids=...))
    assert cli("verify", without, "--prompt", "Once upon a time").code == 0
    assert cli("verify", without, "--prompt", "Once").code == 1
    result = cli("verify", without)
    assert (result.code, result.out) == (2, "")
    assert "the receipt has no prompt: give it" in result.err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["verify", "missing.json"], "missing.json"),
        (["generate", "Once", "--samples", "2", "-t", "1", "--receipt", "r.json"], "--receipt is of one text"),
        (["generate", "Once", "--receipt", "no/such/r.json"], "is not a folder that you can write to"),
    ],
)
def test_errors(cli: Cli, arguments: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli(*arguments)
    assert (result.code, result.out) == (2, "")
    assert error in result.err


def test_files_other_than_receipts_are_an_error(cli: Cli, receipt: Path) -> None:
    result = cli("verify", str(changed(receipt, onward_receipt=...)))
    assert (result.code, result.out) == (2, "")
    assert 'a receipt is a JSON object with "onward_receipt"' in result.err
