"""`--pipeline` and `--tensor` change no word."""

import pytest
from command_line import Cli


@pytest.mark.parametrize("flag", ["--pipeline", "--tensor"])
def test_ranks_write_what_one_process_writes(cli: Cli, flag: str) -> None:
    asked = ["generate", "Once upon a time", "-n", "24", "-t", "0"]
    split = cli(*asked, flag, "2")
    assert (split.code, split.err) == (0, "")
    assert split.out == cli(*asked).out


def test_too_many_ranks_are_one_line(cli: Cli) -> None:
    refused = cli("generate", "Once", "--pipeline", "99")
    assert refused.code == 2
    assert "as many layers" in refused.err
    assert "Traceback" not in refused.err
