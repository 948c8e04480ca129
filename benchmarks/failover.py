"""Streams whose replica is lost, at every token of a text: does the text change, and how long is the gap?

    python -m benchmarks.failover --faults idle opening prefill stream start   # how soon a death is noticed

    python -m benchmarks.failover                                   # the demo model
    python -m benchmarks.failover --source my-model --quantize int8 --ids --tokens 12

`onward deploy` runs three replicas of one thread each. A text is first read without a fault. Then, before its first
event and after each event (after some, if the text has more than 16), the replica that serves it is killed (SIGKILL),
stopped (SIGSTOP), or killed while all replicas are being replaced, up to 2 s after the replacement began. The ids and
logprobs of the text are compared. A gap is the longest time between two events after the fault. The text should take
longer than the fault: 2 s for the last kind. The exit code is 1 if a text differs.

The other faults kill the replica that has the beginning of the prompt in its cache, `--rounds` times each, while four
other streams run: "idle" before the request is sent, while its channel is open and unused; "opening" as the request is
sent, with no channel open; "prefill" while a prompt of 400 tokens is processed; "stream" in the middle of the text;
"start" in the middle of the first text of a new replica. The gap then includes the time to the first event.
"""

import argparse
import contextlib
import http.client
import itertools
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ray  # noqa: F401  (before onward.cluster, so that a missing one is named)
from ray import serve

from benchmarks.machine import description
from benchmarks.replicas import pid_of, wait_for_replicas
from onward.cluster.deployment import replicas_of, running
from onward.cluster.options import DeployOptions

REPLICAS = 3
SILENCE = 3.0
_DRAIN = 2.0  # seconds of a replacement in which replicas are killed
FAULTS = ("kill", "stop", "kill while draining")
STATES = ("idle", "opening", "prefill", "stream", "start")
_UNUSED = 7.0  # seconds after which an idle channel is closed
_OTHERS = 4  # streams that run at the same time as the measured one

Act = Callable[[int], None]  # is given the process of the replica


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="demo")
    parser.add_argument("--quantize")
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--ids", action="store_true", help="with token_ids: random weights write ids without text")
    parser.add_argument("--faults", nargs="+", choices=FAULTS + STATES, default=FAULTS)
    parser.add_argument("--rounds", type=int, default=6, help="of each of the faults " + ", ".join(STATES))
    arguments = parser.parse_args()
    load = {} if arguments.quantize is None else {"quantize": arguments.quantize}
    options = DeployOptions(
        source=arguments.source,
        replicas=REPLICAS,
        threads=1,
        load=load,
        retries={"silence": SILENCE, "quarantine": 0.0},
    )
    body = {"prompt": "Once upon a time", "max_tokens": arguments.tokens, "seed": 10, "temperature": 0.5}
    body |= {"stream": True, "logprobs": 1, "return_token_ids": arguments.ids}
    with running(options, port=0) as url:
        result = measured(url, options, body, [fault for fault in arguments.faults if fault in FAULTS])
        states = [fault for fault in arguments.faults if fault in STATES]
        result["faults"] |= {state: killed(url, body, state, arguments.rounds) for state in states}
    print(json.dumps({"machine": description(), "source": arguments.source, "quantize": arguments.quantize, **result}))
    sys.exit(any(fault["differ"] for fault in result["faults"].values()))


def measured(url: str, options: DeployOptions, body: dict[str, Any], faults: list[str]) -> dict[str, Any]:
    """The texts that differ and the gaps in milliseconds, for each fault."""
    wait_for_replicas(REPLICAS)
    expected = Reading(url, body)
    undisturbed = [Reading(url, body) for _ in range(5)]
    assert all(reading.received == expected.received for reading in undisturbed), (
        "nothing happened, and the text is another"
    )
    found: dict[str, Any] = {}
    for fault in faults:
        gaps, differ, too_late = [], 0, 0
        for at in range(0, len(expected.times), 1 + len(expected.times) // 17):
            wait_for_replicas(REPLICAS)
            act = _Replacement(options, _DRAIN * at / len(expected.times)) if "draining" in fault else _ACTS[fault]
            got = Reading(url, body, at, act)
            if isinstance(act, _Replacement):
                act.join()
            differ += got.received != expected.received
            if got.acted:
                gaps.append(got.gap * 1e3)
            else:
                too_late += 1
        if not gaps:
            raise SystemExit(f"{fault}: every text was whole before the fault could come")
        found[fault] = {"whole_before": too_late, **_summary(gaps, differ)}
    gap = max(reading.gap for reading in undisturbed)
    return {
        "events": len(expected.times),
        "silence_s": SILENCE,
        "undisturbed_gap_ms": round(gap * 1e3),
        "faults": found,
    }


def killed(url: str, body: dict[str, Any], state: str, rounds: int) -> dict[str, Any]:
    """Kill the replica that serves a body while it is in a given state; see the module's docstring."""
    gaps, differ, loads = [], 0, []
    for turn in range(rounds):
        wait_for_replicas(REPLICAS)
        prompt = f"{turn} {body['prompt']}" + " there was a little girl" * (80 if state == "prefill" else 0)
        asked = {**body, "prompt": prompt, "max_tokens": 80}
        expected = Reading(url, asked)
        if state == "start":
            _end(expected.pid)
            wait_for_replicas(REPLICAS)
            expected = Reading(url, asked)
        time.sleep(_UNUSED if state == "opening" else 0.0)
        others = [threading.Thread(target=Reading, args=[url, {**asked, "prompt": str(at)}]) for at in range(_OTHERS)]
        for thread in others:
            thread.start()
        loads.append(os.getloadavg()[0])
        got = _killed_reading(url, asked, state, expected.pid)
        for thread in others:
            thread.join()
        differ += got.received != expected.received
        gaps.append(got.gap * 1e3)
    return {**_summary(gaps, differ), "load_average": {"least": round(min(loads), 1), "most": round(max(loads), 1)}}


def _killed_reading(url: str, body: dict[str, Any], state: str, pid: int) -> "Reading":
    """Read a stream whose replica is killed. pid: of the replica that has its beginning in the cache."""
    if state in ("stream", "start"):
        return Reading(url, body, 20, _end)
    if state == "idle":
        _end(pid)
        return Reading(url, body)
    timer = threading.Timer(0.0 if state == "opening" else 0.02, _end, [pid])
    timer.start()
    return Reading(url, body)


def _summary(gaps: list[float], differ: int) -> dict[str, Any]:
    return {
        "texts": len(gaps),
        "differ": differ,
        "gap_ms": {"median": round(statistics.median(gaps)), "most": round(max(gaps))},
    }


class Reading:
    """A stream, read to its end.

    at: the number of events after which `act` is called with the id of the process that serves the stream.
    received: the tokens with their logprobs, the ids, and the end.
    times: the times of the events. gap: the longest time between two events after `act`, in seconds.
    pid: the process of the replica that started the stream.
    acted: whether `act` was called; it isn't if events have several tokens and are fewer than `at`.
    """

    def __init__(self, url: str, body: dict[str, Any], at: int | None = None, act: Act | None = None) -> None:
        self.received: tuple[list[Any], list[int], list[Any]] = [], [], []
        self.times: list[float] = []
        connection = http.client.HTTPConnection(url.removeprefix("http://").partition("/")[0], timeout=120)
        since = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        replica = answer.getheader("x-onward-replica")
        self.pid = pid_of(replica) if replica else 0
        while True:
            if len(self.times) == at and act is not None:
                act(self.pid)
                since, act = time.perf_counter(), None
            line = answer.readline()
            if not line or line == b"data: [DONE]\n":
                break
            if line.startswith(b"data: "):
                self.times.append(time.perf_counter())
                self._note(json.loads(line[6:]))
        connection.close()
        self.acted = act is None
        times = [since, *(moment for moment in self.times if moment > since)]
        self.gap = max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)

    def _note(self, event: dict[str, Any]) -> None:
        """The tokens one by one, independent of their division into events."""
        (choice,) = event.get("choices") or [event]
        logprobs = choice.get("logprobs") or {"token_logprobs": [], "tokens": []}
        tokens, ids, ends = self.received
        tokens += zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
        ids += choice.get("token_ids") or ()
        ends += [choice["error"]] if "error" in choice else filter(None, [choice["finish_reason"]])


class _Replacement:
    """Replace all replicas by new ones, and kill the serving replica some seconds later."""

    def __init__(self, options: DeployOptions, after: float) -> None:
        settings = {"limits": {"prompts": 200 + next(_settings)}}
        self._new = replicas_of(DeployOptions(**{**vars(options), "settings": settings}))
        self._after = after
        self._threads: list[threading.Thread] = []

    def __call__(self, pid: int) -> None:
        run = lambda: serve.run(self._new, name="onward", route_prefix=None, blocking=False)  # noqa: E731
        self._threads = [threading.Thread(target=run), threading.Timer(self._after, _end, [pid])]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


_settings = iter(range(10**9))


def _stop(pid: int) -> None:
    """Stop a process, and kill it once it counts as lost, so that another process can take its place."""
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(SILENCE + 1.0, _end, [pid]).start()


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


_ACTS: dict[str, Act] = {"kill": _end, "stop": _stop}


if __name__ == "__main__":
    main()
