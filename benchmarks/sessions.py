"""The time that a session saves in a chat, and the cost of saving a session in a file.

    python -m benchmarks.sessions [--large] [--turns N] [--quantize FORMAT]

Each turn adds 60 ids to the text and generates 24, first with a session and then with a call without one; their tokens
are compared. Then the session is saved and loaded. --large: random weights in the shape of Qwen3-0.6B instead of the
demo model. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import onward
from benchmarks.checkpoints import random_checkpoint
from benchmarks.machine import description

ASKED, ANSWERED = 60, 24


def timed(call: Callable[[], object], repeats: int = 5) -> float:
    """Median milliseconds of a call."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def chat(lm: onward.LanguageModel, turns: int) -> tuple[onward.Session, list[dict[str, float]]]:
    """A session after `turns` turns, and for each turn the number of processed ids and the time."""
    options = {"max_new_tokens": ANSWERED, "temperature": 0.0, "ignore_eos": True}
    generator = torch.Generator().manual_seed(0)
    lm.prefix_memory = 0  # a fresh call is to process all of its prompt
    session, text, rows = onward.Session(lm), [], []
    lm.generate([1] * ASKED, **options)  # warm up
    for turn in range(1, turns + 1):
        text += torch.randint(0, lm.model.vocab_size, (ASKED,), generator=generator).tolist()
        ours, fresh = session.generate(text, **options), lm.generate(text, **options)
        assert ours.token_ids == fresh.token_ids, "a session gives the tokens of a fresh call"
        rows.append(
            {
                "turn": turn,
                "prompt": len(text),
                "processed": len(text) - ours.cached_tokens,
                "session_ms": ours.timing.prefill_ms,
                "fresh_ms": fresh.timing.prefill_ms,
            }
        )
        text += ours.token_ids
    return session, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--quantize")
    arguments = parser.parse_args()
    lm = onward.load(random_checkpoint() if arguments.large else "demo", quantize=arguments.quantize)
    print(description())
    session, rows = chat(lm, arguments.turns)
    print(f"{'turn':>6}{'prompt':>9}{'processed':>11}{'session ms':>12}{'fresh ms':>10}")
    for row in rows:
        print(
            f"{row['turn']:>6}{row['prompt']:>9}{row['processed']:>11}{row['session_ms']:>12.1f}{row['fresh_ms']:>10.1f}"
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "session"
        saved_ms = timed(lambda: session.save(file))
        loaded_ms = timed(lambda: onward.Session.load(file, lm))
        nbytes = os.path.getsize(file)
    length = len(session.tokens)
    print(f"file of {length} tokens: {nbytes / 1e6:.1f} MB, saved in {saved_ms:.0f} ms, loaded in {loaded_ms:.0f} ms")
    print(json.dumps({"turns": rows, "tokens": length, "bytes": nbytes, "save_ms": saved_ms, "load_ms": loaded_ms}))


if __name__ == "__main__":
    main()
