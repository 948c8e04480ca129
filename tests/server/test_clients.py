"""Clients that people use, against the server. They are no part of the development set: extra `clients`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from live_server import LiveServer

import onward

MODEL, KEY, SECONDS = "demo", "none", 240


def run(*command: str, **environment: str) -> str:
    """A program of its own: these libraries keep state, and warn of each other."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OPENAI_API_KEY": KEY, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_langchain_reads_answers_and_streams(server: LiveServer, lm: onward.LanguageModel) -> None:
    pytest.importorskip("langchain_openai")
    program = """
import json, sys
from langchain_openai import ChatOpenAI
chat = ChatOpenAI(model="demo", base_url=sys.argv[1], api_key="none", max_completion_tokens=12, seed=3)
whole = chat.invoke("Hi")
parts = [part.content for part in chat.stream("Hi")]
print(json.dumps([whole.content, "".join(parts), len(parts), whole.usage_metadata["output_tokens"]]))
"""
    whole, streamed, parts, tokens = json.loads(run("-W", "ignore", "-c", program, f"{server.url}/v1"))
    assert whole == streamed == lm.chat([{"role": "user", "content": "Hi"}], max_new_tokens=12, seed=3).text
    assert parts > 3
    assert tokens == 12


def test_litellm_reads_answers_and_streams(server: LiveServer, lm: onward.LanguageModel) -> None:
    pytest.importorskip("litellm")
    program = """
import json, sys
import litellm
options = dict(model="openai/demo", api_base=sys.argv[1], api_key="none", max_tokens=12, seed=3)
options["messages"] = [{"role": "user", "content": "Hi"}]
whole = litellm.completion(**options)
parts = [part.choices[0].delta.content or "" for part in litellm.completion(stream=True, **options)]
print(json.dumps([whole.choices[0].message.content, "".join(parts)]))
"""
    local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # or it asks the network for prices
    whole, streamed = json.loads(run("-W", "ignore", "-c", program, f"{server.url}/v1", **local).splitlines()[-1])
    assert whole == streamed == lm.chat([{"role": "user", "content": "Hi"}], max_new_tokens=12, seed=3).text


def test_the_command_line_of_llm_chats(server: LiveServer, lm: onward.LanguageModel, tmp_path: Path) -> None:
    pytest.importorskip("llm")
    model = f"- model_id: onward\n  model_name: demo\n  api_base: {server.url}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(model)
    flags = ("-m", "onward", "-o", "max_tokens", "12", "-o", "seed", "3", "Hi")
    alone = lm.chat([{"role": "user", "content": "Hi"}], max_new_tokens=12, seed=3).text
    for more in (("--no-stream",), ()):
        told = run("-m", "llm", *flags, *more, LLM_USER_PATH=str(tmp_path), PYTHONWARNINGS="ignore")
        assert told.strip() == alone.strip()


def test_schemathesis_finds_no_answer_that_is_not_described(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("schemathesis")
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    program = "from schemathesis.cli import schemathesis; schemathesis()"
    command = ("-c", program, "run", f"{server.url}/openapi.json", "--checks", checks, "--max-examples", "25")
    monkeypatch.chdir(tmp_path)  # where it keeps what it finds
    run(*command, "--phases", "examples,fuzzing", "--seed", "1", "--generation-deterministic")
    server.wait_idle()
