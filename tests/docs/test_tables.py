"""Names in tables and the reference exist: options, flags, every public name."""

import dataclasses
import importlib
import inspect
import re
import tomllib

import pytest
from doc_pages import ROOT, blocks_of
from typer.main import get_command

import onward
from onward.checkpoint.gguf import families as gguf_families
from onward.checkpoint.gguf.export import WRITTEN
from onward.cli.main import app
from onward.models import FAMILIES
from onward.models.families import KNOWN_MODELS
from onward.protocols import PROTOCOLS
from onward.util.option_names import _ELSEWHERE

MAPS = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
# A name before "=", outside a string, is an option; a bare name in a cell is one, too.
KEYWORD = re.compile(r"(?<![\"\w.])([a-z]\w*)=(?!=)")
CODE = re.compile(r"`([^`]+)`")


def option_names():
    """Every keyword that the verbs, `load`, a `LanguageModel` and an `Engine` take."""
    names = {
        field.name for kind in (onward.SamplingParams, onward.GenerateOptions) for field in dataclasses.fields(kind)
    }
    for function in (
        onward.load,
        onward.LanguageModel,
        onward.Engine,
        onward.LanguageModel.generate,
        onward.decode,
        onward.stream,
    ):
        names |= set(inspect.signature(function).parameters)
    names |= set(onward.ChatOptionsDict.__annotations__)
    return names


def field_names():
    """The fields of request bodies."""
    return {name for protocol in PROTOCOLS.values() for name in protocol.body.model_fields}


def flags():
    commands = get_command(app).commands.values()
    return {flag for command in commands for parameter in command.params for flag in parameter.opts}


def cells(page):
    """(theirs, Onward's) of each row of a page's tables."""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("|--"):
            row = [cell.strip() for cell in line.strip("|").split(" | ")]
            yield row[0], row[1]


@pytest.mark.parametrize("page", MAPS, ids=lambda page: page.stem)
def test_migration_tables_use_existing_options_and_flags(page):
    known, count = option_names(), 0
    if page.stem == "tgi":  # a server's users, who send fields
        known |= field_names()
    for _, ours in cells(page):
        for code in CODE.findall(ours):
            if code.startswith("-"):
                assert code.split()[0] in flags(), code
            elif code.startswith("onward "):
                words = code.split()
                assert words[1] in get_command(app).commands, code
                assert {word for word in words if word.startswith("-")} <= flags(), code
            else:
                bare = {code} if re.fullmatch(r"[a-z]+(_[a-z]+)+", code) else set()
                assert {*KEYWORD.findall(code), *bare} <= known | {"ids"}, code
            count += 1
    assert count > 20


@pytest.mark.parametrize("page", MAPS, ids=lambda page: page.stem)
def test_migration_tables_agree_with_the_error_for_unknown_options(page):
    for theirs, ours in cells(page):
        for name in KEYWORD.findall(theirs):
            if name in _ELSEWHERE and not re.match(r"`\w+\(", theirs):
                hint = re.split(r"\W", _ELSEWHERE[name])[0]
                assert hint in ours, f"{theirs}: {ours}, but the error says {hint}"


def test_every_public_name_is_in_the_reference():
    pages = [*(ROOT / "docs" / "reference").glob("*.md"), ROOT / "docs" / "ops.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    documented = set(re.findall(r"^::: onward\.(\w+)", text, re.MULTILINE))
    assert set(onward.__all__) - {"__version__", "OnwardError"} <= documented
    for name in re.findall(r"^::: ([\w.]+)", text, re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_every_op_is_on_its_page():
    text = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    functions = {name for name in onward.ops.__all__ if inspect.isfunction(getattr(onward.ops, name))}
    # An op that is called as its file is found there: the name alone is the file's.
    signatures = re.findall(r"^::: onward\.ops\.([\w.]+)", text, re.MULTILINE)
    assert {name.rpartition(".")[2] for name in signatures} == functions
    table = text[text.index("## All ops") : text.index("## Gradients")]
    assert set(re.findall(r"\(#onward\.ops\.([\w.]+)\)", table)) == set(signatures) - {
        "pack",
        "pack_experts",
        "choice",
        "choose",
    }


def test_the_architecture_page_lists_every_folder_and_import_layer():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listing = page[page.index("src/onward/") : page.index("\nnative/")]
    listed = {name.rstrip("/") for name in re.findall(r"^  (\S+)", listing, re.MULTILINE)}
    files = {path.name for path in (ROOT / "src" / "onward").iterdir()}
    assert files - {"__init__.py", "__main__.py", "__pycache__", "py.typed", "__init__.pyi"} <= listed
    assert listed <= files
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = (
        contract["layers"] for contract in settings["tool"]["importlinter"]["contracts"] if "layers" in contract
    )
    assert (
        re.findall(r"`([\w |:]+)`(?:\s→|\.)", page[page.index("Imports go downwards") :].partition("\n\n")[0]) == layers
    )


def test_the_catalog_lists_every_architecture_and_gguf_type():
    assert {name for known in KNOWN_MODELS for name in known.architectures} == FAMILIES.keys()
    assert {name for known in KNOWN_MODELS for name in known.gguf} == gguf_families.FAMILIES.keys()
    for known in KNOWN_MODELS:
        for name in WRITTEN.keys() & known.architectures:
            assert WRITTEN[name].architecture in known.gguf


def test_the_readme_fits_a_terminal():
    for block in blocks_of(ROOT / "README.md"):
        for line in block.text.splitlines():
            assert len(line) <= (80 if block.language == "console" else 92), line


def test_every_decision_is_in_the_index_once_with_its_title():
    folder = ROOT / "docs" / "decisions"
    pages = sorted(path for path in folder.glob("*.md") if path.name != "README.md")
    titles = [path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for path in pages]
    rows = re.findall(
        r"^\| \[(\d{4})\]\(([^)]*)\) \| (.+?) \| .+ \|$", (folder / "README.md").read_text(), re.MULTILINE
    )
    assert [(name, f"{number} {title}") for number, name, title in rows] == [
        (path.name, title) for path, title in zip(pages, titles, strict=True)
    ]


def test_every_page_of_results_is_in_the_table_once():
    folder = ROOT / "benchmarks"
    listed = re.findall(r"^\| \[[^]]*\]\(results/([^)]*)\)", (folder / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (folder / "results").glob("*.md"))
    days = [name[:10] for name in listed]
    assert days == sorted(days, reverse=True)
