"""docs/observability.md lists exactly the metrics and log fields that a server writes."""

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from live_server import LiveServer

import onward

PAGE = (Path(__file__).parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")
Start = Callable[..., LiveServer]
Metric = tuple[str, str, frozenset[str]]  # name, type, labels


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def documented_metrics(text: str) -> set[Metric]:
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in text.splitlines() if line.startswith("| `")]
    return {(name.strip("`"), kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def exposed_metrics(text: str) -> set[Metric]:
    """The metrics of an exposition in Prometheus' text format. A histogram is named without its suffixes."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    labels: dict[str, set[str]] = defaultdict(set)
    for name, pairs in re.findall(r"^(\w+)(?:\{(.*)\})? ", text, re.MULTILINE):
        family = name if name in kinds else re.sub("_(bucket|count|sum)$", "", name)
        labels[family] |= set(re.findall(r'(\w+)="', pairs)) - {"le"}
    return {(name, kind, frozenset(labels[name])) for name, kind in kinds.items()}


def run_batch(server: LiveServer) -> None:
    with server.openai() as client:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "A", "max_tokens": 1}}
        file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        while client.batches.retrieve(batch.id).status != "completed":
            time.sleep(0.01)


def test_the_page_lists_every_metric(start: Start, lm: onward.LanguageModel) -> None:
    server = start({"demo": lm})
    assert server.post("/v1/completions", {"prompt": "Once", "max_tokens": 2}).status_code == 200
    assert server.post("/v1/completions", {"prompt": "Once", "max_tokens": -2}).status_code == 400
    run_batch(server)
    server.wait_idle()
    of_one_server, of_deployments = section("All metrics").split("With `onward deploy`")
    assert documented_metrics(of_one_server) == exposed_metrics(server.get("/metrics").text)
    names = {name for name, _, _ in documented_metrics(of_deployments)}
    assert names == {"onward_replicas", "onward_replicas_unreachable"}  # tests/cluster/test_state.py reads these


def test_the_page_lists_every_field_of_the_log(
    start: Start, lm: onward.LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    server = start({"demo": lm}, access_log=True, log_prompts=True, ignore_unsupported=True)
    with caplog.at_level("INFO", logger="onward.server"):
        server.post("/v1/completions", {"prompt": "Once", "max_tokens": 2, "store": True})
        server.post("/v1/completions", {"prompt": "Once", "max_tokens": -2})
        run_batch(server)
        server.wait_idle()
        end = time.monotonic() + 30
        while not any('"batch ended"' in record.getMessage() for record in caplog.records):
            assert time.monotonic() < end
            time.sleep(0.01)
    logged = {name for record in caplog.records for name in json.loads(record.getMessage())}
    rows = [line.split("|")[1:3] for line in section("Read the log").splitlines() if line.startswith("| `")]
    documented = {name: where.strip() for names, where in rows for name in re.findall(r"`(\w+)`", names)}
    assert logged == {name for name, where in documented.items() if where != "`onward deploy`"}
    assert {"replica", "retries", "host", "pid"} == documented.keys() - logged
