"""Onward without features of Linux (tests/other_system.py). `make sanitize` builds the kernels with
ONWARD_PORTABLE_PLATFORM."""

import json
import subprocess
import sys

from onward.constraints import trial

GENERATE = """
import onward
from onward import native
from onward.cli.info import machine_facts

lm = onward.load("demo")
print(native.isa(), native.num_threads())
print(repr(lm.generate("Once upon a time", max_new_tokens=16, seed=1).text))
print(lm.generate("Yes or no?", choice=["yes", "no"], seed=1).text)
print(len(machine_facts()))
"""


def run(code: str, lines: str = "") -> str:
    return subprocess.run([sys.executable, "-c", code], input=lines, capture_output=True, text=True, check=True).stdout


def test_a_model_generates_the_same_text() -> None:
    elsewhere = run(f"import tests.other_system\n{GENERATE}")
    assert elsewhere.count("\n") == 4
    assert elsewhere == run(GENERATE)


def test_a_grammar_is_tried_without_a_memory_limit() -> None:
    vocabulary = {"tokens": [chr(byte) for byte in range(256)] + ["<end>"], "special": [256], "end": 256}
    grammar = {"seconds": 10, "wall_seconds": 60, "source": 'start: "a" | "b"'}
    code = f"import tests.other_system, runpy; runpy.run_path({str(trial._PROGRAM)!r}, run_name='__main__')"
    assert int(run(code, f"{json.dumps(vocabulary)}\n{json.dumps(grammar)}\n")) >= 0
