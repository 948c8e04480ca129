"""Popular client libraries with the server, each with its defaults.

Each program in programs/ is a process of its own: the libraries keep state, and some need other versions of openai than
the rest. `make clients` installs them (the extra `clients`, openai2.txt and package.json); what is missing is skipped.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from environments import ENVIRONMENT, HERE, node_with_packages, openai2
from live_server import LiveServer
from scripted_agent import scripted_agent

import onward

SECONDS = 240
MESSAGES = [{"role": "user", "content": "Hi"}]
PYTHON = {  # the program, and the module that it needs
    "openai_chat": "openai",
    "openai_responses": "openai",
    "openai_agents responses": "agents",
    "openai_agents chat": "agents",
    "litellm": "litellm",
    "langchain chat": "langchain_openai",
    "langchain responses": "langchain_openai",
    "pydantic_ai chat": "pydantic_ai",
    "pydantic_ai responses": "pydantic_ai",
    "llm": "llm",
}


def report_of(*command: str | Path) -> dict[str, Any]:
    """The report of a program (programs/contract.py)."""
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(report, dict)
    return report


def program(name: str) -> Path:
    return HERE / "programs" / f"with_{name}"


@pytest.fixture(scope="module")
def server(lm: onward.LanguageModel) -> Iterator[LiveServer]:
    with LiveServer({"demo": lm, "agent": scripted_agent()}) as live:
        yield live


def check(report: dict[str, Any], lm: onward.LanguageModel) -> None:
    assert report["text"] == "".join(report["parts"])
    assert report["text"] == lm.chat(MESSAGES, max_new_tokens=40, temperature=0.0).text
    assert report["parts"]
    assert sorted(report["cities"]) == ["Bergen", "Bergen", "Oslo", "Oslo"], "whole and streamed, two calls at once"
    assert report["answer"] == "".join(report["answer_parts"]) == "It works: Oslo has rain; Bergen has rain"
    assert len(report["answer_parts"]) > 1


@pytest.mark.parametrize("client", PYTHON)
def test_a_library_reads_answers_streams_and_calls_tools(
    client: str, server: LiveServer, lm: onward.LanguageModel
) -> None:
    if find_spec(PYTHON[client]) is None:
        pytest.skip(f"{PYTHON[client]} is missing: run `make clients`")
    name, *protocol = client.split()
    check(report_of(sys.executable, program(f"{name}.py"), server.url, *protocol), lm)


def test_llama_index_reads_answers_streams_and_calls_tools(server: LiveServer, lm: onward.LanguageModel) -> None:
    check(report_of(*openai2(), program("llama_index.py"), server.url), lm)


@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_the_ai_sdk_reads_answers_streams_and_calls_tools(
    protocol: str, server: LiveServer, lm: onward.LanguageModel
) -> None:
    check(report_of(node_with_packages(), program("ai_sdk.mjs"), server.url, protocol), lm)


def test_openai_completes(server: LiveServer, lm: onward.LanguageModel) -> None:
    report = report_of(sys.executable, program("openai_completions.py"), server.url)
    assert report["text"] == "".join(report["parts"])
    assert report["text"] == lm.generate(MESSAGES[0]["content"], max_new_tokens=40, temperature=0.0).text
    assert len(report["parts"]) > 1


def test_instructor_reads_and_streams_objects(server: LiveServer) -> None:
    """Its objects are calls of a function that it requires, or of a JSON Schema: the demo model has to write them."""
    report = report_of(*openai2(), program("instructor.py"), server.url)
    assert set(report) == {"TOOLS", "JSON_SCHEMA"}
    for whole, *parts in report.values():
        for review in (whole, parts[-1]):
            assert review["mood"] in ("happy", "sad")
            assert review["stars"] in (1, 2, 3, 4, 5)
        assert len(parts) > 1
        assert all(parts[-1]["mood"].startswith(part["mood"] or "") for part in parts)


def test_llms_command_line_chats(server: LiveServer, lm: onward.LanguageModel, tmp_path: Path) -> None:
    pytest.importorskip("llm")
    model = f"- model_id: onward\n  model_name: demo\n  api_base: {server.url}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(model)
    flags = ("-m", "onward", "-o", "max_tokens", "12", "-o", "seed", "3", "Hi")
    alone = lm.chat([{"role": "user", "content": "Hi"}], max_new_tokens=12, seed=3).text
    for more in (("--no-stream",), ()):
        done = subprocess.run(
            [sys.executable, "-m", "llm", *flags, *more],
            env={**ENVIRONMENT, "LLM_USER_PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
        assert done.stdout.strip() == alone.strip()
