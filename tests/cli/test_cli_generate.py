"""`onward generate` prints the text of `lm.generate`."""

import dataclasses
import json
from pathlib import Path

import pytest
from command_line import Cli

import onward
from onward.cli.inputs import generate_options
from onward.cli.option_flags import SamplingFlags

PROMPT = "Once upon a time"
SAMPLED = ("-n", "24", "-t", "0.9", "--top-k", "50", "--top-p", "0.95", "--min-p", "0.01", "--seed", "7")
OPTIONS = {"max_new_tokens": 24, "temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "seed": 7}


def completed(lm: onward.LanguageModel, prompt: str | list[int], **options: object) -> onward.Completion:
    completion = lm.generate(prompt, **options)
    assert isinstance(completion, onward.Completion)
    return completion


def test_piped_output_is_exactly_the_text(cli: Cli, lm: onward.LanguageModel) -> None:
    assert cli("generate", PROMPT, *SAMPLED) == (0, completed(lm, PROMPT, **OPTIONS).text, "")


def test_omitted_options_use_the_checkpoints_defaults(cli: Cli, loaded: onward.LanguageModel) -> None:
    assert cli("generate", PROMPT, "--seed", "3").out == completed(loaded, PROMPT, seed=3).text


def test_stop_excludes_the_string_and_eos_ends_at_the_id(cli: Cli, loaded: onward.LanguageModel) -> None:
    whole = completed(loaded, PROMPT, temperature=0, max_new_tokens=24)
    stop, eos = whole.text[5:8], whole.token_ids[4]
    greedy = ("generate", PROMPT, "-t", "0", "-n", "24")
    assert cli(*greedy, "--stop", "never said", "--stop", stop).out == whole.text[: whole.text.index(stop)]
    ended = json.loads(cli(*greedy, "--eos", str(eos), "--json").out)
    (ended,) = ended["choices"]
    assert [token["id"] for token in ended["tokens"]] == whole.token_ids[: whole.token_ids.index(eos) + 1]
    assert ended["finish_reason"] == "stop"
    assert ended["stopped_by"] == eos
    ignored = json.loads(cli(*greedy, "--eos", str(eos), "--ignore-eos", "--json").out)
    assert ignored["choices"][0]["finish_reason"] == "length"
    assert ignored["choices"][0]["stopped_by"] is None


@pytest.mark.parametrize("words", [PROMPT, "two\nlines", "ends in a newline\n", "Ünïcode ✓"])
def test_a_prompt_is_the_same_from_every_source(
    cli: Cli, loaded: onward.LanguageModel, tmp_path: Path, words: str
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(f"{words}\n".encode())
    ask = ("generate", "--json", "-n", "4", "--seed", "1")
    ways = [
        cli(*ask, words),
        cli(*ask, "--file", str(file)),
        cli(*ask, input=f"{words}\n"),
        cli(*ask, input=f"{words}\r\n"),
        cli(*ask, "-", input=f"{words}\n"),
        cli(*ask, "-f", "-", input=f"{words}\n"),
    ]
    assert {way.code for way in ways} == {0}
    answers = [json.loads(way.out) for way in ways]
    cached = []
    for answer in answers:
        del answer["choices"][0]["timing"]
        cached.append(answer.pop("cached_tokens"))
    assert cached[1:] == [answers[0]["prompt_tokens"] - 1] * 5, "but for its last id the prompt is known by now"
    assert all(answer == answers[0] for answer in answers)
    assert answers[0]["prompt_tokens"] == len(loaded.encode(words))


def test_json_has_the_completion(cli: Cli, loaded: onward.LanguageModel) -> None:
    result = cli("generate", PROMPT, *SAMPLED, "--json")
    output = json.loads(result.out)
    want = completed(loaded, PROMPT, **OPTIONS)
    (choice,) = output.pop("choices")
    assert output.pop("cached_tokens") in (0, want.prompt_tokens - 1)
    assert output == {"text": want.text, "prompt_tokens": want.prompt_tokens}
    assert set(choice.pop("timing")) == {
        *("prefill_ms", "total_ms", "tokens_per_second"),
        *("median_ms_per_token", "worst_ms_per_token"),
    }
    tokens = choice.pop("tokens")
    assert [token["id"] for token in tokens] == want.token_ids
    assert "".join(token["text"] for token in tokens) == loaded.decode(want.token_ids)
    named = ("text", "finish_reason", "stopped_by", "seed", "score", "speculation")
    assert choice == {name: getattr(want, name) for name in named}
    assert result.out.count("\n") == 1
    assert result.err == ""


def test_ids_in_and_ids_out(cli: Cli, loaded: onward.LanguageModel) -> None:
    ids = loaded.encode(PROMPT)
    want = completed(loaded, ids, temperature=0, max_new_tokens=6).token_ids
    spaced, as_list = " ".join(map(str, ids)), json.dumps(ids)
    for prompt in (spaced, as_list):
        assert cli("generate", "--ids", prompt, "-t", "0", "-n", "6").out == " ".join(map(str, want))


def test_a_model_without_tokenizer_prints_ids(cli: Cli, tmp_path: Path) -> None:
    folder = onward.testing.random_checkpoint(tmp_path)
    ids = cli("generate", "--ids", "1 2 3", "-n", "5", "--seed", "2", "-t", "1", "-m", str(folder)).out.split()
    assert [int(word) for word in ids] == completed(
        onward.load(folder), [1, 2, 3], max_new_tokens=5, seed=2, temperature=1
    ).token_ids


def test_chat_wraps_the_prompt_in_the_template(cli: Cli, loaded: onward.LanguageModel) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ask = ("generate", "--chat", "-n", "12", "--seed", "5")
    assert cli(*ask, "Hi").out == loaded.chat(messages[1:], max_new_tokens=12, seed=5).text
    assert cli(*ask, "Hi", "--system", "Be brief.").out == loaded.chat(messages, max_new_tokens=12, seed=5).text


def test_zero_tokens_print_nothing(cli: Cli, loaded: onward.LanguageModel) -> None:
    assert cli("generate", PROMPT, "-n", "0") == (0, "", "")


def test_dtype_and_context_reach_the_model(cli: Cli) -> None:
    assert cli("generate", PROMPT, "-n", "3", "--dtype", "float32", "--max-seq-len", "64").code == 0
    assert "holds 5" in cli("generate", PROMPT, "-n", "3", "--max-seq-len", "5").err


def test_every_sampling_option_is_a_flag() -> None:
    flags = {field.name: field.default for field in dataclasses.fields(SamplingFlags)}
    for_code = {"logit_bias", "dry_sequence_breakers"}
    of_texts = {"max_new_tokens", "stop", "reasoning_budget", "reasoning_budget_message"}
    assert set(flags) | for_code == {field.name for field in dataclasses.fields(onward.SamplingParams)} | of_texts
    assert generate_options(SamplingFlags()) == {}


def test_zeros_are_passed_on_and_stop_strings_are_literal() -> None:
    flags = SamplingFlags(temperature=0.0, top_k=0, seed=0, max_new_tokens=0, stop=["\\n"], eos=[0])
    assert generate_options(flags) == {
        "temperature": 0.0,
        "top_k": 0,
        "seed": 0,
        "max_new_tokens": 0,
        "stop": ["\\n"],
        "eos": [0],
    }
