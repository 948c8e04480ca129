"""The environments of `make clients` and `make agents`; clients that are not installed are skipped."""

import os
import shutil
from pathlib import Path

import pytest

HERE = Path(__file__).parent
AGENTS = {"Codex": "codex", "Claude Code": "claude"}  # the sections of docs/clients.md, and their commands
# Nothing here asks a host on the network.
ENVIRONMENT = {
    **os.environ,
    "OPENAI_API_KEY": "none",
    "PYTHONWARNINGS": "ignore",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


def openai2() -> tuple[str | Path, ...]:
    """The Python of clients that need openai 2, with its own packages only."""
    python = HERE.parents[2] / "build" / "clients" / "openai2" / "bin" / "python"
    if not python.exists():
        pytest.skip("clients that need openai 2 are missing: run `make clients`")
    return "env", "-u", "PYTHONPATH", python


def node_with_packages() -> str:
    node = shutil.which("node")
    if node is None or not (HERE / "node_modules").exists():
        pytest.skip("node or the packages of package.json are missing: run `make clients`")
    return node


def agent(name: str) -> Path:
    command = HERE / "command_lines" / "node_modules" / ".bin" / name
    if not command.exists():
        pytest.skip(f"{name} is missing: run `make agents`")
    return command
