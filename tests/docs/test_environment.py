"""docs/environment.md lists the variables that the package reads, and no others."""

import re

from doc_pages import ROOT

NAME = re.compile(r"[\"'](ONWARD_[A-Z_]+)[\"']")


def test_the_table_has_every_variable_read_by_the_package():
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(ONWARD_\w+)` \|", page, re.MULTILINE)
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src" / "onward").rglob("*.py")]
    assert sorted(listed) == sorted({name for source in sources for name in NAME.findall(source)})
