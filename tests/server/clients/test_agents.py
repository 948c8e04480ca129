"""Popular agents, for one turn with the server: a call of their shell, its output, and the final text.

`make agents` installs Codex and Claude Code from npm; without them these tests are skipped.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from environments import HERE, agent
from live_server import LiveServer
from scripted_agent import scripted_agent

SECONDS = 120
QUESTION = "Say onward-works with echo."
PAGE = (HERE.parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer({"agent": scripted_agent()}) as live:
        yield live


def settings(server: LiveServer, part: str) -> str:
    """The block of docs/clients.md with this text, for the test's server and its model."""
    (text,) = (text for text in re.findall(r"^```\w+\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) if part in text)
    return text.replace("http://localhost:8000", server.url).replace("my-model", "agent")


def run(home: Path, name: str, *arguments: str, **environment: str) -> list[dict]:
    """Run an agent with a home folder of its own; returns the lines of JSON that it prints."""
    command = agent(name)
    work = home / "work"
    work.mkdir(parents=True)
    done = subprocess.run(
        [command, *arguments, QUESTION],
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_codex_runs_a_command_and_reads_its_output(server: LiveServer, tmp_path: Path) -> None:
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(settings(server, "[model_providers"))
    flags = ("--skip-git-repo-check", "--sandbox", "danger-full-access", "--json")
    items = [event["item"] for event in run(tmp_path, "codex", "exec", *flags) if event["type"] == "item.completed"]
    (command,) = (item for item in items if item["type"] == "command_execution")
    assert (command["aggregated_output"], command["exit_code"]) == ("onward-works\n", 0)
    (message,) = (item for item in items if item["type"] == "agent_message")
    assert message["text"].startswith("It works: ")
    assert message["text"].endswith("onward-works"), "the model saw the command's output"


def test_claude_code_runs_a_command_and_reads_its_output(server: LiveServer, tmp_path: Path) -> None:
    exported = re.findall(r"(ANTHROPIC_\w+)=(\S+)", settings(server, "$ claude\n"))
    environment = {**dict(exported), "DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1"}
    flags = ("-p", "--verbose", "--output-format", "stream-json", "--allowedTools=Bash")
    lines = run(tmp_path, "claude", *flags, **environment)
    results = [
        block
        for line in lines
        if line["type"] == "user"
        for block in line["message"]["content"]
        if block["type"] == "tool_result"
    ]
    assert [(block["content"], block["is_error"]) for block in results] == [("onward-works", False)]
    assert lines[-1]["type"] == "result"
    assert lines[-1]["result"] == "It works: onward-works", "the model saw the command's output"
