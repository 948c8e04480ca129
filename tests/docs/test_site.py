"""The site: its navigation, the help of every command, and links that work in the repository and on the site."""

import importlib.util
import re

import pytest
import yaml
from doc_pages import PAGES, ROOT, name_of
from typer.main import get_command

from onward.cli.main import app

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def module(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


hooks = module("hooks")


def test_every_command_has_its_help_on_the_cli_page():
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    marked = set(re.findall(r"^<!-- help: ?([a-z-]*) -->$", page, re.MULTILINE))
    assert marked == {*get_command(app).commands, ""}


def test_a_help_marker_becomes_the_programs_output():
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
        ("CONTRIBUTING.md", "SECURITY.md", "security-policy.md"),
        ("security-policy.md", "docs/security.md", "security.md"),
        ("CONTRIBUTING.md", "docs/decisions/0006-dependencies.md", "decisions/0006-dependencies.md"),
        ("sampling.md", "https://arxiv.org/abs/2211.17192", "https://arxiv.org/abs/2211.17192"),
    ],
)
def test_repository_links_lead_to_the_same_page_of_the_site(uri, link, there):
    assert hooks.with_site_links(f"[name]({link}#part)", uri) == f"[name]({there}#part)"


SECTIONS = [
    "Get started",
    "Generate",
    "Serve and deploy",
    "Models and formats",
    "Extend",
    "Command line and API",
    "Internals",
]


def navigation():
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]


def test_the_navigation_has_seven_sections_without_raw_results():
    assert [name for section in navigation() for name in section] == SECTIONS
    entries = list(paths_of(navigation()))
    assert not [entry for entry in entries if entry.startswith("benchmarks/results/")]
    assert [entry for entry in entries if entry.startswith("decisions/")] == ["decisions/README.md"]


def test_every_page_outside_the_navigation_has_a_place_in_it():
    entries = set(paths_of(navigation()))
    sources = {hooks.site_path(path.relative_to(ROOT).as_posix()) for path in hooks.other_files()}
    sources |= {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    outside = {uri for uri in sources if uri.endswith(".md")} - entries
    assert "decisions/0001-logits-where-wanted.md" in outside
    assert any(uri.startswith("benchmarks/results/") for uri in outside)
    assert {uri for uri in outside if hooks.place_of(uri) not in entries} == set()


def test_no_two_pages_differ_only_in_case():
    sources = [hooks.site_path(path.relative_to(ROOT).as_posix()) for path in hooks.other_files()]
    sources += [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert len({uri.lower() for uri in sources}) == len(sources)


@pytest.mark.parametrize(
    ("markdown", "description"),
    [
        ("# Title\n\nOne `onward serve`\nand [two](x.md#y).\n\nMore.", "One onward serve and two."),
        ("# Title\n\n<!-- comment -->\n\n| a |\n|---|\n\n- item\n\n**What.** Text.", "What. Text."),
        ("# Title\n\nIn Python:\n\n```python\nx = 1\n```\n\nThen this.", "Then this."),
        ("# Title\n\n" + "A sentence of some words. " * 20, ("A sentence of some words. " * 7).strip()),
        ("# Title\n\n" + "word " * 100, "word " * 39 + "word …"),
        ("# Title\n\n::: onward.load", ""),
    ],
)
def test_a_page_is_described_by_its_first_sentences(markdown, description):
    assert hooks.description_of(markdown) == description


def test_a_page_that_loads_from_another_host_is_detected():
    page = '<a href="https://arxiv.org"><script src="a.js"></script><link rel="canonical" href="https://here">'
    assert hooks.loaded_from_elsewhere(page) == []
    page += '<link rel="stylesheet" href="https://fonts.example/css"><script async src="//cdn.example/b.js"></script>'
    assert hooks.loaded_from_elsewhere(page) == ["https://fonts.example/css", "//cdn.example/b.js"]
    shim = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
    assert hooks.loaded_from_elsewhere(hooks.with_own_worker(shim, "assets/worker.js")) == []


def test_every_page_is_in_the_navigation_once():
    entries = list(paths_of(navigation()))
    pages = [name_of(page).removeprefix("docs/") for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert {page for page in pages if not page.startswith("decisions/")} <= set(entries)
    assert len(entries) == len(set(entries))


def paths_of(entries):
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from paths_of(value) if isinstance(value, list) else [value]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files(page):
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        assert ":" in link or (page.parent / link).exists(), f"{name_of(page)}: {link}"
