"""`onward bench`: measure a model's speed on this machine, relative to the memory bandwidth."""

import dataclasses
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import typer

from onward.cli.flags import AS_JSON, MEASUREMENT, ModelFlags, SourceArgument, flag, with_source
from onward.cli.info import Fact, as_object, kernel_facts, machine_facts, print_sections
from onward.cli.inputs import load_model
from onward.cli.terminal import waiting
from onward.native import last_level_cache_bytes
from onward.util.options import OUTPUT
from onward.util.text import in_bytes

if TYPE_CHECKING:
    from onward.language_model import LanguageModel
    from onward.program import Report


def bench(
    source: SourceArgument = None,
    *,
    prompt_tokens: int = flag("Length of the random prompts in tokens.", group=MEASUREMENT, default=128, low=1),
    new_tokens: int = flag("Number of tokens to generate per prompt.", group=MEASUREMENT, default=64, low=2),
    rounds: int = flag("Number of prompts; the results are medians.", group=MEASUREMENT, default=5, low=1),
    profile: bool = flag("Also print the time per kernel.", group=OUTPUT, default=False),
    as_json: bool = AS_JSON,
    model: ModelFlags,
) -> None:
    """Measure prefill and decode speed.

    Decoding one text reads all weights for every token, so its speed is
    limited by memory bandwidth. The command measures the bandwidth as well,
    and prints how close decoding comes to it.
    """
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
        measurements = as_object(sections) | {
            f"{name}_profile": [dataclasses.asdict(row) for row in report.rows] for name, report in reports.items()
        }
        typer.echo(json.dumps(measurements, ensure_ascii=False).encode())
        return
    print_sections(sections)
    for name, report in reports.items():
        title = f"a token after {prompt_tokens}" if name == "token" else f"a prompt of {prompt_tokens}"
        typer.echo(f"\n{typer.style(title, bold=True)}\n{report}")


def _model_facts(lm: "LanguageModel", flags: ModelFlags, report: "Report") -> list[Fact]:
    backend = report.backend + (f" ({report.note})" if report.note else "")
    return [
        Fact("source", flags.model),
        Fact("quantize", flags.quantize),
        Fact("weights_bytes", lm.model.nbytes, in_bytes(lm.model.nbytes)),
        Fact("backend", report.backend, backend),
        Fact("run_by_torch", len(report.missing)),
    ]


def _speed_facts(lm: "LanguageModel", speed: "Speed", prompt: int, new: int) -> list[Fact]:
    prefill, token, bandwidth = map(statistics.median, (speed.prefill, speed.token, speed.bandwidth))
    weights, cache = bytes_per_token(lm, prompt + new // 2)
    fraction = (weights + cache) / token / bandwidth
    in_cache = weights + cache <= last_level_cache_bytes()
    share = "fits the processor's cache, no memory limit" if in_cache else f"{fraction:.0%} of a read of those bytes"
    return [
        Fact("prompt_tokens", prompt),
        Fact("new_tokens", new),
        Fact("rounds", len(speed.prefill)),
        Fact("read_bandwidth_gb_s", round(bandwidth / 1e9, 2), f"{bandwidth / 1e9:.1f} GB/s"),
        Fact("first_request_s", round(speed.first, 4), f"{speed.first:.2f} s, with compilation"),
        Fact("prefill_tokens_s", round(prompt / prefill, 1), f"{prompt / prefill:,.0f} tokens/s"),
        Fact("decode_tokens_s", round(1 / token, 2), f"{1 / token:,.1f} tokens/s, {token * 1e3:.3g} ms each"),
        Fact("read_a_token_bytes", weights + cache, f"{in_bytes(weights)} of weights, {in_bytes(cache)} of cache"),
        Fact("of_the_limit", round(fraction, 3), share),
    ]


# Larger than any cache, and small compared to a model.
_BUFFER_BYTES = 256 * 2**20


@dataclass
class Speed:
    """Measured times in seconds, per run or per decoded token, and bandwidths of memory reads in bytes per second.

    first: the first request, which also compiles the programs and is not included in the others.
    """

    first: float
    prefill: list[float] = field(default_factory=list)
    token: list[float] = field(default_factory=list)
    bandwidth: list[float] = field(default_factory=list)


def measure(lm: "LanguageModel", prompt_tokens: int, new_tokens: int, rounds: int) -> Speed:
    """Time the greedy decoding of `new_tokens` (at least 2) after random prompts of `prompt_tokens`."""
    read = _reader()

    def run(seed: int) -> tuple[float, list[float]]:
        rng = random.Random(seed)
        prompt = [rng.randrange(lm.model.vocab_size) for _ in range(prompt_tokens)]
        completion = lm.generate(prompt, max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
        assert not isinstance(completion, list)
        timing = completion.timing
        return timing.prefill_ms / 1e3, [ms / 1e3 for ms in timing.per_token_ms]

    speed = Speed(first=_seconds(lambda: run(0)))
    for seed in range(1, rounds + 1):
        speed.bandwidth.append(_BUFFER_BYTES / statistics.median(_seconds(read) for _ in range(3)))
        prefill, tokens = run(seed)
        speed.prefill.append(prefill)
        speed.token += tokens
    return speed


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _reader() -> Callable[[], object]:
    """Return a function that reads a buffer of initialized pages with the kernels' threads."""
    import torch

    from onward.ops.operator import usable_library

    buffer = torch.full((_BUFFER_BYTES,), 7, dtype=torch.uint8)
    library = usable_library()
    if library is None:
        return buffer.view(torch.int64).sum
    return lambda: library.onward_probe_read(buffer.data_ptr(), _BUFFER_BYTES, 2**20)


def bytes_per_token(lm: "LanguageModel", position: int) -> tuple[int, int]:
    """Return the bytes of weights and of KV cache that decoding the token at `position` reads."""
    from torch import Tensor
    from torch.utils import _pytree as pytree

    cache = pytree.tree_leaves(lm.new_cache(1, position + 1))
    cached = sum(leaf.nbytes for leaf in cache if isinstance(leaf, Tensor))
    rows = lm.explain(1, 1, position).rows
    return sum(row.nbytes for row in rows) or lm.model.nbytes, cached
