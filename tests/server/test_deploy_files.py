"""The files in deploy/ use existing flags and metrics. `make lint-deploy` checks them with their own tools."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from live_server import LiveServer

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted(DEPLOY.glob("grafana/dashboards/*.json"))
UNIT = (DEPLOY / "onward@.service").read_text()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())


def commands() -> dict[str, list[str]]:
    """The arguments of `onward serve` in each file."""
    [unit] = re.findall(r"^ExecStart=\S+/onward serve (.+)$", UNIT, re.MULTILINE)
    [entry] = re.findall(r"^ENTRYPOINT (.+)$", DOCKERFILE, re.MULTILINE)
    program, verb, *words = json.loads(entry)
    assert (program, verb) == ("onward", "serve")
    return {"unit": unit.split(), "image": words, "compose": [*words, *COMPOSE["services"]["onward"]["command"]]}


def expressions() -> list[str]:
    """Every PromQL expression, of rules, panels and variables."""
    rules = [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]
    assert rules
    assert DASHBOARDS
    for board in map(load, DASHBOARDS):
        rules += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
        rules += [variable["definition"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    return rules


def load(dashboard: Path) -> dict[str, Any]:
    return json.loads(dashboard.read_text())


@pytest.mark.parametrize("where", ["unit", "image", "compose"])
def test_flags_exist(where: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "onward", "serve", "--help"], capture_output=True, text=True, check=True
    )
    flags = {word.split("=")[0] for word in commands()[where] if word.startswith("-")}
    assert flags
    assert flags <= set(re.findall(r"--[a-z-]+", shown.stdout))


def test_metrics_and_their_labels_exist(server: LiveServer) -> None:
    body = {"prompt": "The fox", "max_tokens": 4, "ignore_eos": True}
    assert server.post("/v1/completions", body).status_code == 200
    assert server.post("/v1/completions", {"prompt": "x", "model": "none"}).status_code == 404
    server.wait_idle()
    # Suffixes that Prometheus adds, and the metric that it creates itself.
    labels: dict[str, set[str]] = {"up": {"job", "instance"}}
    for line in server.get("/metrics").text.splitlines():
        if found := re.match(r"(onward_\w+)(?:\{(.*)\})? ", line):
            labels.setdefault(found[1], {"job", "instance"}).update(re.findall(r'(\w+)="', found[2] or ""))
    for expression in expressions():
        metrics = re.findall(r"\b(onward_\w+|up)\b", expression)
        assert metrics, expression
        assert set(metrics) <= set(labels), expression
        used = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", expression))
        used |= {name.strip() for names in re.findall(r"\bby \(([^)]*)\)", expression) for name in names.split(",")}
        assert used <= set.union(*(labels[metric] for metric in metrics)), expression


def test_expressions_of_alerts_preserve_the_labels_they_show() -> None:
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            shown = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
            grouped = re.search(r"\bby \(([^)]*)\)", rule["expr"])
            assert not grouped or shown <= {name.strip() for name in grouped[1].split(",")}, rule["alert"]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.name)
def test_panels_neither_overlap_nor_lack_a_unit(dashboard: Path) -> None:
    panels = load(dashboard)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == len({panel["title"] for panel in panels})
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_the_server_may_drain_before_it_is_killed() -> None:
    """Draining, ten seconds more (docs/serving.md), and then the service manager may lose patience."""

    def drain(words: list[str]) -> float:
        return float(words[words.index("--drain") + 1])

    [stop] = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert float(stop) > drain(commands()["unit"]) + 10
    grace = COMPOSE["services"]["onward"]["stop_grace_period"]
    assert float(grace.removesuffix("s")) > drain(commands()["compose"]) + 10


def test_prometheus_sends_the_servers_key() -> None:
    [job] = PROMETHEUS["scrape_configs"]
    key = job["authorization"]["credentials_file"]
    words = commands()["compose"]
    assert words[words.index("--api-key-file") + 1] == key
    for name in ("onward", "prometheus"):
        assert Path(key).name in COMPOSE["services"][name]["secrets"]
    [[target]] = [part["targets"] for part in job["static_configs"]]
    host, port = target.split(":")
    assert host in COMPOSE["services"]
    assert words[words.index("--port") + 1] == port


def test_files_mounted_by_compose_exist() -> None:
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]


def test_no_container_or_service_runs_as_root() -> None:
    [*users] = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    assert users
    assert users[-1] != "0"
    assert "DynamicUser=yes" in UNIT
