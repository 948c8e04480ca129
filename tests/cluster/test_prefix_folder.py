"""The replicas of one machine share a folder of prefixes."""

import time
import urllib.request
import warnings
from pathlib import Path

import pytest
from streams import free_port, read

pytest.importorskip("ray")
with warnings.catch_warnings(action="ignore"):  # of Ray's own
    from onward.cluster.deployment import running
    from onward.cluster.options import DeployOptions

BODY = {"prompt": "There was a fox who lived in a forest. " * 12, "max_tokens": 4, "seed": 1, "stream": True}


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore")
def test_a_replica_reads_what_another_has_computed(tmp_path: Path) -> None:
    options = DeployOptions(replicas=2, threads=1, affinity=False, load={"prefix_cache_dir": str(tmp_path)})
    with running(options, port=(port := free_port())) as url:
        first = read(port, BODY)
        assert first.is_whole
        replicas, end = {first.replica}, time.monotonic() + 120
        while not restored(url):
            assert time.monotonic() < end, f"nothing is read by {replicas}"
            time.sleep(0.2)
            again = read(port, BODY)
            assert again.said == first.said
            replicas.add(again.replica)
        assert len(replicas) == 2


def restored(url: str) -> bool:
    """Whether any replica has read a prefix from the disk."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return any(float(line.split()[-1]) > 0 for line in lines if line.startswith("onward_prefix_disk_tokens_total"))
