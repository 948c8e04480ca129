"""docs/training.md does what it says: its Python and its commands run, in order, in an empty folder."""

import json
import re
import shlex
from pathlib import Path

from dcp_folders import META_NAMES

from onward.cli.main import run

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks("python"):
        exec(compile(block, "docs/training.md", "exec"), names)
    assert capsys.readouterr().out.count("\n") == 4
    assert names["rest"].token_ids.shape[0] == 2
    for line in "".join(blocks("console")).splitlines():
        command = shlex.split(line.removeprefix("$ "))
        if command[0] == "echo":
            assert command[2] == ">"
            Path(command[3]).write_text(command[1])
            continue
        assert command[0] == "onward"
        assert run(command[1:]) == 0, line
        if command[1] == "generate":
            expected = names["trained"].generate([1, 2, 3], max_new_tokens=8).token_ids
            assert capsys.readouterr().out.split() == [str(token) for token in expected]
    assert Path("step-1000-int8", "model.safetensors").is_file()


def test_the_map_of_the_page_is_the_one_that_is_tested():
    (block,) = blocks("json")
    assert json.loads(block) == META_NAMES
