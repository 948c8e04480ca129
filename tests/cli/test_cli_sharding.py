"""`--pipeline` doesn't change the text."""

import pytest
from command_line import Cli


def test_ranks_print_the_same_as_one_process(cli: Cli) -> None:
    asked = ["generate", "Once upon a time", "-n", "24", "-t", "0"]
    split = cli(*asked, "--pipeline", "2")
    assert (split.code, split.err) == (0, "")
    assert split.out == cli(*asked).out


@pytest.mark.parametrize("flag", ["--tensor", "--tensor-parallel-size", "--pipeline-parallel-size"])
def test_other_kinds_of_parallelism_point_to_the_pipeline(cli: Cli, flag: str) -> None:
    refused = cli("generate", "Once", flag, "2")
    assert (refused.code, refused.out) == (2, "")
    assert f"no option {flag}; did you mean --pipeline" in refused.err


def test_too_many_ranks_are_one_line(cli: Cli) -> None:
    refused = cli("generate", "Once", "--pipeline", "99")
    assert refused.code == 2
    assert "as many layers" in refused.err
    assert "Traceback" not in refused.err
