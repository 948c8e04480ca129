"""Ranks as processes: they start and end with the model, and a death is an error, not a hang."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import onward
from onward.distributed import launchers as processes
from onward.distributed.links import Kind
from onward.errors import CheckpointError, RankError
from onward.testing import random_checkpoint

PROMPT = [5, 6, 7]
# Seconds that a process may take to end on a busy machine.
SECONDS = 60.0


def pids_of(lm: onward.LanguageModel) -> list[int]:
    forward = lm.model.forward
    return list(forward.group.processes.pids)


def has_ended(pid: int) -> bool:
    """Whether a process has ended, or waits for its parent to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def await_end(pids: list[int]) -> None:
    until = time.monotonic() + SECONDS
    while not all(map(has_ended, pids)):
        assert time.monotonic() < until, "an orphan"
        time.sleep(0.05)


def test_ranks_live_as_long_as_the_model(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, num_hidden_layers=3)
    one = onward.load(folder)
    lm = onward.load(folder, pipeline=2)
    pids = pids_of(lm)
    assert lm.generate(PROMPT, max_new_tokens=8).token_ids == one.generate(PROMPT, max_new_tokens=8).token_ids
    del lm
    await_end(pids)


def test_ranks_use_an_8_bit_cache(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, "qwen2", num_hidden_layers=3)
    one, lm = (onward.load(folder, cache_format="int8", pipeline=ranks) for ranks in (1, 2))
    expected = one.generate(PROMPT, max_new_tokens=8)
    assert lm.generate(PROMPT, max_new_tokens=8).token_ids == expected.token_ids
    assert {leaf.dtype for leaf in lm.model.new_cache(1, 8).keys} == {torch.int8}


def test_a_dead_rank_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is noticed, not that it has become silent."""
    monkeypatch.setattr(processes, "HEARTBEAT_TIMEOUT", 1e6)
    folder = random_checkpoint(tmp_path, num_hidden_layers=3, max_position_embeddings=2**15)
    lm = onward.load(folder, pipeline=3)
    pids = pids_of(lm)
    stream = lm.stream(PROMPT, max_new_tokens=10_000, ignore_eos=True)
    next(stream)
    os.kill(pids[-1], signal.SIGKILL)
    with pytest.raises(RankError, match="rank"):
        for _ in stream:
            pass
    with pytest.raises(RankError):
        lm.generate(PROMPT)
    await_end(pids)


def test_ranks_exit_when_one_of_them_is_unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = onward.load(random_checkpoint(tmp_path, num_hidden_layers=3), pipeline=3)
    pids, forward = pids_of(lm), lm.model.forward
    links = forward.group.links  # type: ignore[attr-defined]
    send_ints = links.send_ints

    def tell_the_first(numbers: list[int], to: list[int]) -> None:
        send_ints(numbers, [rank for rank in to if rank == 1])
        if numbers[0] == Kind.FORWARD:
            raise RankError("rank 0 has lost another rank")

    monkeypatch.setattr(links, "send_ints", tell_the_first)
    for _ in range(2):
        with pytest.raises(RankError, match="has lost another rank"):
            lm.generate(PROMPT)
    await_end(pids)


def test_a_rank_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "HEARTBEAT_TIMEOUT", 3.0)
    folder = random_checkpoint(tmp_path, num_hidden_layers=3, max_position_embeddings=2**15)
    lm = onward.load(folder, pipeline=3)
    pids = pids_of(lm)
    stream = lm.stream(PROMPT, max_new_tokens=10_000, ignore_eos=True)
    next(stream)
    os.kill(pids[-1], signal.SIGSTOP)
    with pytest.raises(RankError, match=f"rank {len(pids)} has not responded for 3 s"):
        for _ in stream:
            pass
    with pytest.raises(RankError, match="has not responded"):
        lm.generate(PROMPT)
    await_end(pids)


def test_idle_ranks_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "HEARTBEAT_TIMEOUT", 2.5)
    folder = random_checkpoint(tmp_path, num_hidden_layers=3)
    lm = onward.load(folder, pipeline=2)
    (pid,) = pids_of(lm)
    expected = lm.generate(PROMPT, max_new_tokens=8).token_ids
    os.kill(pid, signal.SIGSTOP)
    time.sleep(4.5)
    os.kill(pid, signal.SIGCONT)
    assert lm.generate(PROMPT, max_new_tokens=8).token_ids == expected


def test_an_exiting_program_leaves_no_rank(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, num_hidden_layers=3)
    code = (
        "import onward\n"
        f"lm = onward.load({str(folder)!r}, pipeline=2)\n"
        "lm.generate([5, 6], max_new_tokens=4)\n"
        "print(*lm.model.forward.group.processes.pids)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    await_end([int(pid) for pid in ended.stdout.split()])
    assert "Error" not in ended.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_is_refused_without_side_effects(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, num_hidden_layers=3)
    code = (
        "import onward, os, sys\n"
        "from onward.errors import RankError\n"
        f"lm = onward.load({str(folder)!r}, pipeline=2)\n"
        "first = lm.generate([5, 6], max_new_tokens=4).token_ids\n"
        "if (child := os.fork()) == 0:\n"
        "    try:\n"
        "        lm.generate([5, 6], max_new_tokens=4)\n"
        "    except RankError:\n"
        "        os._exit(7)\n"
        "    os._exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "assert lm.generate([5, 6], max_new_tokens=4).token_ids == first"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_rank_that_fails_to_load_reports_why(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, num_hidden_layers=3, shards=2)
    weights = next(folder.glob("*-00002-of-*"))
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises((RankError, CheckpointError)):
        onward.load(folder, pipeline=2)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_orphans(how: signal.Signals, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, num_hidden_layers=3)
    code = (
        "import onward, sys, time\n"
        f"lm = onward.load({str(folder)!r}, pipeline=2)\n"
        "print(*lm.model.forward.group.processes.pids, flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert pids
        parent.send_signal(how)
        parent.wait(SECONDS)
    await_end(pids)
