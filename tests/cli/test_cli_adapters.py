"""--adapter: loaded under a name, and used by each command."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from command_line import Cli

import onward
from demo_adapters import demo_adapter


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("adapters")
    return {name: demo_adapter(place / name, at) for at, name in enumerate(("poet", "clerk"))}


def text_of(folder: Path | None, prompt: str) -> str:
    lm = onward.load("demo", adapters={} if folder is None else {"one": folder})
    return lm.generate(prompt, max_new_tokens=12, temperature=0, adapter=None if folder is None else "one").text


def adapter_flags(folders: dict[str, Path]) -> list[str]:
    return [word for name, folder in folders.items() for word in ("--adapter", f"{name}={folder}")]


SHORT = ("-n", "12", "-t", "0")


def test_generate_uses_the_first_adapter(cli: Cli, folders: dict[str, Path]) -> None:
    first = cli("generate", "The fox", *SHORT, *adapter_flags(folders))
    assert first.out.rstrip("\n") == text_of(folders["poet"], "The fox").rstrip("\n")


def test_chat_uses_the_first_adapter(cli: Cli, folders: dict[str, Path]) -> None:
    output = cli("chat", "demo", *SHORT, *adapter_flags(folders), input="Hi\n").out
    assert output != cli("chat", "demo", *SHORT, input="Hi\n").out


def test_batch_lines_select_adapters_as_models(cli: Cli, folders: dict[str, Path], tmp_path: Path) -> None:
    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = {
        name: {"model": name, "prompt": "The fox", "max_tokens": 12, "temperature": 0} for name in ("demo", *folders)
    }
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} for name, body in bodies.items()
    ]
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert cli("batch", str(source), str(results), *adapter_flags(folders)).code == 0
    for line in map(json.loads, results.read_text().splitlines()):
        answer = line["response"]["body"]
        assert answer["model"] == line["custom_id"]
        assert answer["choices"][0]["text"] == text_of(folders.get(line["custom_id"]), "The fox")


def test_score_uses_the_first_adapter(cli: Cli, folders: dict[str, Path]) -> None:
    lm = onward.load("demo", adapters=dict(folders))
    text = "The fox ran into the woods."
    for flags, name in ((adapter_flags(folders), "poet"), ([], None)):
        printed = json.loads(cli("score", text, "--json", *flags).out)
        assert printed["log_likelihood"] == lm.score(text, adapter=name).log_likelihood


def test_eval_uses_the_first_adapter(cli: Cli, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/integrations has the numbers, where the harness is installed."""
    import onward.cli.evaluate as command

    monkeypatch.setattr(command, "_harness", lambda: SimpleNamespace(simple_evaluate=lambda model, **_: model))
    monkeypatch.setattr(command, "version", lambda name: "1.0")
    harness = ModuleType("lm_eval")
    harness.evaluator = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "lm_eval", harness)
    tasks = ModuleType("lm_eval.tasks")
    tasks.TaskManager = lambda: SimpleNamespace(all_tasks=["a task"])
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    integration = ModuleType("onward.integrations.lm_eval")
    integration.OnwardLM = lambda lm, **options: {
        "results": {"adapters": list(lm.adapters), **options},
        "n-shot": {},
        "samples": {},
        "versions": {},
    }
    monkeypatch.setitem(sys.modules, "onward.integrations.lm_eval", integration)
    for flags, name in ((adapter_flags(folders), "poet"), ([], None)):
        results = json.loads(cli("eval", "a task", "--json", *flags).out)["results"]
        assert results == {"adapters": list(folders) if name else [], "batch_size": 8, "adapter": name, "seed": 0}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--adapter", "poet"], "--adapter must be NAME=SOURCE, such as poet=my-adapter; got 'poet'"),
        (["--adapter", "a=x", "--adapter", "a=y"], "--adapter has the name 'a' twice"),
    ],
)
def test_invalid_adapter_arguments_are_refused(cli: Cli, flags: list[str], message: str) -> None:
    result = cli("generate", "The fox", *flags)
    assert result.code == 2
    assert message in result.err
