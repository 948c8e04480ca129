"""The flags for structured output."""

import json
from pathlib import Path

from command_line import Cli

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 5}}, "required": ["n"]}


def test_texts_follow_the_constraint_flags(cli: Cli, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "s.json", tmp_path / "g.lark"
    schema.write_text(json.dumps(SCHEMA | {"additionalProperties": False}))
    grammar.write_text('start: "a fox" | "an owl"\n')
    output = cli("generate", "Once", "-t", "1", "--json-schema", str(schema)).out
    assert 3 <= json.loads(output)["n"] <= 5
    assert cli("generate", "Once", "--grammar", str(grammar)).out.strip() in ("a fox", "an owl")
    assert cli("generate", "Once", "--regex", "x{4}").out.strip() == "xxxx"
    assert cli("generate", "Once", "--choice", "yes", "--choice", "no").out.strip() in ("yes", "no")


def test_batch_lines_have_their_own_constraints(cli: Cli, tmp_path: Path) -> None:
    forms = [{"choice": ["yes", "no"]}, {"regex": "("}, {"regex": "b"}]
    lines = [
        {"custom_id": str(at), "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once"} | form}
        for at, form in enumerate(forms)
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert cli("batch", str(source), str(out)).code == 2
    first, second, third = (json.loads(line)["response"]["body"] for line in out.read_text().splitlines())
    assert first["choices"][0]["text"] in ("yes", "no")
    assert "cannot be compiled" in second["error"]["message"]
    assert third["choices"][0]["text"] == "b"


def test_invalid_constraints_are_one_line(cli: Cli, tmp_path: Path) -> None:
    broken, latin = tmp_path / "broken.json", tmp_path / "latin.lark"
    broken.write_text("{")
    latin.write_bytes(b"start: \xe9")
    for flags, message in (
        (("--regex", "("), "cannot be compiled"),
        (("--regex", "a", "--choice", "b"), "regex and choice are mutually exclusive"),
        (("--json-schema", str(broken)), "is not a JSON Schema: Expecting"),
        (("--json-schema", str(tmp_path / "none")), "cannot be read: No such file"),
        (("--grammar", str(latin)), "byte 7 (0xe9) is out of place"),
    ):
        result = cli("generate", "Once", *flags)
        assert (result.code, result.out) == (2, "")
        assert message in result.err
        assert result.err.count("\n") == 1
