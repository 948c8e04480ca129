"""Helpers to find the processes of `onward deploy`'s replicas, in order to kill them."""

import time
from typing import Any

_PIDS: dict[str, int] = {}


def pid_of(replica: str) -> int:
    """The process of a replica, by its id in the header x-onward-replica; the replica may have ended in the meantime.

    Raises:
        KeyError: there is no such replica.
    """
    if replica not in _PIDS:
        _details()
    return _PIDS[replica]


def _details() -> list[dict[str, Any]]:
    """Each replica, as Ray Serve's controller knows it."""
    from ray.serve.context import _get_global_client

    deployments = _get_global_client().get_serve_details()["applications"]["onward"]["deployments"]
    replicas: list[dict[str, Any]] = deployments["Replica"]["replicas"]
    _PIDS.update({each["replica_id"]: each["pid"] for each in replicas if each.get("pid")})
    return replicas


def wait_for_replicas(count: int) -> None:
    """Wait until `count` replicas exist and all are alive: Ray takes seconds to notice a death.

    Raises:
        RuntimeError: it takes more than two minutes.
    """
    end = time.monotonic() + 120
    while time.monotonic() < end:
        details = _details()
        there = [replica["state"] == "RUNNING" and runs(replica.get("pid")) for replica in details]
        if there == [True] * count:
            return
        time.sleep(0.1)
    raise RuntimeError(f"replicas that were lost do not come back: {details}")


def runs(pid: int | None) -> bool:
    """Whether a process exists and is neither stopped nor dead; None: a process that has no id yet."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "TtZX"
    except OSError:
        return False
