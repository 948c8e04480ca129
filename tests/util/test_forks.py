"""Forked children decode as their parent does: after it has decoded, and while another of its threads decodes."""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref

import pytest
import torch
from torch import nn

import onward
from onward.models import Model
from onward.program.compiled import ProgramCache
from onward.testing import tiny_model
from onward.util.process import call_in_forks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without forks"),
    # Python 3.12 and later: native threads are there whenever kernels have run.
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]

SECONDS = 60  # of a child that hangs, not of one that works
OPTIONS = {"max_new_tokens": 24, "temperature": 1.0, "seed": 3}


@pytest.fixture(autouse=True)
def several_threads():
    """Forks matter to torch's pool of threads, which a single one does not start."""
    before, ours = torch.get_num_threads(), onward.num_threads()
    torch.set_num_threads(2)
    onward.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    onward.set_num_threads(ours)


def in_child(holds) -> int | str:
    """The exit code of a forked child: 0 where `holds()`; "hangs" where it had to be killed."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if holds() else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


def generated(lm):
    return lm.generate("Once upon a time", **OPTIONS).token_ids


def chatted(lm):
    return lm.chat([{"role": "user", "content": "Hello"}], **OPTIONS).token_ids


@pytest.mark.parametrize(
    ("loaded", "decoded"),
    [
        ({}, generated),
        ({}, chatted),
        ({"compile": "eager"}, generated),
        ({"quantize": "int8"}, generated),
        ({"draft": "demo-draft"}, generated),
        ({"draft": "suffix"}, generated),
    ],
)
def test_a_child_forked_after_decoding_decodes_the_same(loaded, decoded):
    lm = onward.load("demo", **loaded)
    tokens = decoded(lm)
    assert in_child(lambda: decoded(lm) == tokens) == 0
    assert decoded(lm) == tokens


class Wide(nn.Module):
    """So wide that torch runs its operators, and makes its cache, on several threads."""

    vocab_size, max_seq_len = 4096, 4096

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4096, 256)
        self.head = nn.Linear(256, 4096)

    def new_cache(self, batch, max_len):
        return torch.zeros(batch, max_len, 256)

    def forward(self, tokens, offsets, cache):
        return self.head(self.embedding(tokens)), cache


def test_a_child_runs_a_pure_torch_model():
    lm = onward.LanguageModel(Model.from_module(Wide().eval()))
    prompt = list(range(300))
    tokens = lm.generate(prompt, max_new_tokens=8).token_ids
    assert in_child(lambda: lm.generate(prompt, max_new_tokens=8).token_ids == tokens) == 0


POOL = """
import multiprocessing, onward, torch
torch.set_num_threads(2)
onward.set_num_threads(2)
lm = onward.load("demo")
def work(prompt):
    return lm.generate(prompt, max_new_tokens=24, seed=3).token_ids
prompts = ["Once", "The dog", "A boy", "One day"]
here = [work(prompt) for prompt in prompts]
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map_async(work, prompts).get(60) == here)
"""


def test_a_pool_of_forked_processes_decodes():
    """In a process of its own, whose end takes the pool with it."""
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", POOL], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.communicate(timeout=2 * SECONDS)[0].strip() == "True"
        finally:
            process.kill()


@pytest.mark.parametrize("loaded", [{}, {"compile": "eager"}])
@pytest.mark.stride(2)
def test_children_forked_while_a_thread_decodes_decode_the_same(loaded):
    lm = onward.load("demo", **loaded)
    tokens, over = generated(lm), threading.Event()

    def decode_on():
        while not over.is_set():
            assert generated(lm) == tokens

    thread = threading.Thread(target=decode_on)
    thread.start()
    try:
        for _ in range(20):
            assert in_child(lambda: generated(lm) == tokens) == 0
    finally:
        over.set()
        thread.join()
    assert generated(lm) == tokens


def test_a_session_running_in_another_thread_is_reset_in_a_child():
    lm = onward.load("demo")
    session, going, over = onward.Session(lm), threading.Event(), threading.Event()
    expected = lm.generate("The fox", **OPTIONS).token_ids

    def wait(ids, text):
        going.set()
        return over.wait(SECONDS)

    thread = threading.Thread(target=lambda: session.generate("The owl", stop_when=wait, **OPTIONS))
    thread.start()
    assert going.wait(SECONDS)

    def dropped_then_others_decode():
        nonlocal session
        del session
        return generated(lm) == tokens

    tokens = generated(lm)
    try:
        assert in_child(lambda: session.generate("The fox", **OPTIONS).token_ids == expected) == 0
        assert in_child(dropped_then_others_decode) == 0
    finally:
        over.set()
        thread.join()


def test_children_forked_while_a_thread_holds_any_lock_decode_the_same():
    """Every lock at once, which chance would seldom bring."""
    from onward.native import loader
    from onward.program import store as reuse

    model = tiny_model()
    lm = onward.LanguageModel(model)
    tokens = lm.generate([1, 2, 3], max_new_tokens=8).token_ids

    def ids():
        return list(
            onward.stream(
                model.forward, cache=model.new_cache(1, 64), params=model.params, first_token=1, max_new_tokens=4
            )
        )

    streamed = ids()
    locked, over = threading.Event(), threading.Event()

    def hold():
        with lm._model_run._programs.lock, loader._lock, reuse._lock:
            locked.set()
            over.wait(SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait()

    def holds():
        onward.native.select_isa(onward.native.isa())
        return lm.generate([1, 2, 3], max_new_tokens=8).token_ids == tokens and ids() == streamed

    try:
        assert in_child(holds) == 0
    finally:
        over.set()
        thread.join()


def test_a_child_runs_no_program_that_another_thread_was_running():
    lm = onward.LanguageModel(tiny_model())
    lm.generate([1, 2, 3], max_new_tokens=4)
    programs = lm._model_run._programs
    made = len(programs.by_shape)
    assert in_child(lambda: len(programs.by_shape) == made) == 0, "what is whole is used again"
    with programs.lock:
        assert in_child(lambda: not programs.by_shape and not programs.lock.locked()) == 0
    assert len(programs.by_shape) == made


def test_fork_handlers_do_not_keep_programs_alive():
    programs = ProgramCache()
    gone = weakref.ref(programs)
    del programs
    assert gone() is None


def test_fork_handlers_are_called_only_in_children():
    called = []
    call_in_forks(lambda: called.append(os.getpid()))
    assert in_child(lambda: called == [os.getpid()]) == 0
    assert not called
