"""`--draft` on the command line: the same text, and the counts of drafts."""

import json

import pytest
from command_line import Cli


@pytest.mark.parametrize("draft", ["demo-draft", "demo-head", "lookup", "suffix"])
def test_a_drafted_text_equals_the_plain_text(cli: Cli, draft: str) -> None:
    command = ("generate", "Once upon a time", "--seed", "3", "-n", "30", "--json")
    (plain,) = json.loads(cli(*command).out)["choices"]
    (drafted,) = json.loads(cli(*command, "--draft", draft).out)["choices"]
    assert [token["id"] for token in drafted["tokens"]] == [token["id"] for token in plain["tokens"]]
    assert plain["speculation"] is None
    assert set(drafted["speculation"]) == {"drafted", "accepted", "rounds"}


def test_an_invalid_draft_is_one_line(cli: Cli) -> None:
    code, out, err = cli("generate", "a", "--draft", "no-such-model")
    assert (code, out) == (2, "")
    assert "no folder 'no-such-model'" in err
    found = cli("generate", "a", "--draft", "lookup", "--beams", "2")
    assert found == (2, "", "error: --beams does not work with --draft: use one of them\n")
