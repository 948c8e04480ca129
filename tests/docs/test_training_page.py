"""docs/training.md: its commands give the results of its Python code."""

from doc_console import run_command, sessions
from doc_pages import ROOT, blocks_of
from test_pages import run_python

PAGE = ROOT / "docs" / "training.md"


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    printed = "".join(
        run_python(block, "docs/training.md", names) for block in blocks_of(PAGE) if block.language == "python"
    )
    assert printed.count("\n") == 4
    assert names["rest"].token_ids.shape[0] == 2
    expected = names["trained"].generate([1, 2, 3], max_new_tokens=8).token_ids
    for block in blocks_of(PAGE):
        for command, output in sessions(block.text) if block.language == "console" else ():
            printed = run_command(command, output, monkeypatch)
            if command.startswith("onward generate"):
                assert printed.split() == [str(token) for token in expected]
    assert (tmp_path / "step-1000-int8" / "model.safetensors").is_file()
