"""`onward serve` as a separate process, with the demo model and several chat templates."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from tests.hostile.neighbours import Neighbours, memory
from tests.hostile.sending import Answer, Target, ask

import onward

SECONDS = 60.0  # until a server has started
IDLE_SECONDS = 10.0  # until nothing runs, once the clients have left
_ADDRESSES = 6 * 2**30  # bytes of address space
KEYS = ("key-of-an-attacker", "key-of-a-neighbour")
DEMO = Path(onward.__file__).parent / "demo" / "target"

_TURNS = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
# Chat templates by the name of the model that has them; the demo has its own.
TEMPLATES = {
    "coder": "{% if tools %}{{ tools | tojson }}<tool_call>\n<function=f>\n</function>\n</tool_call>{% endif %}"
    + _TURNS
    + "<|im_start|>assistant\n",
    "think": _TURNS
    + "<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}",
    "dated": "{{ strftime_now('%d %B %Y %X.%f') }} {{ today }}\n" + _TURNS + "<|im_start|>assistant\n",
}


def with_template(template: str, folder: Path) -> Path:
    """The demo model with another chat template, as a checkpoint."""
    folder.mkdir(parents=True)
    for file in DEMO.iterdir():
        shutil.copy(file, folder)
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return folder


def bound_memory(pid: int) -> None:
    """A process that does not hold must not take the machine with it."""
    if hasattr(resource, "prlimit"):  # Linux
        resource.prlimit(pid, resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))


class Program:
    """A running server. keyed: it requires API keys; the attacker's requests have the first, neighbours' the second.

    target: for attacks. neighbours: the other clients. idle_memory: MB of a server that has answered a few requests.
    """

    def __init__(self, folder: Path, *, keyed: bool = True, templates: tuple[str, ...] = tuple(TEMPLATES)) -> None:
        command = [sys.executable, "-m", "onward", "serve", "demo", "--port", "0", "--no-access-log"]
        for name in templates:
            at = folder / name
            command += ["--model", f"{name}={at if at.exists() else with_template(TEMPLATES[name], at)}"]
        for key in KEYS if keyed else ():
            command += ["--api-key", key]
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._log_read = 0
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=self._log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        self.pid = self._process.pid
        bound_memory(self.pid)
        self.models = ("demo", *templates)
        port = int(self._until(r'"serves", "url": "http://127\.0\.0\.1:(\d+)"'))
        self.target = Target(port, KEYS[0] if keyed else "")
        self.neighbours = Neighbours(port, self.pid, KEYS[1] if keyed else "")
        self._warm_up()
        self.idle_memory = self.memory()

    def memory(self) -> float:
        """MB of the server and its children."""
        return memory(self.pid)

    def ask(self, path: str, body: Any = None) -> Answer:
        """The answer to a well-formed request, or a GET if there is no body."""
        raw = None if body is None else json.dumps(body).encode()
        return ask(self.target, path, raw, method="GET" if body is None else "POST")

    def running(self) -> dict[str, Any]:
        """The busy resources according to /stats and /metrics; empty if all sequences and blocks are free."""
        answer = self.ask("/stats")
        if answer.status != 200:
            return {"/stats": answer.status}
        stats = json.loads(answer.body)
        names = ("waiting", "running", "sequences", "waiting_tokens", "blocks_used")
        busy = {f"{model} {name}": each[name] for model, each in stats.items() for name in names if each[name]}
        gauge = r"^(onward_(?:requests_waiting|requests_running|sequences_running|cache_blocks).*\}) (.*)$"
        metrics = self.ask("/metrics").body.decode()
        gauges = {name: float(value) for name, value in re.findall(gauge, metrics, re.MULTILINE)}
        return busy | {
            name: value for name, value in gauges.items() if value and "cached" not in name and "free" not in name
        }

    def until_idle(self, seconds: float = IDLE_SECONDS) -> dict[str, Any]:
        """The work that still runs after `seconds`; empty if there is none."""
        end = time.monotonic() + seconds
        while (busy := self.running()) and time.monotonic() < end:
            time.sleep(0.005)
        return busy

    def defects(self) -> list[str]:
        """Lines of the log that are defects or tracebacks, each once."""
        self._log.seek(self._log_read)
        lines = self._log.readlines()
        self._log_read = self._log.tell()
        return [line for line in lines if '"event": "defect"' in line or "Traceback" in line]

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End it at once: other tests are about how a server ends."""
        self.neighbours.close()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _until(self, pattern: str) -> str:
        end = time.monotonic() + SECONDS
        while not (found := re.search(pattern, log := self._whole_log())):
            assert self._process.poll() is None, log
            assert time.monotonic() < end, log
            time.sleep(0.02)
        return found[1]

    def _whole_log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def _warm_up(self) -> None:
        """Warm up one-time growth: the code of each endpoint, and the process that compiles grammars."""
        for model in self.models:
            chat = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            schema = {"type": "object", "properties": {"a": {"multipleOf": 2, "type": "integer"}}}
            for more in ({}, {"json_schema": schema}, {"stream": True}):
                assert self.ask("/v1/chat/completions", chat | more).status == 200


class Standing:
    """A server that is started again once it is broken, so that one fault does not hide others."""

    def __init__(self, folder: Path, *, keyed: bool = True, templates: tuple[str, ...] = tuple(TEMPLATES)) -> None:
        self._start = lambda: Program(folder, keyed=keyed, templates=templates)
        self._program: Program | None = None

    @property
    def program(self) -> Program:
        if self._program is None:
            self._program = self._start()
        return self._program

    def close(self) -> None:
        if self._program is not None:
            self._program.close()
            self._program = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
