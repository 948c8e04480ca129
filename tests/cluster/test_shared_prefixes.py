"""Replicas share one folder of prefixes: one reads what another, killed since, has computed."""

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from benchmarks.replicas import wait_for_replicas
from streams import STORY, Stream, check_same, free_port, undisturbed

pytest.importorskip("ray")
with warnings.catch_warnings(action="ignore"):  # of Ray's own
    from onward.cluster.deployment import running
    from onward.cluster.options import DeployOptions

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

BODY: dict[str, Any] = STORY | {
    "prompt": "Once upon a time there was a fox who lived beside a river. " * 20,
    "max_tokens": 60,
    "stream_options": {"include_usage": True},
}


def cached_tokens(stream: Stream) -> int:
    cached: int = stream.events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def block_count(folder: Path) -> int:
    return sum(1 for file in folder.rglob("*") if file.is_file() and file.stat().st_size > 1000)


def test_a_prefix_outlives_the_replica_that_computed_it(tmp_path: Path) -> None:
    options = DeployOptions(replicas=2, threads=1, load={"prefix_cache_dir": str(tmp_path)})
    with running(options, port=(port := free_port())):
        wait_for_replicas(options.replicas)
        first = undisturbed(port, BODY)
        assert first.is_whole
        assert cached_tokens(first) == 0
        count, end = 0, time.monotonic() + 60
        while count == 0 or count != block_count(tmp_path):  # a thread of the replica writes them
            assert time.monotonic() < end
            count = block_count(tmp_path)
            time.sleep(2)
        os.kill(first.pid, signal.SIGKILL)
        second = undisturbed(port, BODY)
        assert second.replica != first.replica
        assert cached_tokens(second) > 100
        check_same(second, first)
