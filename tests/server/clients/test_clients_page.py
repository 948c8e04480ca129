"""docs/clients.md runs, each section with its client."""

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from environments import AGENTS, ENVIRONMENT, HERE, node_with_packages, openai2
from live_server import LiveServer

import onward

PAGE = (HERE.parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
PYTHON = {
    "OpenAI's Python client": "openai",
    "Anthropic's Python client": "anthropic",
    "OpenAI Agents SDK": "agents",
    "LangChain": "langchain_openai",
    "LiteLLM": "litellm",
    "Pydantic AI": "pydantic_ai",
}
WITH_OPENAI2 = ("LlamaIndex", "Instructor")


@pytest.fixture(scope="module")
def server(lm: onward.LanguageModel) -> Iterator[LiveServer]:
    with LiveServer({"my-model": lm}) as live:
        yield live


def block_of(section: str, language: str, server: LiveServer) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", SECTIONS[section], re.DOTALL | re.MULTILINE)
    return text.replace("http://localhost:8000", server.url)


def printed(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=HERE,  # where node finds its packages
        env={**ENVIRONMENT, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_every_client_on_the_page_is_run() -> None:
    assert set(SECTIONS) == {*PYTHON, *WITH_OPENAI2, "llm", "Vercel AI SDK", *AGENTS}


@pytest.mark.parametrize("section", PYTHON)
def test_a_python_section_runs(section: str, server: LiveServer) -> None:
    if find_spec(PYTHON[section]) is None:
        pytest.skip(f"{PYTHON[section]} is missing: run `make clients`")
    assert printed(sys.executable, "-c", block_of(section, "python", server))


@pytest.mark.parametrize("section", WITH_OPENAI2)
def test_a_section_with_openai_2_runs(section: str, server: LiveServer) -> None:
    assert printed(*openai2(), "-c", block_of(section, "python", server))


def test_the_llm_section_runs(server: LiveServer, tmp_path: Path) -> None:
    pytest.importorskip("llm")
    models = block_of("llm", "yaml", server)
    assert yaml.safe_load(models)
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    assert block_of("llm", "console", server) == '$ llm -m onward "Tell me a story."\n'
    command = (sys.executable, "-m", "llm", "-m", "onward", "Tell me a story.")
    assert printed(*command, environment={"LLM_USER_PATH": str(tmp_path)})


def test_the_ai_sdk_section_runs(server: LiveServer) -> None:
    code = block_of("Vercel AI SDK", "js", server)
    assert printed(node_with_packages(), "--input-type=module", "--eval", code)
