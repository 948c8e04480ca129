"""What the site adds to the pages: the help of every command, and links that hold in both places."""

import importlib.util
import re

import pytest
import yaml
from doc_pages import PAGES, ROOT, name_of

from onward.cli.main import app

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def module(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


hooks = module("hooks")


def test_every_command_has_its_help_on_the_page_of_the_command_line():
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    marked = set(re.findall(r"^<!-- help: ?([a-z-]*) -->$", page, re.MULTILINE))
    commands = {(command.name or command.callback.__name__).replace("_", "-") for command in app.registered_commands}
    assert marked == commands | {""}


def test_a_mark_becomes_what_the_program_prints():
    text = hooks.with_help("before\n\n<!-- help: score -->\n\nafter")
    assert text.startswith("before\n\n```text\nUsage: onward score")
    assert "--help" in text
    assert text.endswith("```\n\nafter")


@pytest.mark.parametrize(
    ("uri", "link", "there"),
    [
        ("index.md", "docs/sampling.md", "sampling.md"),
        ("index.md", "docs/decisions/", "decisions/README.md"),
        ("index.md", "benchmarks/LOG.md", "benchmarks/LOG.md"),
        ("sessions.md", "../benchmarks/README.md", "benchmarks/README.md"),
        ("sessions.md", "../README.md", "index.md"),
        ("training.md", "../examples/train_and_sample.py", "examples/train_and_sample.py.md"),
        ("decisions/0009-powers-of-two.md", "../quantization.md", "../quantization.md"),
        ("CONTRIBUTING.md", "docs/decisions/0006-dependencies.md", "decisions/0006-dependencies.md"),
        ("sampling.md", "https://arxiv.org/abs/2211.17192", "https://arxiv.org/abs/2211.17192"),
    ],
)
def test_a_link_of_the_repository_leads_to_the_same_page_of_the_site(uri, link, there):
    assert hooks.with_site_links(f"[name]({link}#part)", uri) == f"[name]({there}#part)"


def test_every_page_is_in_the_navigation_once():
    entries = list(paths_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    pages = [name_of(page).removeprefix("docs/") for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert {page for page in pages if not page.startswith("decisions/")} <= set(entries)
    assert len(entries) == len(set(entries))


def paths_of(navigation):
    for entry in navigation:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from paths_of(value) if isinstance(value, list) else [value]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files(page):
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        assert ":" in link or (page.parent / link).exists(), f"{name_of(page)}: {link}"
