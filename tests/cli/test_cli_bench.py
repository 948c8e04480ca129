"""The figures of `onward bench` are what their names say."""

import json

import pytest
from command_line import Cli

import onward
from onward import native
from onward.cli.bench import bytes_per_token, measure

SHORT = ["--prompt-tokens", "6", "--new-tokens", "4", "--rounds", "2"]
KERNELS = pytest.mark.skipif(native.library() is None, reason="no native library was built")


def test_json_equals_the_text_output(cli: Cli, lm: onward.LanguageModel) -> None:
    result = cli("bench", *SHORT, "--json")
    found = json.loads(result.out)
    assert (result.code, result.err) == (0, "")
    assert set(found) == {"machine", "model", "speed"}
    assert found["model"]["weights_bytes"] == lm.model.nbytes
    speed = found["speed"]
    assert (speed["prompt_tokens"], speed["new_tokens"], speed["rounds"]) == (6, 4, 2)
    for name in ("read_bandwidth_gb_s", "prefill_tokens_s", "decode_tokens_s", "of_the_limit", "first_request_s"):
        assert speed[name] > 0
    rate = speed["read_a_token_bytes"] * speed["decode_tokens_s"] / speed["read_bandwidth_gb_s"] / 1e9
    assert speed["of_the_limit"] == pytest.approx(rate, abs=0.006), "each is rounded"


@KERNELS
def test_the_profile_is_that_of_the_program(cli: Cli) -> None:
    shown = cli("bench", *SHORT, "--profile").out
    assert "a token after 6\nbackend native\n" in shown
    assert "a prompt of 6\nbackend native\n" in shown
    found = json.loads(cli("bench", *SHORT, "--profile", "--json").out)
    assert max(found["token_profile"], key=lambda row: row["nbytes"])["kernel"] == "linear_many"
    assert all(row["seconds"] >= 0 for row in found["prompt_profile"])


@KERNELS
def test_bytes_per_token_are_all_weights_and_one_embedding_row(lm: onward.LanguageModel) -> None:
    weights, cache = bytes_per_token(lm, 99)
    assert cache == lm.new_cache(1, 100).nbytes
    table = lm.model.params.embed_tokens.weight  # tied: the head's own
    assert weights == lm.model.nbytes + table.inputs * table.dtype.itemsize


def test_runs_are_counted(lm: onward.LanguageModel) -> None:
    speed = measure(lm, prompt_tokens=5, new_tokens=7, rounds=3)
    assert (len(speed.prefill), len(speed.token), len(speed.bandwidth)) == (3, 3 * 6, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--new-tokens", "1"], "--new-tokens must be a whole number of 2 or more; got 1"),
        (["--prompt-tokens", "0"], "--prompt-tokens must be a whole number of 1 or more; got 0"),
        (["--rounds", "0"], "--rounds must be a whole number of 1 or more; got 0"),
        (["--prompt-tokens", "100000"], "context"),
        (["--compile", "fast"], "--compile must be one of auto, native, cuda, inductor, eager; got 'fast'"),
    ],
)
def test_unmeasurable_requests(cli: Cli, arguments: list[str], message: str) -> None:
    result = cli("bench", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_eager_is_measured_too(cli: Cli) -> None:
    found = json.loads(cli("bench", *SHORT, "--compile", "eager", "--json").out)
    assert found["model"]["backend"] == "eager"
    assert found["speed"]["decode_tokens_s"] > 0
