"""docs/evaluating.md runs, except for tasks whose data is on the hub; all ways to evaluate give the same numbers."""

import json
import shutil

import pytest
from doc_pages import ROOT, blocks_of
from test_pages import DEMO, run_page

pytest.importorskip("lm_eval", reason="lm_eval is not installed: make eval-test")

from demo_adapters import demo_adapter


@pytest.mark.filterwarnings("ignore")
def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(DEMO, "my-model")
    demo_adapter(tmp_path / "my-adapter", seed=1)
    blocks = [block for block in blocks_of(ROOT / "docs" / "evaluating.md") if "arc_easy" not in block.text]
    names = run_page("docs/evaluating.md", blocks, monkeypatch)

    (from_server,) = (tmp_path / "from-server").rglob("results*.json")
    accuracies = [
        json.loads(file.read_text())["results"]["animals"]["acc,none"]
        for file in (tmp_path / "base.json", from_server, tmp_path / "poet.json")
    ]
    assert accuracies[0] == accuracies[1]
    assert accuracies[2] == names["results"]["results"]["animals"]["acc,none"]
