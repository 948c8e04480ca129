"""What a draw costs: temperature, top-k, top-p and min-p over a vocabulary of 151,936, batch 1.

    python -m benchmarks.sampling [--repeats N] [--vocab V] [--token-ms MS]

Logits are normal with several spreads, because the cost depends on how flat the distribution is: 0.5 gives a nucleus
of most of the vocabulary, 8 one of a few ids. Before each draw the logits are written, as a model's head does. Greedy
decoding (the argmax alone) is what a draw is compared with. Ends in one JSON line.
"""

import json
import statistics
import time

import torch

from benchmarks.kernels.common import argument_parser, begin
from onward import Sampler, SamplingParams

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


def main() -> None:
    parser = argument_parser(__doc__, repeats=200)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--token-ms", type=float, default=9.0, help="what a token of the int8 0.6B model takes")
    options = parser.parse_args()
    _, result = begin()
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
