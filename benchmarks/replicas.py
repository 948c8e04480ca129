"""The replicas of `onward deploy`, as whoever kills them sees them."""

import time


def wait_for_replicas(count: int) -> None:
    """Until so many are there, all of them alive: Ray notices within seconds that one is not.

    Raises:
        RuntimeError: that takes more than two minutes.
    """
    from ray.serve.context import _get_global_client

    end = time.monotonic() + 120
    while time.monotonic() < end:
        details = _get_global_client().get_serve_details()["applications"]["onward"]["deployments"]["Replica"]
        there = [replica["state"] == "RUNNING" and runs(replica.get("pid")) for replica in details["replicas"]]
        if there == [True] * count:
            return
        time.sleep(0.1)
    raise RuntimeError(f"replicas that were lost do not come back: {details}")


def runs(pid: int | None) -> bool:
    """Whether a process is there and neither stopped nor dead; None is one that has no number yet."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "TtZX"
    except OSError:
        return False
