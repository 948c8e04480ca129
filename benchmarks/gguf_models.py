"""Onward compared with llama.cpp on the same GGUF files in the shape of Qwen3-0.6B, in one run.

    make .benchmarks/peers/llama.cpp/.installed
    python -m benchmarks.gguf_models [--recipes Q4_K_M Q8_0 Q4_0 Q6_K] [--rounds 5] [--json PATH]

Measures decoding after 32 and 512 tokens, a prefill of 512 tokens, and the time from process start to the first token.
The two alternate, and the read bandwidth is measured between them. The last line is one JSON object.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.compare.contenders import GGUF_RECIPES, OURS, NotAvailableError, gguf_contenders
from benchmarks.compare.measure import Plan, Session, contender_command, measure_precision
from benchmarks.compare.process import seconds_to_first_token
from benchmarks.machine import description

DECODES = (32, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=GGUF_RECIPES, default=list(GGUF_RECIPES))
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the JSON there too")
    options = parser.parse_args()
    plan = Plan(rounds=options.rounds, long=False)
    result: dict[str, Any] = {"machine": description(), "recipes": {}}
    for recipe in options.recipes:
        found = measured(recipe, plan)
        result["recipes"][recipe] = found
        print(recipe, *(f"  {name}: {value}" for name, value in found.items()), sep="\n", flush=True)
    line = json.dumps(result)
    if options.json:
        options.json.write_text(line + "\n")
    print(line)


def measured(recipe: str, plan: Plan) -> dict[str, Any]:
    """Tokens per second, ratios to the faster variant of llama.cpp, and Onward's share of the bandwidth in decoding."""
    contenders = []
    for contender in gguf_contenders(recipe):
        try:
            contender.model()
        except NotAvailableError as error:
            print(f"missing: {contender.label}: {error}")
        else:
            contenders.append(contender)
    size = contenders[0].model().stat().st_size
    session = measure_precision(contenders, plan)
    figures: dict[str, Any] = {"file_mb": round(size / 1e6, 1)} | rates(session, size)
    commands = {c.label: contender_command(c, plan) for c in contenders if not c.variant}
    taken = seconds_to_first_token(commands, min(plan.rounds, 3))
    return figures | {"seconds_to_first_token": {k: round(statistics.median(v), 2) for k, v in taken.items()}}


def rates(session: Session, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    ours = next(name for name in session.samples if name.startswith(OURS))
    kinds = {f"decode_after_{length}": length for length in DECODES} | {"prefill_512": 512}
    for figure, length in kinds.items():
        every = {
            name: samples.prefill_rate(length) if figure == "prefill_512" else samples.decode_rate(length)
            for name, samples in session.samples.items()
        }
        found[figure] = {name: round(rate, 1) for name, rate in every.items() if rate}
        best = max((rate for name, rate in every.items() if rate and name != ours), default=None)
        if best:
            found[f"{figure}_ratio"] = round((every[ours] or 0.0) / best, 2)
    for length in DECODES:
        turns = [statistics.median(turn) for turn in session.samples[ours].token[length]]
        shares = [size / seconds / read for seconds, read in zip(turns, session.bandwidth[length], strict=False)]
        found[f"share_of_bandwidth_{length}"] = round(statistics.median(shares), 3) if shares else None
    found["bandwidth_gb_s"] = round(statistics.median(session.readings()) / 1e9, 1)
    return found


if __name__ == "__main__":
    main()
