"""An engine when its process forks, and when it exits."""

import os
import subprocess
import sys
import time

import pytest
from checked_engine import CheckedEngine

from onward import LanguageModel
from onward.errors import EngineError
from onward.testing import ByteTokenizer, tiny_model

LM = LanguageModel(tiny_model(seed=7), ByteTokenizer(), prefix_memory=0)
SECONDS = 60


def slowly(ids, text):
    time.sleep(0.005)
    return False


def in_child(check) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -9


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without forks")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_gets_a_clear_error_and_the_parent_continues():
    whole = LM.generate("abc", max_new_tokens=100)
    engine = CheckedEngine(LM, max_sequences=2)
    ended = engine.submit("abc", max_new_tokens=2)
    ended.result(SECONDS)
    running = []

    def check():
        with pytest.raises(EngineError, match="in the parent process"):
            engine.submit("abc")
        for generation in running:
            if generation._completion is None:  # otherwise it ended before the fork
                with pytest.raises(EngineError, match="in the parent process"):
                    generation.result(SECONDS)
                with pytest.raises(EngineError, match="in the parent process"):
                    list(generation)
                generation.cancel()
        assert ended.result(SECONDS).token_ids == whole.token_ids[:2]
        engine.close()
        with CheckedEngine(LM) as own:
            assert own.submit("abc", max_new_tokens=5).result(SECONDS).token_ids == whole.token_ids[:5]

    for _ in range(4):  # with any lock held at that moment
        running += [engine.submit("abc", max_new_tokens=100, stop_when=slowly) for _ in range(2)]
        next(iter(running[-1]))
        assert in_child(check) == 0
    assert [one.result(SECONDS).token_ids for one in running] == [whole.token_ids] * 8
    engine.close()


UNCLOSED = """
import time
import onward
from onward.engine import Engine
from onward.testing import ByteTokenizer, tiny_model

engine = Engine(onward.LanguageModel(tiny_model(seed=7), ByteTokenizer()), max_sequences=2)
generations = [engine.submit("abc", max_new_tokens=200, stop_when=lambda ids, text: time.sleep(0.05)) for _ in range(8)]
next(iter(generations[0]))
{then}
"""


@pytest.mark.parametrize(("then", "code"), [("", 0), ("import sys; sys.exit(3)", 3)])
def test_the_interpreter_exits_with_a_running_engine(then, code):
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", UNCLOSED.format(then=then)],
        capture_output=True,
        text=True,
        timeout=60,  # the requests alone would take 40 s
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")
