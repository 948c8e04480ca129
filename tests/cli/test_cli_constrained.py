"""The flags that say what form a text has."""

import json
from pathlib import Path

from command_line import Cli

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 5}}, "required": ["n"]}


def test_a_text_has_the_form_that_flags_ask_for(cli: Cli, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "s.json", tmp_path / "g.lark"
    schema.write_text(json.dumps(SCHEMA | {"additionalProperties": False}))
    grammar.write_text('start: "a fox" | "an owl"\n')
    said = cli("generate", "Once", "-t", "1", "--json-schema", str(schema)).out
    assert 3 <= json.loads(said)["n"] <= 5
    assert cli("generate", "Once", "--grammar", str(grammar)).out.strip() in ("a fox", "an owl")
    assert cli("generate", "Once", "--regex", "x{4}").out.strip() == "xxxx"
    assert cli("generate", "Once", "--choice", "yes", "--choice", "no").out.strip() in ("yes", "no")


def test_lines_have_forms_of_their_own(cli: Cli) -> None:
    lines = [
        {"prompt": "Once", "choice": ["yes", "no"]},
        {"prompt": "Once", "regex": "("},
        {"prompt": "a", "regex": "b"},
    ]
    result = cli("generate", "--jsonl", "-", input="".join(json.dumps(line) + "\n" for line in lines))
    first, second, third = map(json.loads, result.out.splitlines())
    assert first["text"] in ("yes", "no")
    assert "cannot be compiled" in second["error"]
    assert third["text"] == "b"


def test_bad_forms_are_one_line(cli: Cli, tmp_path: Path) -> None:
    broken, latin = tmp_path / "broken.json", tmp_path / "latin.lark"
    broken.write_text("{")
    latin.write_bytes(b"start: \xe9")
    for flags, message in (
        (("--regex", "("), "cannot be compiled"),
        (("--regex", "a", "--choice", "b"), "regex and choice each say what the text may be"),
        (("--json-schema", str(broken)), "is not a JSON Schema: Expecting"),
        (("--json-schema", str(tmp_path / "none")), "cannot be read: No such file"),
        (("--grammar", str(latin)), "byte 7 (0xe9) is out of place"),
    ):
        result = cli("generate", "Once", *flags)
        assert (result.code, result.out) == (2, "")
        assert message in result.err
        assert result.err.count("\n") == 1
