"""The cost of a draw: temperature, top-k, top-p and min-p over a vocabulary of 151,936, batch 1.

    python -m benchmarks.sampling [--repeats N] [--vocab V] [--token-ms MS]
    python -m benchmarks.sampling --logprobs [--threads N]

Logits are normal with several standard deviations, because the cost depends on how flat the distribution is: with 0.5
the nucleus is most of the vocabulary, with 8 a few ids. Before each draw the logits are written, as a model's head
does. A draw is compared with greedy decoding (the argmax alone). The last line is one JSON object.

--logprobs measures instead `onward.sampling.logprobs`, and `Sampler.scores` with top-p, for 1 to 2,048 rows of three
vocabularies, with 2^15 to 2^23 logits computed at once, or all of them. The bits must be equal.
"""

import json
import statistics
import time

import torch

from benchmarks.kernels.common import argument_parser, begin
from onward import Sampler, SamplingParams
from onward.sampling import logprobs, noise

OPTIONS = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_p=0.3": {"temperature": 0.8, "top_p": 0.3},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "top_k, top_p, min_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.05},
}
SPREADS = (0.0, 0.5, 2.5, 8.0)


def microseconds(sampler: Sampler, logits: torch.Tensor, repeats: int) -> float:
    taken = []
    for position in range(repeats):
        fresh = logits + 0
        at = torch.tensor([position])
        began = time.perf_counter()
        sampler(fresh, at)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e6


# Numbers of logits computed at once. 2^62: all of them.
AT_ONCE = (2**15, 2**17, 2**18, 2**19, 2**20, 2**21, 2**22, 2**23, 2**62)


def at_once(vocab: int, rows: int) -> dict[str, list[float]]:
    """Nanoseconds per logit for each of `AT_ONCE`: the best of three runs, or a single run if it takes a second."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    ids = torch.randint(0, vocab, (rows,), generator=generator)
    sampler = Sampler([SamplingParams(seed=1, temperature=0.8, top_p=0.95)] * rows)
    functions = {"logprobs": lambda: logprobs(logits, ids).chosen}
    if rows * vocab <= 2**23:
        functions["scores"] = lambda: sampler.scores(logits)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for name, function in functions.items():
        expected = function()
        for most in AT_ONCE:
            noise._MOST_AT_ONCE = most
            taken = []
            for _ in range(3):
                began = time.perf_counter()
                result = function()
                taken.append(time.perf_counter() - began)
                if taken[-1] > 1:
                    break
            assert torch.equal(result, expected)
            times[name].append(min(taken) * 1e9 / logits.numel())
    return times


def logprobs_table(result: dict[str, object]) -> None:
    default = noise._MOST_AT_ONCE
    names = [f"2^{most.bit_length() - 1}" for most in AT_ONCE[:-1]] + ["all"]
    print(f"{'ns per logit; at once':>30}" + "".join(f"{name:>8}" for name in names))
    table = []
    for vocab in (1024, 16_384, 151_936):
        for rows in (1, 8, 64, 512, 2048):
            if rows * vocab > 2**25:
                continue
            for name, times in at_once(vocab, rows).items():
                noise._MOST_AT_ONCE = default
                table.append({"vocab": vocab, "rows": rows, "what": name, "ns": dict(zip(names, times, strict=True))})
                print(f"{name:>9} [{rows:>5}, {vocab:>7}]".rjust(30) + "".join(f"{t:8.1f}" for t in times), flush=True)
    print(json.dumps(result | {"at_once": table}))


def main() -> None:
    parser = argument_parser(__doc__, repeats=200)
    parser.add_argument("--logprobs", action="store_true")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads for --logprobs")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--token-ms", type=float, default=9.0, help="what a token of the int8 0.6B model takes")
    options = parser.parse_args()
    _, result = begin()
    if options.logprobs:
        torch.set_num_threads(options.threads)
        logprobs_table(result | {"threads": options.threads})
        return
    # Here torch only writes the logits; its other threads would spin on the cores that the kernel wants.
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    rows = {}
    print(f"{'µs':>22}" + "".join(f"{f'spread {spread}':>14}" for spread in SPREADS) + f"{'most, of a token':>20}")
    greedy = 0.0
    for name, given in OPTIONS.items():
        sampler = Sampler([SamplingParams(seed=1, **given)])
        times = [
            microseconds(sampler, spread * torch.randn(1, options.vocab, generator=generator), options.repeats)
            for spread in SPREADS
        ]
        greedy = greedy or min(times)
        share = (max(times) - greedy) / (options.token_ms * 1e3)
        rows[name] = {"microseconds": dict(zip(map(str, SPREADS), times, strict=True)), "share_of_a_token": share}
        print(f"{name:>22}" + "".join(f"{t:14.0f}" for t in times) + f"{share:20.1%}")
    print(json.dumps(result | {"vocab": options.vocab, "token_ms": options.token_ms, "sampling": rows}))


if __name__ == "__main__":
    main()
