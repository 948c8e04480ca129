"""Prompts as JSON Lines: each line is answered as it would be alone, and a bad one stops no other."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, Result

import onward

OPTIONS = {"max_new_tokens": 8, "temperature": 0.9, "seed": 7}
FLAGS = ("-n", "8", "-t", "0.9", "--seed", "7")


def as_lines(*objects: object) -> str:
    return "".join(f"{json.dumps(one)}\n" for one in objects)


def answers(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.out.splitlines()]


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_a_line_is_answered_as_it_would_be_alone(cli: Cli, loaded: onward.LanguageModel, batch: int) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    ids = loaded.encode("The end")
    lines = [
        {"prompt": "Once upon a time", "id": "first"},
        {"prompt": ids, "temperature": 0},
        {"messages": messages, "seed": 3, "max_new_tokens": 4, "id": 3},
    ]
    result = cli("generate", "--jsonl", "-", "--batch", str(batch), *FLAGS, input=as_lines(*lines))
    assert (result.code, result.err) == (0, "")
    want = [
        loaded.generate("Once upon a time", **OPTIONS),
        loaded.generate(ids, **OPTIONS | {"temperature": 0}),
        loaded.chat(messages, **OPTIONS | {"seed": 3, "max_new_tokens": 4}),
    ]
    assert [answer["text"] for answer in answers(result)] == [one.text for one in want]
    assert [answer["index"] for answer in answers(result)] == [0, 1, 2]
    assert [answer.get("id") for answer in answers(result)] == ["first", None, 3]


def test_the_fields_are_those_of_json(cli: Cli, loaded: onward.LanguageModel, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n" + as_lines({"prompt": "Once"}))
    ask = ("--samples", "2", "--logprobs", "1", *FLAGS)
    (line,) = answers(cli("generate", "--jsonl", str(file), *ask))
    alone = json.loads(cli("generate", "Once", "--json", *ask).out)
    for choice in (*line["choices"], *alone["choices"]):
        del choice["timing"]
    assert line == {"index": 0} | alone


def test_a_bad_line_is_an_error_and_the_others_go_on(cli: Cli, loaded: onward.LanguageModel) -> None:
    bad = [
        ("{", "no JSON"),
        ("\xff", "no JSON"),
        ("[1]", "must be a JSON object"),
        ('{"id": 5}', "one of them"),
        ('{"prompt": "a", "messages": []}', "one of them"),
        ('{"prompt": 5}', "a text or a list of ids"),
        ('{"prompt": [99999999]}', "99999999"),
        ('{"prompt": "a", "temprature": 1}', "did you mean temperature"),
        ('{"prompt": "a", "temperature": -1}', "temperature"),
        ('{"prompt": "a", "n": 2, "temperature": 0}', "n=2 with temperature 0"),
        ('{"prompt": "a", "beams": 2, "draft": "lookup"}', "a beam search cannot use a draft"),
        ('{"prompt": "a", "cancel": true}', "cancel must be a threading.Event"),
        ('{"messages": [5]}', "list of objects"),
        ('{"messages": [{"role": "user", "content": "a"}], "tols": 5}', "unknown option 'tols'"),
        (json.dumps({"prompt": "word " * 3000}), "1024"),
    ]
    good = '{"prompt": "Once"}'
    text = "\n".join([good, *(line for line, _ in bad), good])
    result = cli("generate", "--jsonl", "-", *FLAGS, input=text.encode("latin-1"))
    first, *middle, last = answers(result)
    assert (result.code, first["text"]) == (2, last["text"])
    for answer, (line, message) in zip(middle, bad, strict=True):
        assert message in answer["error"], line
        assert set(answer) <= {"index", "id", "error"}
    assert middle[3]["id"] == 5


def test_a_line_may_name_every_option(cli: Cli, loaded: onward.LanguageModel) -> None:
    """Also those that shape a whole call: how many texts, beams, what is reported, a draft."""
    own: list[dict[str, Any]] = [
        {"n": 2, "temperature": 1.0, "seed": 3},
        {"beams": 2, "n": 2, "max_new_tokens": 4},
        {"logprobs": 1, "prompt_logprobs": 0, "temperature": 0},
        {"draft": "lookup", "temperature": 0},
    ]
    said = answers(
        cli("generate", "--jsonl", "-", "-n", "6", input=as_lines(*({"prompt": "Once"} | one for one in own)))
    )
    for answer, options in zip(said, own, strict=True):
        alone = loaded.generate("Once", **{"max_new_tokens": 6, "draft": None} | options)
        assert [choice["text"] for choice in answer["choices"]] == [one.text for one in alone.choices]
        for choice in answer["choices"]:
            assert (choice["speculation"] is not None) == ("draft" in options)
            assert all(("logprob" in token) == ("logprobs" in options) for token in choice["tokens"])
        assert ("prompt" in answer) == ("prompt_logprobs" in options)


def test_a_text_that_cannot_be_finished_leaves_the_others(cli: Cli, loaded: onward.LanguageModel) -> None:
    """Bans that leave no id show only while the text runs."""
    every = [[token] for token in range(loaded.model.vocab_size)]
    lines = as_lines({"prompt": "Once"}, {"prompt": "Once", "bad_words": every})
    good, bad = answers(cli("generate", "--jsonl", "-", *FLAGS, input=lines))
    assert good["text"] == loaded.generate("Once", **OPTIONS).text
    assert "error" in bad


def test_prompts_are_questions_with_chat(cli: Cli, loaded: onward.LanguageModel) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    result = cli(
        "generate", "--jsonl", "-", "--chat", "--system", "Be brief.", *FLAGS, input=as_lines({"prompt": "Hi"})
    )
    assert answers(result)[0]["text"] == loaded.chat(messages, **OPTIONS).text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("a prompt", "--jsonl", "-"), "leave out PROMPT"),
        (("--jsonl", "-", "--ids"), "leave out PROMPT"),
        (("--jsonl", "-", "--batch", "0"), "--batch must be 1 or more"),
        (("--jsonl", "/no/such/file"), "No such file"),
    ],
)
def test_contradictions_are_one_line(
    cli: Cli, loaded: onward.LanguageModel, flags: tuple[str, ...], message: str
) -> None:
    result = cli("generate", *flags)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err
