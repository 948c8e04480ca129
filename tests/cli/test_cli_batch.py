"""A batch in OpenAI's format: each line equals a request alone, and a stopped run continues."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import ENVIRONMENT, PROGRAM, Cli

import onward
from onward.errors import EngineError
from onward.protocols import ParsedBody
from onward.protocols.chat import ChatCompletions
from onward.util.text_input import LONGEST_LINE

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 8} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"prompt": "Once upon a time", "max_tokens": 8} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write(file: Path, *lines: Any) -> Path:
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


def results(file: Path) -> dict[str | None, dict[str, Any]]:
    """By custom_id; each is there once."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    assert all(set(line) == {"id", "custom_id", "response", "error"} for line in lines)
    return {line["custom_id"]: line for line in lines}


def body(result: dict[str, Any]) -> dict[str, Any]:
    assert result["error"] is None
    assert result["response"]["status_code"] == 200, result
    answer: dict[str, Any] = result["response"]["body"]
    return answer


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in answer["choices"]]


@pytest.mark.parametrize("limits", [(), ("--max-sequences", "4", "--max-waiting", "1", "--max-step-ms", "1")], ids=len)
def test_each_line_equals_the_request_alone(
    cli: Cli, loaded: onward.LanguageModel, tmp_path: Path, limits: tuple[str, ...]
) -> None:
    of_chats = {
        "seeded": {"temperature": 0.9, "seed": 7},
        "greedy": {"temperature": 0},
        "several": {"n": 3, "seed": 2, "temperature": 1.0},
        "stopped": {"seed": 1, "stop": ["e"], "max_tokens": 40},
        "biased": {"seed": 1, "logit_bias": {"1541": -100}, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        "ours": {"seed": 5, "top_k": 5, "repetition_penalty": 1.2},
        "beams": {"beams": 3, "n": 2},
    }
    lines = [chat(name, **options) for name, options in of_chats.items()]
    lines.append(completion("prompts", prompt=["The fox", "The owl", "A dwarf"], seed=3, n=2))
    lines.append(completion("ids", prompt=loaded.encode("The end"), temperature=0))
    source, out = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    run = cli("batch", str(source), str(out), *limits)
    assert (run.code, run.err) == (0, "")
    assert run.out.startswith(f"{len(lines)} lines: {len(lines)} served, 0 failed · ")
    answers = {name: body(result) for name, result in results(out).items()}
    for name, fields in of_chats.items():
        options = {"max_new_tokens": fields.pop("max_tokens", 8)} | fields
        if "logit_bias" in options:
            options["logit_bias"] = {1541: -100}
        alone = loaded.chat(MESSAGES, **options)
        assert texts(answers[name]) == [choice.text for choice in alone.choices], name
        reasons = [choice["finish_reason"] for choice in answers[name]["choices"]]
        assert reasons == [choice.finish_reason for choice in alone.choices]
        assert answers[name]["usage"]["completion_tokens"] == sum(len(one.token_ids) for one in alone.choices)
        assert answers[name]["seed"] == alone.seed
    several = loaded.generate(["The fox", "The owl", "A dwarf"], seed=3, n=2, max_new_tokens=8)
    assert texts(answers["prompts"]) == [choice.text for one in several for choice in one.choices]
    assert [choice["index"] for choice in answers["prompts"]["choices"]] == list(range(6))
    assert texts(answers["ids"]) == [loaded.generate("The end", temperature=0, max_new_tokens=8).text]


def test_a_line_without_a_seed_reports_its_seed(cli: Cli, loaded: onward.LanguageModel, tmp_path: Path) -> None:
    wide = {"temperature": 1.5, "top_p": 1.0}
    asked = {"one": chat("one", **wide), "same": chat("same", **wide)}
    asked["prompts"] = completion("prompts", prompt=["The fox", "The owl"], **wide)
    first, again = tmp_path / "first.jsonl", tmp_path / "again.jsonl"
    assert cli("batch", str(write(tmp_path / "in.jsonl", *asked.values())), str(first)).code == 0
    drawn = {name: body(result) for name, result in results(first).items()}
    assert len({answer["seed"] for answer in drawn.values()}) == 3
    for name, line in asked.items():
        line["body"]["seed"] = drawn[name]["seed"]
    assert cli("batch", str(write(tmp_path / "in.jsonl", *asked.values())), str(again)).code == 0
    for name, result in results(again).items():
        assert texts(body(result)) == texts(drawn[str(name)])


def test_a_line_without_a_length_uses_the_flag(cli: Cli, loaded: onward.LanguageModel, tmp_path: Path) -> None:
    lines = [completion("open", max_tokens=None, ignore_eos=True), completion("given", max_tokens=2)]
    out = tmp_path / "out.jsonl"
    cli("batch", str(write(tmp_path / "in.jsonl", *lines)), str(out), "-n", "5")
    lengths = {name: body(result)["usage"]["completion_tokens"] for name, result in results(out).items()}
    assert lengths == {"open": 5, "given": 2}


def test_the_model_name_matches_the_lines(cli: Cli, loaded: onward.LanguageModel, tmp_path: Path) -> None:
    lines = [chat("ours", model="gpt-4o-mini"), chat("none", model=None), chat("theirs", model="gpt-5")]
    out = tmp_path / "out.jsonl"
    run = cli("batch", str(write(tmp_path / "in.jsonl", *lines)), str(out), "--model-name", "gpt-4o-mini")
    ours, none, theirs = (results(out)[name] for name in ("ours", "none", "theirs"))
    assert body(ours)["model"] == body(none)["model"] == "gpt-4o-mini"
    assert theirs["response"]["status_code"] == 404
    assert theirs["response"]["body"]["error"]["code"] == "model_not_found"
    assert (run.code, run.err) == (2, f"error: 1 of 3 lines failed: their results in '{out}' say why\n")


def test_a_bad_line_is_an_error_and_the_others_continue(cli: Cli, loaded: onward.LanguageModel, tmp_path: Path) -> None:
    bad = {
        "{": "invalid_json_line",
        "\udcff": "invalid_json_line",
        "[1]": "invalid_json_line",
        '{"custom_id": "nan", "body": NaN}': "invalid_json_line",
        '{"custom_id": "half", "body": {"prompt": "\\ud800"}}': "invalid_json_line",
        "[" * 900: "invalid_json_line",
        "9" * 5000: "invalid_json_line",
        "x" * (LONGEST_LINE + 10): "invalid_json_line",
        json.dumps(chat("first", seed=5)): "duplicate_custom_id",
        json.dumps(chat("") | {"custom_id": 5}): "missing_required_parameter",
        json.dumps(chat("get") | {"method": "GET"}): "invalid_method",
        json.dumps(chat("url") | {"url": "/v1/images"}): "invalid_url",
        '{"custom_id": "empty", "method": "POST", "url": "/v1/completions"}': "missing_required_parameter",
    }
    source = tmp_path / "in.jsonl"
    content = "\n".join(["", json.dumps(chat("first")), *bad, json.dumps(chat("last"))])
    source.write_bytes(content.encode("utf-8", "surrogateescape"))
    out = tmp_path / "out.jsonl"
    run = cli("batch", str(source), str(out))
    assert run.code == 2
    assert run.out.startswith("15 lines: 2 served, 13 failed")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["custom_id"] for line in lines if line["error"] is None} == {"first", "last"}
    errors = {line["error"]["line"]: line["error"] for line in lines if line["error"] is not None}
    assert [errors[number]["code"] for number in range(3, 16)] == list(bad.values())
    assert all(error["message"].startswith(f"line {number}: ") for number, error in errors.items())
    assert all(line["response"] is None for line in lines if line["error"] is not None)


def test_a_text_without_admissible_ids_fails_alone(cli: Cli, loaded: onward.LanguageModel, tmp_path: Path) -> None:
    """Bans that leave no id show only while the text runs."""
    every = [[token] for token in range(loaded.model.vocab_size)]
    lines = [chat("good", temperature=0), completion("bad", prompt=["a", "b"], bad_words=every)]
    out = tmp_path / "out.jsonl"
    run = cli("batch", str(write(tmp_path / "in.jsonl", *lines)), str(out))
    assert (run.code, run.err) == (2, f"error: 1 of 2 lines failed: their results in '{out}' say why\n")
    assert body(results(out)["good"])
    assert results(out)["bad"]["response"]["status_code"] == 400


def test_an_unexpected_error_fails_its_line_alone(
    cli: Cli, loaded: onward.LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(ids: object, text: str) -> bool:
        raise MemoryError("no room")

    submit = onward.Engine.submit

    def submit_one_that_fails(engine: onward.Engine, request: onward.Request, **options: Any) -> onward.Generation:
        return submit(engine, request.replace(stop_when=fails) if request.options.seed == 13 else request, **options)

    monkeypatch.setattr(onward.Engine, "submit", submit_one_that_fails)
    lines = [chat("first"), chat("bad", seed=13), chat("last")]
    out = tmp_path / "out.jsonl"
    assert cli("batch", str(write(tmp_path / "in.jsonl", *lines)), str(out)).code == 2
    answers = results(out)
    assert body(answers["first"])
    assert body(answers["last"])
    assert answers["bad"]["response"]["status_code"] == 500
    message = answers["bad"]["response"]["body"]["error"]["message"]
    assert message == "the request failed: MemoryError: no room"


def test_an_answer_that_json_cannot_represent_fails_alone(
    cli: Cli, loaded: onward.LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = ChatCompletions.answer

    def answer_one_with_nan(self: ChatCompletions, read: ParsedBody, *rest: Any) -> dict[str, Any]:
        return answer(self, read, *rest) | ({"seed": math.nan} if read.seed == 13 else {})

    monkeypatch.setattr(ChatCompletions, "answer", answer_one_with_nan)
    out = tmp_path / "out.jsonl"
    assert cli("batch", str(write(tmp_path / "in.jsonl", chat("bad", seed=13), chat("good"))), str(out)).code == 2
    assert body(results(out)["good"])
    assert results(out)["bad"]["response"]["status_code"] == 500


def test_rerunning_the_command_serves_only_unfinished_lines(
    cli: Cli, loaded: onward.LanguageModel, tmp_path: Path
) -> None:
    lines = [chat(f"line {number}", seed=number) for number in range(5)]
    lines.append(completion("long", prompt="word " * 2000))
    source, out, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    assert cli("batch", str(write(source, *lines)), str(whole)).code == 2
    cli("batch", str(write(source, *lines[:2], lines[5])), str(out))
    before = [line for line in out.read_text().splitlines() if '"custom_id": "line ' in line]
    assert len(before) == 2
    with out.open("a") as content:
        content.write('{"id": "batch_req_1", "custom_id": "line 3", "respon')  # a kill in the middle of a line
    out.chmod(0o640)
    lines[5]["body"]["prompt"] = "a shorter one"
    run = cli("batch", str(write(source, *lines)), str(out))
    assert run.code == 0
    assert run.out.startswith("6 lines: 2 done before, 4 served, 0 failed")
    assert out.read_text().splitlines()[:2] == before
    assert out.stat().st_mode & 0o777 == 0o640
    answers = results(out)
    assert set(answers) == {line["custom_id"] for line in lines}
    for name, result in results(whole).items():
        if name != "long":
            assert texts(body(result)) == texts(body(answers[name]))
    done = out.read_bytes()
    assert cli("batch", str(source), str(out)).out.startswith("6 lines: 6 done before, 0 served, 0 failed")
    assert out.read_bytes() == done


def test_results_depend_only_on_the_lines(cli: Cli, loaded: onward.LanguageModel, tmp_path: Path) -> None:
    """Bytes: ids, seeds and times follow from the lines, whose order is that of the results."""
    lines = [completion(f"{at}", max_tokens=30 - at) for at in range(12)]
    lines[5] = chat("tools", temperature=0)
    source = write(tmp_path / "in.jsonl", *lines[:6], "{", *lines[6:])
    first, second, third = (tmp_path / name for name in ("first.jsonl", "second.jsonl", "third.jsonl"))
    cli("batch", str(source), str(first))
    cli("batch", str(source), str(second), "--max-sequences", "1")
    third.write_bytes(b"".join(first.read_bytes().splitlines(keepends=True)[7:3:-1]))  # as a kill might leave it
    cli("batch", str(source), str(third), "--max-sequences", "3")
    assert first.read_bytes() == second.read_bytes() == third.read_bytes()
    found = [json.loads(line)["custom_id"] for line in first.read_text().splitlines()]
    assert found == [*(line["custom_id"] for line in lines[:6]), None, *(line["custom_id"] for line in lines[6:])]


def test_a_changed_line_is_served_again(cli: Cli, loaded: onward.LanguageModel, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    command = ("batch", str(source), str(out))
    write(source, completion("a"), completion("b"))
    cli(*command)
    before = results(out)
    write(source, completion("a"), completion("b", max_tokens=3))
    assert cli(*command).out.startswith("2 lines: 1 done before, 1 served")
    assert results(out)["a"] == before["a"]
    assert body(results(out)["b"])["usage"]["completion_tokens"] == 3
    assert cli(*command, "-n", "5").out.startswith("2 lines: 2 served"), "other settings are another model"


def test_a_result_without_its_newline_is_complete(cli: Cli, loaded: onward.LanguageModel, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", chat("a"), chat("b")), tmp_path / "out.jsonl"
    cli("batch", str(source), str(out))
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(lines[0].rstrip(b"\n"))
    assert cli("batch", str(source), str(out)).out.startswith("2 lines: 1 done before, 1 served")
    assert out.read_bytes().splitlines(keepends=True)[0] == lines[0]
    assert len(results(out)) == 2


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what runs in its background deaf to interrupts, and its children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)], ids=str)
def test_a_stopped_run_resumes(
    cli: Cli, loaded: onward.LanguageModel, tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    lines = [completion(f"{at}", seed=at, max_tokens=100 if at > 5 else 5, ignore_eos=True) for at in range(24)]
    source, out = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    command, parts = [*PROGRAM, "batch", str(source), str(out), "--max-sequences", "2"], tmp_path / "out.jsonl.parts"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as run:
        deadline = time.monotonic() + 120
        while b"".join(file.read_bytes() for file in parts.glob("*.jsonl")).count(b"\n") < 3:
            assert run.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        run.send_signal(sent)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == code
    assert b"Traceback" not in errors
    assert not out.exists()
    before = b"".join(file.read_bytes() for file in parts.glob("*.jsonl"))
    whole_lines = before[: before.rfind(b"\n") + 1]
    done = whole_lines.count(b"\n")
    assert 3 <= done < 24, "a line is on the disk as soon as it is served"
    assert cli("batch", str(source), str(out)).out.startswith(f"24 lines: {done} done before, {24 - done} served")
    assert set(whole_lines.splitlines()) <= set(out.read_bytes().splitlines())
    assert not parts.exists()
    answers = results(out)
    assert len(answers) == 24
    for at in (0, 5, 23):
        options = {"seed": at, "max_new_tokens": lines[at]["body"]["max_tokens"], "ignore_eos": True}
        assert texts(body(answers[str(at)])) == [loaded.generate("Once upon a time", **options).text]


def test_an_engine_failure_ends_the_batch(
    cli: Cli, loaded: onward.LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise EngineError("the engine has failed: no memory")

    monkeypatch.setattr(onward.Engine, "submit", fail)
    source, out = write(tmp_path / "in.jsonl", chat("a"), chat("b")), tmp_path / "out.jsonl"
    assert cli("batch", str(source), str(out)) == (2, "", "error: the engine has failed: no memory\n")
    assert list(tmp_path.iterdir()) == [source]


def test_a_full_disk_is_a_one_line_error(cli: Cli, loaded: onward.LanguageModel, tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("a device of Linux")
    run = cli("batch", str(write(tmp_path / "in.jsonl", chat("a"))), "/dev/full")
    assert (run.code, run.err) == (2, "error: the results cannot be written to '/dev/full': No space left on device\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.jsonl", "out.jsonl"), "'none.jsonl' cannot be read: No such file"),
        ((".", "notes.txt"), "'.' is a folder, but 'notes.txt' is not"),
        (("in.jsonl", "out.jsonl", "--replicas", "0"), "--replicas must be a whole number of 1 or more"),
        (("in.jsonl", "out.jsonl", "--address", "here:1"), "--address needs --replicas"),
        (("in.jsonl", "in.jsonl"), "is the batch itself"),
        (("in.jsonl", "link.jsonl"), "is the batch itself"),
        (("in.jsonl", "no/folder/out.jsonl"), "cannot be written to"),
        (("in.jsonl", "."), "'in.jsonl' is a file, but '.' is not"),
        (("in.jsonl", "/"), "'in.jsonl' is a file, but '/' is not"),
        (("in.jsonl", "o" * 300), "cannot be written to"),
        (("in.jsonl", "notes.txt"), "line 1 of 'notes.txt' is not a batch result"),
        (("in.jsonl", "data.json"), "line 1 of 'data.json' is not a batch result"),
        (("in.jsonl", "other.jsonl"), "has no custom_id 'other'"),
        (("in.jsonl", "double.jsonl"), "two results for custom_id 'a'"),
        (("in.jsonl", "done.jsonl", "--max-sequences", "0"), "--max-sequences must be"),
        (("in.jsonl", "out.jsonl", "--max-sequences", "0"), "--max-sequences must be"),
        (("in.jsonl", "out.jsonl", "--cache-memory", "0"), "--cache-memory must be"),
        (("in.jsonl", "out.jsonl", "--cache-memory", "nan"), "--cache-memory must be"),
        (("in.jsonl", "out.jsonl", "--cache-memory", "1e-9"), "--cache-memory must be at least one block"),
        (("in.jsonl", "out.jsonl", "--overcommit", "0.5"), "overcommit must be"),
        (("in.jsonl", "out.jsonl", "-n", "-1"), "--max-new-tokens must be"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_user_errors_are_one_line_and_change_no_file(
    cli: Cli,
    loaded: onward.LanguageModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("in.jsonl"), chat("a"))
    os.symlink("in.jsonl", "link.jsonl")
    write(Path("twice.jsonl"), chat("a"), "{", chat("a"))
    Path("notes.txt").write_text("dear diary\n" * 3)
    Path("data.json").write_text("{}\n")
    result = {"id": "1", "custom_id": "other", "response": {"status_code": 200, "body": {}}, "error": None}
    write(Path("other.jsonl"), result)
    write(Path("double.jsonl"), result | {"custom_id": "a"}, result | {"custom_id": "a"})
    write(Path("done.jsonl"), result | {"custom_id": "a"})
    files = {file: file.read_bytes() for file in Path().iterdir()}
    run = cli("batch", *arguments)
    assert (run.code, run.out, run.err.count("\n")) == (2, "", 1)
    assert message in run.err
    assert {file: file.read_bytes() for file in Path().iterdir()} == files


def test_an_empty_batch_succeeds(cli: Cli, loaded: onward.LanguageModel, tmp_path: Path) -> None:
    run = cli("batch", str(write(tmp_path / "in.jsonl", "")), str(tmp_path / "out.jsonl"))
    assert (run.code, run.out.partition(" ·")[0]) == (0, "0 lines: 0 served, 0 failed")


def test_a_batch_needs_neither_ray_nor_a_web_framework(tmp_path: Path) -> None:
    """In a process where they cannot be imported."""
    source, out = write(tmp_path / "in.jsonl", chat("a")), tmp_path / "out.jsonl"
    absent = ("ray", "pyarrow", "fastapi", "starlette", "uvicorn", "prometheus_client")
    program = f"import sys; sys.modules.update(dict.fromkeys({absent})); from onward.cli.main import main; main()"
    command = [sys.executable, "-c", program, "batch", str(source), str(out)]
    run = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")
    assert body(results(out)["a"])


def test_a_folder_of_files_is_accepted(cli: Cli, loaded: onward.LanguageModel, tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    write(source / "one.jsonl", chat("a"), chat("b"))
    write(source / "two.jsonl", chat("c"))
    run = cli("batch", str(source), str(out))
    assert (run.code, run.out.partition(" ·")[0]) == (0, "3 lines: 3 served, 0 failed")
    assert set(results(out / "one.jsonl")) == {"a", "b"}
    assert json.loads((out / "_manifest.json").read_text())["files"] == {"one.jsonl": 2, "two.jsonl": 1}
