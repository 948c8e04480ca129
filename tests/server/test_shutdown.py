"""SIGTERM ends a server within its drain time and a few seconds, regardless of running requests."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

SECONDS = 60
DRAIN = 0.2  # seconds
TEXT = "/v1/completions"
PROGRAM = """
import sys, time, onward
from onward.server import Settings, bound, create_app, lifecycle, log_to_stderr, run

lm = onward.load("demo")
{setup}
log_to_stderr()
with onward.Engine(lm) as engine:
    run(create_app({{"demo": engine}}, Settings(drain={drain})), bound("127.0.0.1", 0))
    engine.close(drain=False)
"""
NOTE = "print('runs', file=sys.stderr, flush=True)"
# In a reader: native code that lets other threads run, and for longer than the test.
READING = f"""
lifecycle._CANCEL_GRACE = 1.0
def encode(*_, **options):
    text = "The fox ran over the hill. " * 400_000
    {NOTE}
    while True:
        lm.tokenizer._inner.encode_batch_fast([text])
onward.tokenizer.JsonTokenizer.encode = encode
"""
HANGING = f"""
lifecycle._CANCEL_GRACE = lifecycle._EXIT_GRACE = 1.0
def hang(*_):
    {NOTE}
    time.sleep(1000)
onward.decoding.sequence.Sequence.accept = hang
"""
SLOW = {"allOf": [{"type": "integer", "multipleOf": number} for number in (101, 103, 107, 109)]}


@pytest.mark.parametrize("runs", ["nothing", "reading", "trial", "unread stream", "hanging step"])
def test_the_server_stops_whatever_is_running(runs: str) -> None:
    setup = {"reading": READING, "hanging step": HANGING}.get(runs, "")
    command = [sys.executable, "-c", PROGRAM.format(setup=setup, drain=DRAIN)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    connection = http.client.HTTPConnection("127.0.0.1", timeout=SECONDS)
    watch = threading.Timer(SECONDS, process.kill)
    try:
        assert process.stderr is not None
        port = int(until(process, r'"serves", "url": "http://127.0.0.1:([0-9]+)"'))
        body: dict[str, Any] = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
        if runs == "trial":
            body["json_schema"] = SLOW
        if runs == "unread stream":
            body |= {"stream": True, "n": 32, "logprobs": 5}
        connection.port = port
        connection.connect()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        if runs != "nothing":
            connection.request("POST", TEXT, json.dumps(body), {"Content-Type": "application/json"})
        if setup:
            until(process, "runs")
        elif runs != "nothing":
            time.sleep(2)
        watch.start()
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        status = process.wait(SECONDS)
        assert status == (1 if runs == "hanging step" else 0)
    finally:
        connection.close()
        watch.cancel()
        process.kill()
        process.communicate()


def until(process: "subprocess.Popen[str]", pattern: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(pattern, line):
            return found[1] if found.groups() else line
    raise AssertionError("it has ended")
