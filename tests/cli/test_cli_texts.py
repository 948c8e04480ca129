"""Several texts, beams, logprobs and scores on the command line equal those in Python."""

import dataclasses
import json

import pytest
from command_line import Cli

import onward
from onward.cli.inputs import generate_options
from onward.cli.option_flags import GenerateFlags, SamplingFlags

PROMPT = "Once upon a time"
SAMPLED = ("-n", "10", "-t", "0.9", "--seed", "7")
OPTIONS = {"max_new_tokens": 10, "temperature": 0.9, "seed": 7}


def test_samples_are_separated(cli: Cli, loaded: onward.LanguageModel) -> None:
    texts = [one.text for one in loaded.generate(PROMPT, n=3, **OPTIONS).choices]
    assert cli("generate", PROMPT, *SAMPLED, "--samples", "3") == (0, "\n---\n".join(texts), "")
    assert cli("generate", PROMPT, *SAMPLED, "--samples", "1").out == texts[0]


def test_beams_print_the_best_text_or_n_texts(cli: Cli, loaded: onward.LanguageModel) -> None:
    found = loaded.generate(PROMPT, beams=3, n=2, length_penalty=0.5, max_new_tokens=8)
    ask = ("generate", PROMPT, "-n", "8", "--beams", "3", "--length-penalty", "0.5")
    assert cli(*ask).out == found.text
    assert cli(*ask, "--samples", "2").out == "\n---\n".join(one.text for one in found.choices)
    ids = " ".join(map(str, loaded.encode(PROMPT)))
    assert cli("generate", ids, *ask[2:], "--ids").out == " ".join(map(str, found.token_ids))
    output = json.loads(cli(*ask, "--samples", "2", "--json").out)
    assert [choice["score"] for choice in output["choices"]] == [one.score for one in found.choices]


def test_json_has_logprobs_as_objects(cli: Cli, loaded: onward.LanguageModel) -> None:
    found = loaded.generate(PROMPT, n=2, logprobs=2, prompt_logprobs=0, **OPTIONS)
    asked = ("--samples", "2", "--logprobs", "2", "--prompt-logprobs", "0")
    output = json.loads(cli("generate", PROMPT, *SAMPLED, *asked, "--json").out)
    for one, want in zip(output["choices"], found.choices, strict=True):
        assert [token["id"] for token in one["tokens"]] == want.token_ids
        assert [token["logprob"] for token in one["tokens"]] == [token.chosen for token in want.logprobs or []]
        tops = [[(top["id"], top["logprob"]) for top in token["top"]] for token in one["tokens"]]
        assert tops == [list(token.top) for token in want.logprobs or []]
        # In many places the drawn token is one of the most likely ones, and is written as in the text.
        pairs = [(token, top) for token in one["tokens"] for top in token["top"] if top["id"] == token["id"]]
        assert pairs
        assert all(token["text"] == top["text"] for token, top in pairs)
    assert output["prompt"][0]["logprob"] is None
    assert "".join(token["text"] for token in output["prompt"]) == PROMPT
    assert [token["id"] for token in output["prompt"]] == loaded.encode(PROMPT)
    logprobs = [token and token.chosen for token in found.prompt_logprobs or []]
    assert [token["logprob"] for token in output["prompt"]] == logprobs


def test_json_has_the_sampling_logprobs(cli: Cli, loaded: onward.LanguageModel) -> None:
    found = loaded.generate(PROMPT, logprobs=0, sampling_logprobs=True, **OPTIONS)
    output = json.loads(cli("generate", PROMPT, *SAMPLED, "--logprobs", "0", "--sampling-logprobs", "--json").out)
    pairs = [(token["sampling_logprob"], token["support"]) for token in output["choices"][0]["tokens"]]
    assert pairs == [(token.sampling, token.support) for token in found.logprobs or []]
    assert len({support for _, support in pairs}) > 1


def test_an_impossible_token_is_null_in_json() -> None:
    from onward.cli.generate import json_fields
    from onward.sampling import TokenLogprobs

    timing = onward.Timing(0.0, [], 0.0, 0.0)
    one = onward.Completion("", [1], "length", timing, 1, logprobs=[TokenLogprobs(float("-inf"), ((2, 0.0),))])
    (choice,) = json_fields(one, [5], None)["choices"]
    assert choice["tokens"] == [{"id": 1, "logprob": None, "top": [{"id": 2, "logprob": 0.0}]}]
    assert choice["timing"]["worst_ms_per_token"] is None


def test_a_character_of_several_tokens_belongs_to_the_last_one(lm: onward.LanguageModel) -> None:
    from onward.cli.generate import json_fields

    ids = lm.encode("a ✓ 🙂", add_special_tokens=False)
    timing = onward.Timing(0.0, [], 0.0, 0.0)
    whole, part = (
        json_fields(onward.Completion("", some, "length", timing, 1), [], lm.tokenizer)["choices"][0]["tokens"]
        for some in (ids, ids[:-1])
    )
    assert len(ids) > len("a ✓ 🙂")
    assert "".join(token["text"] for token in whole) == "a ✓ 🙂"
    assert "".join(token["text"] for token in part) == lm.decode(ids[:-1])


def test_a_time_limit_ends_a_text(cli: Cli, lm: onward.LanguageModel) -> None:
    output = json.loads(cli("generate", PROMPT, "-n", "50", "--time-limit", "1e-9", "--json").out)
    (choice,) = output["choices"]
    assert (choice["finish_reason"], len(choice["tokens"])) == ("time", 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--samples", "0", "-t", "0"), "must be a whole number of 1 or more"),
        (("--beams", "2", "-t", "1"), "leave out temperature"),
        (("--beams", "2", "--samples", "3"), "--samples is 3, but 2 beams find 2 texts"),
        (("--length-penalty", "2"), "has no effect without a beam search"),
        (("--logprobs", "2"), "--logprobs and --prompt-logprobs need --json: add it"),
        (("--sampling-logprobs", "--json"), "--sampling-logprobs has no effect without logprobs"),
        (("--time-limit", "0"), "--time-limit must be a number of seconds above 0"),
    ],
    ids=str,
)
def test_contradictions_are_one_line(cli: Cli, lm: onward.LanguageModel, flags: tuple[str, ...], message: str) -> None:
    result = cli("generate", PROMPT, *flags)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert result.err.count("\n") == 1


def test_every_option_of_a_call_is_a_flag_or_python_only() -> None:
    flags = {field.name for group in (GenerateFlags, SamplingFlags) for field in dataclasses.fields(group)}
    for_code = {"early_stopping", "stop_when", "cancel", "logit_bias", "dry_sequence_breakers", "constraint"}
    for_code |= {"taps", "prompt_embeds", "cache_salt"}
    spoken_for = {"draft", "adapter"}  # flags of their own, for they load something
    assert flags | for_code == {field.name for field in dataclasses.fields(onward.GenerateOptions)} - spoken_for
    assert generate_options(SamplingFlags(), GenerateFlags()) == {}


def test_a_score_is_printed_as_text_and_json(cli: Cli, loaded: onward.LanguageModel) -> None:
    found = loaded.score(PROMPT)
    tokens = len(found.token_ids) - 1
    want = f"perplexity {found.perplexity:.6g} · log-likelihood {found.log_likelihood:.6g} · {tokens} tokens\n"
    assert cli("score", PROMPT) == (0, want, "")
    assert cli("score", input=f"{PROMPT}\n").out == want
    assert cli("score", "--ids", " ".join(map(str, found.token_ids))).out == want
    output = json.loads(cli("score", PROMPT, "--json").out)
    assert output == {"perplexity": found.perplexity, "log_likelihood": found.log_likelihood, "tokens": tokens}
    assert "must have at least 2 ids" in cli("score", "--ids", "5").err


def test_a_text_longer_than_the_context_is_scored_in_windows(cli: Cli) -> None:
    text = "Once upon a time there was a little dragon who lived in a cave."
    ask = ("score", text, "--json", "--max-seq-len", "8")
    assert "holds 8" in cli(*ask).err
    output = json.loads(cli(*ask, "--stride", "4").out)
    found = onward.load("demo", max_seq_len=8).score(text, stride=4)
    assert (output["log_likelihood"], output["tokens"]) == (found.log_likelihood, len(found.token_ids) - 1)
