"""`onward bench`: how fast a model runs on this machine, and how much of its limit that is."""

import dataclasses
import json
import shutil
import statistics
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onward.cli.facts import Fact, as_lines, as_object
from onward.cli.flags import ModelFlags, SourceArgument, with_source
from onward.cli.loading import load_model
from onward.cli.machine import kernel_facts, machine_facts
from onward.cli.speed import Speed, bytes_per_token, measure
from onward.cli.terminal import is_terminal, waiting
from onward.errors import RequestError
from onward.native import last_level_cache_bytes
from onward.reprs import in_bytes

if TYPE_CHECKING:
    from onward import LanguageModel
    from onward.program import Report


def bench(
    source: SourceArgument = None,
    *,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", metavar="N", help="Prompts of N random ids.")] = 128,
    new_tokens: Annotated[int, typer.Option("--new-tokens", metavar="N", help="Continue each by N tokens.")] = 64,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", help="Medians over N prompts.")] = 5,
    profile: Annotated[bool, typer.Option("--profile", help="Print the time by kernel, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    model: ModelFlags,
) -> None:
    """Measure tokens per second, beside the memory's speed.

    Decoding one text reads all weights for every token, so no token can take
    less than reading them does: that limit is measured between the runs.
    """
    for name, value, least in (("prompt", prompt_tokens, 1), ("new", new_tokens, 2), ("rounds", rounds, 1)):
        if value < least:
            option = name if name == "rounds" else f"{name}-tokens"
            raise RequestError(f"--{option} must be {least} or more; got {value}")
    model = with_source(model, source)
    lm = load_model(model)
    with waiting("measuring …"):
        speed = measure(lm, prompt_tokens, new_tokens, rounds)
        token, prompt = lm.explain(1, 1, prompt_tokens), lm.explain(1, prompt_tokens)
    sections = {
        "machine": [fact for fact in machine_facts() if fact.name in ("processor", "cores")] + kernel_facts(),
        "model": _model_facts(lm, model, token),
        "speed": _speed_facts(lm, speed, prompt_tokens, new_tokens),
    }
    reports = {"token": token, "prompt": prompt} if profile else {}
    if as_json:
        measurements = as_object(sections) | {f"{name}_profile": _as_rows(report) for name, report in reports.items()}
        typer.echo(json.dumps(measurements, ensure_ascii=False).encode())
        return
    width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
    for line in as_lines(sections, width):
        typer.echo(line if line.startswith(" ") else typer.style(line, bold=True))
    for name, report in reports.items():
        what = f"a token after {prompt_tokens}" if name == "token" else f"a prompt of {prompt_tokens}"
        typer.echo(f"\n{typer.style(what, bold=True)}\n{report}")


def _model_facts(lm: "LanguageModel", flags: ModelFlags, report: "Report") -> list[Fact]:
    backend = report.backend + (f" ({report.note})" if report.note else "")
    return [
        Fact("source", flags.model),
        Fact("quantize", flags.quantize),
        Fact("weights_bytes", lm.model.nbytes, in_bytes(lm.model.nbytes)),
        Fact("backend", report.backend, backend),
        Fact("run_by_torch", len(report.missing)),
    ]


def _speed_facts(lm: "LanguageModel", speed: Speed, prompt: int, new: int) -> list[Fact]:
    prefill, token, bandwidth = map(statistics.median, (speed.prefill, speed.token, speed.bandwidth))
    weights, cache = bytes_per_token(lm, prompt + new // 2)
    fraction = (weights + cache) / token / bandwidth
    limit = Fact("of_the_limit", round(fraction, 3), f"{fraction:.0%} of a plain read of those bytes")
    if weights + cache <= last_level_cache_bytes():
        limit = Fact("of_the_limit", round(fraction, 3), "in the processor's cache: memory is no limit")
    return [
        Fact("prompt_tokens", prompt),
        Fact("new_tokens", new),
        Fact("rounds", len(speed.prefill)),
        Fact("read_bandwidth_gb_s", round(bandwidth / 1e9, 2), f"{bandwidth / 1e9:.1f} GB/s"),
        Fact("first_request_s", round(speed.first, 4), f"{speed.first:.2f} s, programs made"),
        Fact("prefill_tokens_s", round(prompt / prefill, 1), f"{prompt / prefill:,.0f} tokens/s"),
        Fact("decode_tokens_s", round(1 / token, 2), f"{1 / token:,.1f} tokens/s, {token * 1e3:.3g} ms each"),
        Fact("read_a_token_bytes", weights + cache, f"{in_bytes(weights)} of weights, {in_bytes(cache)} of cache"),
        limit,
    ]


def _as_rows(report: "Report") -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in report.rows]
