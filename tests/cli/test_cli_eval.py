"""`onward eval` without its extra; tests/integrations tests it with the extra."""

import sys

import pytest
from command_line import Cli


def test_a_missing_harness_says_what_to_install(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    result = cli("eval", "arc_easy")
    assert (result.code, result.out) == (2, "")
    assert "onward eval needs the package lm_eval: pip install 'onward[eval]'" in result.err
