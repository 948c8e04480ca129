"""A model with experts: decoding compared with the machine's read bandwidth, and a prefill of 512 tokens.

    python -m benchmarks.experts [--precisions bf16 int8 int4] [--rounds N]

Random weights, made in memory: 28 layers of hidden size 1024 with the attention of Qwen3-0.6B and 64 experts of width
384, of which each token uses 8. The bandwidth is measured between the prompts. The limit is the bandwidth divided by
the bytes that a token reads, including only the chosen experts. Medians over all rounds. The last line is one JSON
object.
"""

import argparse
import json
import statistics
from typing import Any

import onward
from benchmarks.checkpoints import EXPERTS, cache_bytes, weight_bytes_per_token
from benchmarks.decode import NEW_TOKENS, PROMPTS, measure, onward_contestant
from benchmarks.drawn import random_model
from benchmarks.machine import description


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--explain", action="store_true", help="print where the time of a token goes")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": description()}
    for precision in arguments.precisions:
        model = random_model(precision, EXPERTS)
        lm = onward.LanguageModel(model)
        samples, bandwidth = measure({"onward": onward_contestant(lm)}, arguments.rounds, model.vocab_size)
        limit, weights = statistics.median(bandwidth), weight_bytes_per_token(EXPERTS, precision)
        row = result[precision] = {"read_bandwidth_gb_s": round(limit / 1e9, 1), "weight_bytes_per_token": weights}
        for length in PROMPTS:
            seconds = statistics.median(samples["onward"].token[length])
            read = weights + cache_bytes(length + NEW_TOKENS // 2, EXPERTS)
            row[f"decode_after_{length}"] = round(1 / seconds, 2)
            row[f"share_of_limit_after_{length}"] = round(read / seconds / limit, 3)
            row[f"prefill_{length}"] = round(length / statistics.median(samples["onward"].prefill[length]), 1)
        print(precision, row, flush=True)
        if arguments.explain:
            print(lm.explain())
            print(lm.explain(tokens=512))
        del lm, model
    print(json.dumps(result))


if __name__ == "__main__":
    main()
