"""The cost of a JSON schema: one text in the shape of Qwen3-0.6B in int8, with a schema and without.

    python -m benchmarks.structured [--tokens 200] [--rounds 7]

"text": a schema of one long string, in which nothing is forced, so every token needs a mask. "records": an array of
objects with long keys, whose ids are forced and drafted. A vocabulary of the model's size is trained once on the
sources of the installed packages, in two minutes. The three alternate; ratios are taken within a turn. The last line is
one JSON object.
"""

import argparse
import json
import statistics
import time
from typing import Any

import onward
from benchmarks.checkpoints import random_checkpoint, trained_tokenizer
from benchmarks.machine import bandwidth_buffer, description, read_bandwidth
from onward.tokenizer.tokenizer import JsonTokenizer

RECORD = {
    "type": "object",
    "properties": {
        "temperature_of_the_room": {"type": "integer", "minimum": 10, "maximum": 99},
        "humidity_of_the_air": {"type": "integer", "minimum": 10, "maximum": 99},
        "position_of_the_window": {"enum": ["open", "closed"]},
    },
    "required": ["temperature_of_the_room", "humidity_of_the_air", "position_of_the_window"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "none": None,
    "text": {"type": "string", "minLength": 20_000},
    "records": {"type": "array", "items": RECORD, "minItems": 500},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    lm = with_vocabulary()
    for schema in SCHEMAS.values():  # compiled, and the kernels' pages touched
        timed(lm, schema, 16)
    seconds: dict[str, list[float]] = {name: [] for name in SCHEMAS}
    buffer, bandwidths = bandwidth_buffer(), []
    for _ in range(options.rounds):
        bandwidths.append(read_bandwidth(buffer) / 1e9)
        for name, schema in SCHEMAS.items():
            seconds[name].append(timed(lm, schema, options.tokens))
    figures = {
        "machine": description(),
        "read_GB_s": round(statistics.median(bandwidths), 1),
        "ms_a_token": {name: round(statistics.median(s) / options.tokens * 1e3, 2) for name, s in seconds.items()},
        "beside_none": {
            name: round(statistics.median(a / b for a, b in zip(s, seconds["none"], strict=True)), 3)
            for name, s in seconds.items()
        },
    }
    print(json.dumps(figures))


def with_vocabulary() -> onward.LanguageModel:
    """The random checkpoint in int8, with a vocabulary of texts."""
    tokenizer = JsonTokenizer(trained_tokenizer(), {"eos_token": "<|endoftext|>"})
    return onward.LanguageModel(onward.load(random_checkpoint(), quantize="int8").model, tokenizer=tokenizer)


def timed(lm: onward.LanguageModel, schema: Any, tokens: int) -> float:
    """Seconds from the first new token to the last."""
    options: dict[str, Any] = {"ignore_eos": True} if schema is None else {"json_schema": schema}
    first = last = 0.0
    got = 0
    for _ in lm.stream([1, 2, 3, 4], max_new_tokens=tokens, temperature=0, **options):
        last = time.perf_counter()
        first = first or last
        got += 1
    assert got == tokens, f"the text ended after {got} tokens"
    return last - first


if __name__ == "__main__":
    main()
