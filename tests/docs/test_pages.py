"""Every block of code on every page works as described, in the order of the page, in an empty folder.

A page is one Python session with its own imports. ```python blocks are run, and Onward's commands in ```console blocks.
Output below a command, or in a ```text block right after Python, is compared; ```json blocks are parsed. Hub ids and
the folder `my-model` stand for the demo model; the folder `my-adapter` is an adapter for it.
"""

import ast
import contextlib
import io
import json
import shutil
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
from doc_console import addressed, run_command, servers, sessions
from doc_pages import PAGES, Block, agrees, blocks_of, name_of
from huggingface_hub import constants

import onward
from demo_adapters import demo_adapter
from onward import ops
from onward.models import FAMILIES

# In the manner of Qwen3's: the models of the hub read tools and enable_thinking, which the demo model's does not.
HUB_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
DEMO = Path(onward.__file__).parent / "demo" / "target"
LANGUAGES = {"python", "console", "text", "json", "toml", "yaml", "html", "js", ""}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with `my-model` and `my-adapter`, also in `models` and `adapters`, and a hub cache of the models."""
    for repository in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B"):
        cached = tmp_path / "hub" / f"models--{repository.replace('/', '--')}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("0" * 40)
        snapshot = shutil.copytree(DEMO, cached / "snapshots" / ("0" * 40))
        (snapshot / "chat_template.jinja").write_text(HUB_TEMPLATE)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    work = tmp_path / "work"
    shutil.copytree(DEMO, work / "my-model")
    demo_adapter(work / "my-adapter", seed=1)
    shutil.copytree(work / "my-model", work / "models" / "my-model")
    shutil.copytree(work / "my-model", work / "checkpoints" / "step-400")
    shutil.copytree(work / "my-adapter", work / "adapters" / "my-adapter")
    monkeypatch.chdir(work)
    return work


# test_training_page.py, test_evaluating_page.py and tests/server/clients run these.
ELSEWHERE = {"docs/training.md", "docs/evaluating.md", "docs/clients.md"}


@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in ELSEWHERE], ids=name_of)
def test_a_page_runs(page, folder, monkeypatch):
    blocks = blocks_of(page)
    if not any(block.language in ("python", "console") for block in blocks):
        pytest.skip("no code to run")
    run_page(name_of(page), blocks, monkeypatch)


def run_page(name: str, blocks: list[Block], patch: pytest.MonkeyPatch) -> dict[str, object]:
    """Run a page's blocks in order; returns the names that its Python made."""
    module = types.ModuleType("page")
    patch.setitem(sys.modules, "page", module)  # where dataclasses of the page look for their names
    printed = ""
    with servers(), mock.patch.dict(FAMILIES):  # a page may register a family
        for block in blocks:
            if block.language == "python":
                printed = run_python(block, name, vars(module))
            elif block.language == "console":
                for command, output in sessions(addressed(block.text)):
                    run_command(command, output, patch)
            elif block.language == "text" and block.follows and printed and ops.choice().form == "native":
                assert agrees(printed, block.text), f"{name}:{block.line}: it printed\n{printed}"
    return vars(module)


def run_python(block: Block, name: str, names: dict[str, object]) -> str:
    """Run a block under the file and the lines of its page; returns what it printed."""
    tree = ast.increment_lineno(ast.parse(addressed(block.text), name), block.line - 1)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(tree, str(Path(name)), "exec"), names)
    return out.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_are_of_a_known_kind(page):
    for block in blocks_of(page):
        assert block.language in LANGUAGES, f"{name_of(page)}:{block.line}"
        if block.language == "json":
            json.loads(block.text)
        # Blocks that look like code must be marked as code, so that they run.
        if block.language in ("", "text"):
            assert not block.text.startswith(("import ", "from ", "onward ", "$ ", "lm")), (
                f"{name_of(page)}:{block.line}"
            )
