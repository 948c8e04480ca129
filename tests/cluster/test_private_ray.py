"""A private Ray: no address that other machines can reach, no API key, and no access without its token."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from streams import STORY, descendants, free_port, read

pytest.importorskip("ray")
with warnings.catch_warnings(action="ignore"):  # of Ray's own
    import ray
    from ray._private.worker import global_worker
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    from onward.cluster.deployment import running
    from onward.cluster.options import DeployOptions

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

KEY, WRONG = "sk-the-secret-of-the-test", "sk-a-wrong-secret-of-the-test"
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    options = DeployOptions(replicas=2, threads=1, load={"pipeline": 2}, settings={"api_keys": [KEY]})
    with running(options, port=free_port()) as where:
        yield where


def test_nothing_listens_for_other_machines(url: str) -> None:
    """Not the ingress, which is this process, nor Ray, its replicas or their ranks."""
    ours = [os.getpid(), *descendants(os.getpid())]
    commands = b"\n".join(_command(pid) for pid in ours)
    for part in (b"gcs_server", b"raylet", b"ray::DashboardAgent", b"ray::ServeController", b"onward.distributed"):
        assert part in commands
    found = {pid: addresses for pid in ours if (addresses := listening(pid))}
    assert len(found) >= 8
    others = {_command(pid): far for pid, near in found.items() if (far := [at for at in near if at not in LOOPBACK])}
    assert not others


def test_a_listener_on_all_interfaces_is_detected() -> None:
    """The check above detects a violation."""
    program = "import socket; s = socket.create_server(('', 0)); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert listening(process.pid) == ["0.0.0.0"]
        process.communicate(b"\n")


def test_a_process_without_the_token_is_refused(url: str) -> None:
    assert read(_port(url), STORY | {"max_tokens": 2}, headers=_bearer(KEY)).is_whole
    address = ray.get_runtime_context().gcs_address
    program = f"import ray; ray.init('{address}', log_to_driver=False)"
    for mode in ("disabled", "token"):
        environment = os.environ | {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "0" * 64}
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray looks for another address than 127.0.0.1
        run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=90)
        assert run.returncode != 0
        assert b"Authentication" in run.stderr


def test_ray_stores_no_key(url: str) -> None:
    """In its memory (deployments with their arguments, jobs with their command lines), logs and command lines."""
    port = _port(url)
    assert read(port, STORY | {"max_tokens": 2}, headers=_bearer(KEY)).is_whole
    assert read(port, STORY, headers=_bearer(WRONG)).status == 401
    assert _get(f"{url}/metrics", KEY) == 200
    assert _get(f"{url}/metrics", WRONG) == 401
    texts = [_command(pid) for pid in descendants(os.getpid())]
    texts += [Path(f"/proc/{pid}/environ").read_bytes() for pid in descendants(os.getpid()) if pid in _alive()]
    for namespace in (None, b"serve", b"fun", b"job", b"dashboard", b"session", b"usage_stats", b"workflow"):
        for key in _internal_kv_list(b"", namespace=namespace):
            texts += [key, _internal_kv_get(key, namespace=namespace) or b""]
    assert any(b"Replica" in text for text in texts), "the deployments are there"
    jobs = global_worker.gcs_client.get_all_job_info(timeout=10)
    assert [job.entrypoint for job in jobs.values()] == ["onward"]
    logs = [file for file in Path(global_worker.node.get_session_dir_path()).rglob("*") if file.is_file()]
    assert len(logs) > 10
    texts += [file.read_bytes() for file in logs]
    for file in logs:
        assert Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent in file.parents, "where no other user can look"
    for text in texts:
        assert KEY.encode() not in text
        assert WRONG.encode() not in text


def test_clients_see_ids_without_process_details(url: str) -> None:
    body = json.dumps(STORY | {"stream": False, "max_tokens": 2}).encode()
    headers = {"Content-Type": "application/json"} | _bearer(KEY)
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers)) as answer:
        replica = answer.headers["x-onward-replica"]
    assert replica
    assert " " not in replica
    with urllib.request.urlopen(f"{url}/health") as answer:
        health = json.load(answer)
    assert replica in health["replicas"]
    assert set(health["replicas"].values()) == {"ok"}


def listening(pid: int) -> list[str]:
    """The addresses at which a process accepts TCP connections."""
    inodes = set()
    try:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    except OSError:  # it has ended
        return []
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *others = line.split()
            if state == "0A" and others[5] in inodes:
                found.append(_address(local.partition(":")[0]))
    return found


def _address(text: str) -> str:
    """An address as /proc/net has it: words of 32 bits in the machine's order."""
    import ipaddress

    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    raw = b"".join(words)
    address: Any = ipaddress.ip_address(raw)
    mapped = getattr(address, "ipv4_mapped", None)
    return f"::ffff:{mapped}" if mapped is not None else str(address)


def _alive() -> set[int]:
    return {int(pid) for pid in os.listdir("/proc") if pid.isdigit()}


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return b""


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _get(url: str, key: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=_bearer(key))) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
